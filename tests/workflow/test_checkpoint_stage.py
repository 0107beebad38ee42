"""The restore drill: it passes where it should, and each of its checks fails where it should.

On two ranks, with every process and every kill, it passes in test_whole_workflow.py.
"""

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT, Project, project_fixture

# On one thread: each thread that saved would have a pool, more of them than there are cores.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
]
Checks = dict[str, dict[str, str]]


single = project_fixture("drilled_one", parallelism="single", checkpoint="torch_save")


several = project_fixture("drilled_many", parallelism="ddp", checkpoint="dcp_async")


class Stand:
    """A project whose drill can be run."""

    def __init__(self, project: Project, run_dir: Path, patch: pytest.MonkeyPatch) -> None:
        self.project, self.run_dir, self.patch = project, run_dir, patch
        self.recovery = project.module("workflow.recovery")
        self.drill = project.module("workflow.drill")
        self.stage = project.module("workflow.stage")
        self.config = project.config(run_dir=run_dir, train__steps=400, checkpoint__every=100)

    def in_this_process(self) -> "Stand":
        """No processes: the tasks run here, one after the other, and an error takes a kill's part.

        The save that it ends is tidied up: only a kill leaves something behind.
        """

        def child(drill: Any, ranks: int, task: str) -> dict[str, Any]:
            try:
                self.drill.main([str(drill.folder), task])
            except Exception as error:  # what ends a process is a RankError to the stage
                raise self.project.module("errors").RankError(str(error)) from error
            return json.loads((drill.folder / f"{task}.json").read_text())

        def kill() -> None:
            raise RuntimeError("killed")

        self.patch.setattr(self.recovery.Drill, "child", child)
        self.patch.setattr(self.drill, "kill_run", kill)
        self.patch.setattr(self.drill, "time_saves", lambda *arguments: {})
        self.patch.setattr(self.recovery, "conclude", lambda stage: None)
        return self

    def __call__(self) -> Checks:
        """Run the stage; its checks by name."""
        code = self.recovery.measure(self.config)
        content = self.project.module("workflow.chain").read_stage(self.run_dir, "checkpoint")
        assert code == (content["status"] == "fail")
        assert not (self.run_dir / "workflow/.drill").exists()
        self.figures = content["figures"]
        checks = {check["name"]: check for check in content["checks"]}
        assert len(content["checks"]) == len(checks) == 4
        return checks


@pytest.fixture
def on_one(single: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(single, tmp_path / "run", monkeypatch)


@pytest.fixture
def on_many(several: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(several, tmp_path / "run", monkeypatch)


def statuses(checks: Checks) -> dict[str, str]:
    return {name: check["status"] for name, check in checks.items()}


def test_it_passes_in_one_process(on_one: Stand) -> None:
    """One plain process after the other."""
    checks = on_one()
    assert statuses(checks) == {
        "roundtrip": "pass",
        "corrupt_newest": "pass",
        "reshard": "not_measured",
        "killed_while_saving": "pass",
    }
    assert "this project trains with one" in checks["reshard"]["measured"]
    assert on_one.figures["bytes"] > 100_000


def test_it_passes_with_frozen_weights_that_no_checkpoint_has(
    on_many: Stand, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    project = on_many.in_this_process().project
    training = project.module("train")
    build_model = training.build_model
    base = tmp_path / "base.safetensors"
    spec = training.build_datasets(on_many.config)[2]
    save_file(build_model(on_many.config, spec).state_dict(), base)

    def frozen(*arguments: Any) -> Any:
        model = build_model(*arguments)
        model.blocks[0].requires_grad_(False)
        return model

    on_many.patch.setattr(training, "build_model", frozen)
    left_out = {"init_from": base, "checkpoint.frozen": "no"}
    on_many.config = project.module("config").override(on_many.config, left_out)
    assert set(statuses(on_many()).values()) == {"pass"}


def test_a_restore_that_changes_one_number_is_found(on_one: Stand) -> None:
    reading = on_one.project.module("checkpoint.reader")
    read = reading.OneFile.read

    def read_almost(self: Any, targets: dict[str, Any], group: Any) -> None:
        read(self, targets, group)
        moments = (name for name in targets if name.startswith("optimizer."))
        last = max(name for name in moments if targets[name].is_floating_point())
        targets[last].view(-1)[-1].add_(1e-6)

    on_one.in_this_process().patch.setattr(reading.OneFile, "read", read_almost)
    check = on_one()["roundtrip"]
    assert check["status"] == "fail" and "1 tensors differ, such as optimizer." in check["measured"]


def test_randomness_of_its_own_is_found(on_one: Stand) -> None:
    def seed_anyhow(*words: int, device: Any) -> None:
        torch.manual_seed(random.SystemRandom().getrandbits(60))

    training = on_one.project.module("train")
    on_one.in_this_process().patch.setattr(training, "seed_random", seed_anyhow)
    override = on_one.project.module("config").override
    on_one.config = override(on_one.config, {"model.dropout": 0.2})
    check = on_one()["roundtrip"]
    assert check["status"] == "fail" and "losses differ" in check["measured"]
    assert "tensors bit for bit" in check["measured"]


def test_a_reader_that_ignores_hashes_is_found(on_one: Stand) -> None:
    manifests = on_one.project.module("checkpoint.manifest")
    on_one.in_this_process().patch.setattr(manifests, "check_file", lambda path, entry: None)
    checks = on_one()
    assert checks["roundtrip"]["status"] == "pass"
    assert checks["corrupt_newest"]["status"] == "fail"
    assert "state.pt: no warning names" in checks["corrupt_newest"]["measured"]


def test_a_restore_that_fails_fails_the_checks_that_hang_on_it(on_one: Stand) -> None:
    reading = on_one.project.module("checkpoint.reader")

    def read(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("bad day")

    on_one.in_this_process().patch.setattr(reading.OneFile, "read", read)
    found = statuses(on_one())
    assert found["roundtrip"] == found["corrupt_newest"] == "fail"
    assert on_one.figures == {} and found["reshard"] == found["killed_while_saving"] == "fail"


def test_a_damaged_run_that_is_refused_fails_the_check(on_one: Stand) -> None:
    on_one.in_this_process()
    refused = {"refused": "it does not fit"}
    on_one.patch.setattr(on_one.drill, "reload", lambda config, world, timed: refused)
    check = on_one()["corrupt_newest"]
    assert check["status"] == "fail" and "it does not fit" in check["measured"]


@pytest.mark.parametrize("fault", ["none", "differs", "refused", "breaks"])
def test_resharding_is_judged(on_many: Stand, fault: str) -> None:
    """All world sizes in one process, which shows how they are judged."""
    on_many.in_this_process()
    reload, errors, times = on_many.drill.reload, on_many.project.module("errors"), iter(range(2))

    def load_another(config: Any, world: Any, timed: bool) -> dict[str, Any]:
        found = reload(config, world, timed)
        if not timed and next(times) == 1:
            found["digests"][next(iter(found["digests"]))] = "0"
        return found

    def refuse(config: Any, world: Any, timed: bool) -> dict[str, Any]:
        if timed:
            return reload(config, world, timed)
        with on_many.patch.context() as patch:
            patch.setattr(on_many.drill, "setup", does_not_fit)
            return reload(config, world, timed)

    def does_not_fit(*arguments: Any) -> None:
        raise errors.UserError("it does not fit")

    def break_down(config: Any, world: Any, timed: bool) -> dict[str, Any]:
        if timed:
            return reload(config, world, timed)
        raise errors.RankError("it broke")

    if fault == "breaks":
        on_many.patch.setattr(on_many.drill, "reload", break_down)
    elif fault == "differs":
        on_many.patch.setattr(on_many.drill, "reload", load_another)
    elif fault == "refused":
        on_many.patch.setattr(on_many.drill, "reload", refuse)
    checks = on_many()
    wanted = {"none": "pass", "refused": "not_measured"}.get(fault, "fail")
    assert checks["reshard"]["status"] == wanted
    assert checks["roundtrip"]["status"] == checks["corrupt_newest"]["status"] == "pass"
    said = {"none": "bit for bit", "differs": "on 3: 1 tensors differ", "breaks": "it broke"}
    said["refused"] = "it does not fit"
    assert said[fault] in checks["reshard"]["measured"]


def test_a_restart_that_had_nothing_to_train_is_a_finding(on_one: Stand, tmp_path: Path) -> None:
    """The save of the killed run was published after all."""
    drill = SimpleNamespace(run_dir=tmp_path)
    drill.child, drill.ranks = lambda ranks, task: {"restart": {}, "digests": {}}, 1
    with pytest.raises(on_one.project.module("errors").RankError, match="found step 12 published"):
        on_one.recovery.Drill.restart(drill, {"digests": {}})


def test_a_crash_is_not_told_as_an_earlier_refusal(
    on_one: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = on_one.project.module("errors").RankError

    def crash(*words: object, **options: object) -> None:
        raise error("crashed")

    monkeypatch.setattr(on_one.recovery, "run_task", crash)
    (tmp_path / "reload.json").write_text('{"refused": "by one process"}')
    with pytest.raises(error, match="crashed"):
        on_one.recovery.Drill.child(SimpleNamespace(folder=tmp_path), 1, "reload")


def test_which_world_sizes_there_can_be(
    on_one: Stand, on_many: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = on_many.project.module("config").override
    for gpus, ranks, batch, sizes in (
        (0, 0, 8, (2, [1, 3])),
        (0, 1, 8, (1, [])),
        (0, 4, 8, (4, [1, 5])),
        (0, 0, 2, (2, [1, 3])),  # 3 are refused, as they cannot share the batch
        (0, 0, 1, (1, [])),
        (1, 0, 8, (1, [])),
        (2, 0, 8, (2, [1])),
        (8, 0, 8, (8, [1, 4])),
        (8, 0, 4, (4, [1, 2])),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        kind = "cuda" if gpus else "cpu"
        settings = {"workflow.ranks": ranks, "device": kind, "train.global_batch_size": batch}
        config = override(on_many.config, settings)
        found, why = on_many.recovery.most_ranks(config, torch.device(kind))
        assert (found, on_many.recovery.other_sizes(found, kind)) == sizes
        assert bool(why) == (sizes == (1, []))
    assert on_one.recovery.most_ranks(on_one.config, torch.device("cpu"))[0] == 1
    refused = on_many.project.module("errors").UserError
    for kind, ranks, batch, said in (
        ("cpu", 4, 2, "4 is too many: --train.global-batch-size is 2"),
        ("cuda", 9, 16, "9 is too many: 8 devices can be used"),
        ("cuda:1", 2, 16, "2 is too many: 1 device can be used"),
    ):
        settings = {"workflow.ranks": ranks, "device": kind, "train.global_batch_size": batch}
        config = override(on_many.config, settings)
        with pytest.raises(refused, match=said):
            on_many.recovery.most_ranks(config, torch.device(kind))


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("none", "pass", "3 steps repeated, 3 losses bit for bit"),
        ("torn", "fail", "damaged-1"),
        ("forgets", "fail", "resumed from step 0, not 9"),
        ("leaves", "fail", "left over: .saving-step_"),
        ("differs", "fail", "1 tensors differ, such as w"),
    ],
)
def test_a_kill_is_judged(on_one: Stand, fault: str, status: str, said: str) -> None:
    """By stand-ins for a run, each with a fault of its own."""
    stage, seconds = kill(on_one, fault)
    roundtrip, killed = stage.checks
    assert (roundtrip["name"], killed["name"]) == ("roundtrip", "killed_while_saving")
    assert killed["status"] == status, stage.checks
    assert roundtrip["status"] == ("fail" if fault in ("forgets", "differs") else "pass")
    assert said in killed["measured"]
    assert seconds["total"] == pytest.approx(sum(seconds.values()) - seconds["total"])


def kill(stand: Stand, fault: str) -> tuple[Any, dict[str, float]]:
    """The stage, and the seconds of the restart, of a kill of a stand-in."""
    stand.patch.syspath_prepend(str(ROOT / "tests/project/drills"))
    processes = stand.project.module("workflow.processes")

    def child(drill: Any, ranks: int, task: str) -> dict[str, Any]:
        processes.run_module("saver", str(drill.folder), task, fault, seconds=60)
        return json.loads((drill.folder / f"{task}.json").read_text())

    stand.patch.setattr(stand.recovery.Drill, "child", child)
    stage = stand.stage.Stage("checkpoint", stand.config)
    drill = stand.recovery.Drill(stage, stand.run_dir)
    return stage, drill.restart(drill.kill())


def test_a_run_that_fails_before_it_is_killed_is_quoted(on_one: Stand) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("bad day")

    on_one.in_this_process().patch.setattr(on_one.drill, "run", fail)
    checks = on_one()
    assert {*statuses(checks).values()} == {"fail"}
    assert {check["measured"] for check in checks.values()} == {"bad day"}


def test_a_restart_that_breaks_down_is_quoted(on_one: Stand) -> None:
    error = on_one.project.module("errors").RankError
    with pytest.raises(error, match="no good checkpoint is left"):
        kill(on_one, "broken")


@given(st.floats(1e-4, 100), st.floats(60, 1e7), st.floats(0, 1e3), st.floats(1, 10), st.booleans())
def test_the_interval_loses_the_least(
    interval: Any, cost: float, failures: float, restart: float, least: float, floor: bool
) -> None:
    """No other on a fine grid, at or above the floor, loses less."""
    least *= math.sqrt(2 * cost * failures) if floor else 0
    best = interval.best_interval(cost, failures, least)
    assert best >= least
    share = interval.lost_fraction(best, cost, restart, failures)
    grid = (best * 10 ** (k / 50) for k in range(-150, 151))
    others = [interval.lost_fraction(t, cost, restart, failures) for t in grid if t >= least]
    assert share <= min(others) * (1 + 1e-12)


@pytest.fixture(scope="module")
def interval(single: Project) -> Any:
    return single.module("workflow.recovery")


@pytest.mark.parametrize(
    ("every", "steps", "upload", "advice"),
    [
        # 20 ms a save and a failure a day: every 58.8 s, which are 588 steps of 100 ms.
        (400, 1000, 1.0, None),
        (100, 1000, 1.0, "--checkpoint.every 590:"),
        (5000, 9000, 1.0, "--checkpoint.every 590:"),
        (0, 9000, 1.0, "--checkpoint.every 590:"),
        (0, 300, 1.0, None),
        (100, 300, 1.0, "only at its end"),
        (400, 1000, 50.0, "a save takes longer than the 400 steps"),
        (1000, 9000, 200.0, "--checkpoint.every 2000: a save takes longer"),
        # Saves only at the end, now and as recommended.
        (0, 1000, 200.0, None),
        (0, 5, 1.0, None),
        # More than a failure between saves: next to nothing would be done.
        (0, 20_000_000, 1.0, "instead of nearly all now"),
    ],
)
def test_the_interval_is_advised(
    on_one: Stand,
    interval: Any,
    every: int,
    steps: int,
    upload: float,
    advice: str | None,
) -> None:
    changes = {"checkpoint.every": every, "train.steps": steps, "train.validate_every": 0}
    config = on_one.project.module("config").override(on_one.config, changes)
    stage = on_one.stage.Stage("checkpoint", config)
    # The interval follows from what a save costs, not only from the time that it blocks training.
    for what, seconds in (("blocked", 0.005), ("cost", 0.02), ("save", upload), ("step", 0.1)):
        stage.figures[f"{what}_seconds"] = {"median": seconds, "p10": seconds, "p90": seconds}
    restart = dict.fromkeys(on_one.recovery.RESTART, 2.0) | {"total": 12.0}
    stage.figures |= {"bytes": 1, "restart_seconds": restart, "restore_seconds": 3.0}
    interval.conclude(stage)
    assert stage.figures["interval_seconds"] == pytest.approx(max(58.8, upload), rel=1e-3)
    assert [advice in text for text in stage.advice] == ([True] if advice else [])


@pytest.mark.parametrize(
    ("steps", "validate_every", "least", "rounded"),
    [
        (590, 100, 1, 600),
        (600, 100, 1, 600),
        (30, 100, 1, 25),
        (30, 100, 28, 50),
        (51, 100, 1, 50),
        (8, 7, 1, 7),
        (8, 7, 8, 14),
        (10, 97, 1, 10),  # a prime number has no divisor near it
    ],
)
def test_validated_steps_are_among_those_saved(
    interval: Any, steps: int, validate_every: int, least: int, rounded: int
) -> None:
    assert interval.with_validations(steps, validate_every, least) == rounded


def test_an_interval_that_loses_the_best_step_is_not_recommended(
    on_one: Stand, interval: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recommended: list[str] = []
    monkeypatch.setattr(interval, "recommend", lambda stage, name, value: recommended.append(name))
    for validate_every, wanted in ((100, []), (300, ["checkpoint.every"])):
        changes = {"checkpoint.every": 100, "train.steps": 300}
        changes["train.validate_every"] = validate_every
        config = on_one.project.module("config").override(on_one.config, changes)
        stage = on_one.stage.Stage("checkpoint", config)
        for what, seconds in (("cost", 0.02), ("save", 1.0), ("step", 0.1)):
            stage.figures[f"{what}_seconds"] = {"median": seconds}
        stage.figures["restart_seconds"] = {"total": 12.0}
        recommended.clear()
        interval.advise_interval(stage)
        assert "only at its end" in stage.advice[0]
        assert recommended == wanted


def test_settings_that_are_refused_are_no_finding(on_one: Stand) -> None:
    """Frozen weights are left out of checkpoints, but the weights to begin with are not given."""
    override = on_one.project.module("config").override
    on_one.config = override(on_one.config, {"checkpoint.frozen": "no"})
    error = on_one.project.module("errors").UserError
    with pytest.raises(error, match=r"--checkpoint\.frozen no needs --init-from"):
        on_one()


def test_losses_of_nan_prove_nothing(on_one: Stand) -> None:
    outcome = on_one.recovery.Outcome({1: None, 2: None}, {"a": "b"})
    problems, _ = on_one.recovery.compare(outcome, outcome, True)
    assert problems == ["no loss is finite, so that nothing was trained"]


def test_a_save_costs_what_slower_steps_lose(
    single: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that training moves: 1 s a step, 2 s while a save is written, which takes 5 s."""
    drill = single.module("workflow.drill")
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(drill, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(drill, "synchronize", lambda device: None)

    class Checkpointer:
        blocked_seconds = 0.0
        written_at = math.inf
        saved_steps: ClassVar[list[int]] = []
        publisher = SimpleNamespace(publish=lambda step, write, facts: step)

        def save(self, step: int) -> None:
            self.saved_steps.append(step)
            clock.now += 0.25
            self.blocked_seconds += 0.25
            self.written_at = clock.now + 5

        def advance(self, seconds: float) -> None:
            if clock.now + seconds >= self.written_at:
                clock.now, seconds = self.written_at, clock.now + seconds - self.written_at
                self.written_at = math.inf
                self.publisher.publish(0, None, {})
            clock.now += seconds

        def settle(self) -> None:
            if self.written_at < math.inf:
                self.advance(self.written_at - clock.now)

        def restore(self) -> None:
            clock.now += 3

        def close(self) -> None:
            pass

    checkpointer = Checkpointer()

    def train_step(state: Any, batch: Any) -> None:
        state.step += 1
        checkpointer.advance(1.0 if checkpointer.written_at == math.inf else 2.0)

    monkeypatch.setattr(drill, "train_step", train_step)
    loader = SimpleNamespace(next=lambda: None)
    state = SimpleNamespace(step=0, loader=loader, world=SimpleNamespace(device=None))
    group = SimpleNamespace(
        gather=lambda value: [value], broadcast=lambda values: [*values, values[0] + 2]
    )
    times = drill.save_and_restore(state, checkpointer, group)
    assert times.blocked.tolist() == [0.25] * 5
    assert times.published.tolist() == [5.25] * 5
    # Three steps of 2 s, in the last of which the save ends, instead of three of 1 s.
    assert times.cost.tolist() == [3.25] * 5
    assert times.restored == 3
    # After the first save 1 + 1.5 * 5 steps, rounded up; the other rank asked for two more.
    between = [later - save for save, later in itertools.pairwise(checkpointer.saved_steps)]
    assert between == [1 + 11, *[11 + 11] * 4]


def test_what_kernels_that_are_not_deterministic_can_tell(on_one: Stand) -> None:
    outcome = on_one.recovery.Outcome
    first = outcome({1: 3.0, 2: 2.0}, {"w": "b"})

    def same(first: Any, losses: list[float], end: dict[str, str], exact: bool) -> bool:
        again = outcome(dict(enumerate(losses, 1)), end)
        problems, _ = on_one.recovery.compare(first, again, exact)
        return not problems

    for exact, shift, near in ((True, 1e-7, False), (False, 1e-7, True), (False, 0.1, False)):
        assert same(first, [3.0, 2.0], {"w": "b"}, exact)
        assert same(first, [3.0, 2.0 + shift], {"w": "b"}, exact) == near
        assert same(first, [3.0, 2.0], {"w": "c"}, exact) != exact
        assert not same(first, [3.0], {"w": "b"}, exact), "a line is missing"
    first = outcome({1: 3.0, 2: math.nan}, {})
    assert same(first, [3.0, math.nan], {}, False)
    assert not same(first, [3.0 + 1e-7, 2.0], {}, False)  # as where a line is missing
    assert not same(first, [math.nan, math.nan], {}, False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_of_a_drill_stays(on_one: Stand, error: Callable[[], BaseException]) -> None:
    """Whatever ended it, nor of one before that was killed and could not tidy up."""
    left = on_one.run_dir / "workflow/.drill/undisturbed"
    left.mkdir(parents=True)

    def run(drill: Any) -> None:
        assert not left.exists()
        (drill.folder / "one").mkdir()
        raise error()

    on_one.patch.setattr(on_one.recovery.Drill, "run", run)
    with pytest.raises(error):
        on_one()
    assert [path.name for path in left.parents[1].iterdir()] == [".checkpoint.lock"]


def test_a_process_that_ends_within_a_character_is_quoted(
    single: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["import os", r"os.write(1, b'error: 5 \xc3')", "os._exit(3)"]
    (tmp_path / "cut_off.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    error = single.module("errors").RankError
    with pytest.raises(error, match="exit code 3\n  error: 5 \N{REPLACEMENT CHARACTER}"):
        single.module("workflow.processes").run_module("cut_off", seconds=60)
