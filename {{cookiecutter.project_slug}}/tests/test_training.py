"""The loop runs on your model and data, resumes exactly, and refuses to resume anything else."""

import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import (
    after_step,
    has_first_batches,
    losses,
    read,
    same,
    skip_batch_statistics,
    skip_random,
    skip_stream,
    tiny,
    train,
)

from {{ cookiecutter.package_name }} import train as training
from {{ cookiecutter.package_name }}.__main__ import main
from {{ cookiecutter.package_name }}.checkpoint.transfer import load_weights
from {{ cookiecutter.package_name }}.config import Config
from {{ cookiecutter.package_name }}.data import build_datasets
from {{ cookiecutter.package_name }}.distributed import Group
from {{ cookiecutter.package_name }}.errors import RankError, UserError
from {{ cookiecutter.package_name }}.model import build_model
from {{ cookiecutter.package_name }}.run.directory import RunDirectory
from {{ cookiecutter.package_name }}.train import State, run, setup

# Whether infer.py exists, since you may delete it.
INFER = Path(training.__file__).with_name("infer.py").exists()


def interrupt(number: int = signal.SIGTERM):
    """Return a callback that sends a signal to this process at step 7."""
    return after_step(lambda state, _: state.step == 7 and os.kill(os.getpid(), number))


def main_with(monkeypatch, *words: str) -> int:
    """Run a command and return its exit code."""
    monkeypatch.setattr("sys.argv", ["program", *words])
    return main()


def records(run_dir: Path) -> list[dict]:
    """Return the records after the signal at step 7, without times and memory, which vary."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    varying = re.compile(".*(second|bytes|time|mfu)")
    return [
        {name: value for name, value in line.items() if not varying.match(name)}
        for line in lines
        if line["step"] > 7
    ]


# Settings of a run that is interrupted, and of the one it is compared with. They have an EMA, since
# a checkpoint must save it, too.
INTERRUPTED = {"optim__ema": 0.9, "train__log_every": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Train without interruption; return the run directory and the final weights."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    return run_dir, train(tiny(run_dir, **INTERRUPTED))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_an_interrupted_run_goes_on_exactly(tmp_path: Path, number: int, undisturbed) -> None:
    """Stopped at step 7 by a signal and resumed, it ends with the same weights and records."""
    settings = tiny(tmp_path, **INTERRUPTED)
    assert run(settings, [interrupt(number)]).status == "preempted"
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "preempted"
    run_dir, weights = undisturbed
    same(train(settings), weights)
    assert records(tmp_path) == records(run_dir)
    assert max(losses(tmp_path, "validation_ema_loss")) == settings.train.steps


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({"train__loader_workers": 1}, 0),
        ({"train__activation_checkpointing": True}, 1e-5),
        ({"compile__mode": "blocks", "compile__backend": "eager"}, 1e-4),
        ({"compile__mode": "full", "compile__backend": "eager"}, 1e-4),
    ],
    ids=("loader workers", "activation checkpointing", "compiled blocks", "compiled"),
)
def test_another_way_changes_no_name_and_no_result(tmp_path, changes, near, caplog) -> None:
    """Names stay the same. Workers keep the bits; recomputing and compiling may round otherwise."""
    if "train__activation_checkpointing" in changes:
        skip_batch_statistics(setup(tiny(tmp_path)).model, "they would be updated twice")
    if "train__loader_workers" in changes:
        skip_stream(setup(tiny(tmp_path)), "a stream does not use the loader's workers")
    steps = {"train__steps": 6, "train__log_every": 1}
    plain = train(tiny(tmp_path / "a", **steps))
    caplog.set_level("INFO")
    other = train(tiny(tmp_path / "b", **steps, **changes))
    if near:
        # Compare losses, not weights. If a gradient is 0 except for rounding errors, Adam makes
        # full-size steps of them, which change the weight but not the loss.
        assert plain.keys() == other.keys()
        for figure in ("loss", "validation_loss"):
            expected = losses(tmp_path / "a", figure)
            assert losses(tmp_path / "b", figure) == pytest.approx(expected, rel=near, abs=1e-6)
    else:
        same(other, plain)
    # A run that compiles logs a summary, others do not.
    assert ("graph breaks: " in caplog.text) == ("compile__mode" in changes)


def test_training_can_be_traced_while_it_runs(tmp_path: Path) -> None:
    """Traced windows end at steps 8 and 16 of 20."""
    train(tiny(tmp_path, profile__warmup=1, profile__active=1, profile__every=8))
    assert len(list((tmp_path / "traces").glob("*.json.gz"))) == 2


def test_an_interrupted_validation_is_done_at_the_resume(tmp_path: Path, monkeypatch) -> None:
    """The validation of step 10 is in metrics.jsonl, as if nothing had interrupted it."""

    class Stopping:
        """Validation data that sends a stop signal when it is read at step 10."""

        def __init__(self, state: State) -> None:
            self.state, self.dataset = state, state.validation
            if hasattr(self.dataset, "collate"):
                self.collate = self.dataset.collate

        def __len__(self) -> int:
            return len(self.dataset)

        def __getitems__(self, ids: list[int]) -> Any:
            if self.state.step == 10:
                os.kill(os.getpid(), signal.SIGTERM)
            return read(self.dataset, ids)

    def set_up_stopping(*arguments: Any, **options: Any) -> State:
        state = setup(*arguments, **options)
        state.validation = Stopping(state)
        return state

    with monkeypatch.context() as patch:
        patch.setattr(training, "setup", set_up_stopping)
        result = run(tiny(tmp_path))
    assert (result.status, result.step) == ("preempted", 10)
    run(tiny(tmp_path))
    assert sorted(losses(tmp_path, "validation_loss")) == [10, 20]
    assert sorted(losses(tmp_path)) == [5, 10, 15, 20]


def test_bfloat16_learns_what_float32_does(tmp_path: Path) -> None:
    """The losses differ by at most a tenth of the largest one."""
    # In bfloat16 other random numbers are drawn.
    skip_random(setup(tiny(tmp_path)), training=True)
    for precision in ("bf16", "fp32"):
        train(tiny(tmp_path / precision, train__precision=precision, train__steps=10))
    expected = losses(tmp_path / "fp32")
    near = 0.1 * max(abs(loss) for loss in expected.values())
    assert losses(tmp_path / "bf16") == pytest.approx(expected, abs=near)


def test_a_finished_run_says_so_and_can_be_prolonged(tmp_path: Path) -> None:
    """The same command does nothing more; with more steps, the run continues."""
    train(tiny(tmp_path, train__steps=5))
    assert run(tiny(tmp_path, train__steps=5)).status == "already finished"
    result = run(tiny(tmp_path, train__steps=8))
    assert (result.status, result.step) == ("finished", 8)


def test_another_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """Another seed or batch size is refused; --fresh and --init-from start another run."""
    train(tiny(tmp_path / "a", train__steps=5))
    with pytest.raises(UserError, match=r"seed: 0 saved, 1 now[\s\S]*--fresh"):
        run(tiny(tmp_path / "a", train__steps=8, train__seed=1))
    with pytest.raises(UserError, match="global_batch_size"):
        run(tiny(tmp_path / "a", train__steps=8, train__global_batch_size=4))
    # --fresh renames the old run and starts over.
    afresh = tiny(tmp_path / "a", train__steps=6, train__seed=1, fresh=True)
    assert run(afresh).status == "finished" and (tmp_path / "a.old-1/checkpoints").is_dir()
    # --init-from starts a new run from the last weights of the run above.
    changes = {"train__seed": 1, "train__steps": 2, "init_from": tmp_path / "a"}
    begun: dict[str, torch.Tensor] = {}

    def copy_weights(state: State) -> None:
        if state.step == 0:
            begun.update({name: p.detach().clone() for name, p in state.model.named_parameters()})

    before_step = SimpleNamespace(before_step=copy_weights)
    assert run(tiny(tmp_path / "b", **changes), [before_step]).status == "finished"
    saved = setup(afresh).model
    load_weights(tmp_path / "a", saved, 6, Group())
    same(begun, dict(saved.named_parameters()))


def test_other_data_is_not_taken_for_this(tmp_path: Path, monkeypatch) -> None:
    """A resume is refused if the fingerprint of the data has changed."""
    train(tiny(tmp_path, train__steps=2))

    def other_data(settings: Config) -> tuple:
        training_set, validation, spec = build_datasets(settings)
        if not dataclasses.is_dataclass(spec):
            pytest.skip("not applicable: the spec is not a dataclass")
        return training_set, validation, dataclasses.replace(spec, fingerprint="of other data")

    monkeypatch.setattr(training, "build_datasets", other_data)
    with pytest.raises(UserError, match="of other data"):
        run(tiny(tmp_path, train__steps=4))


def test_a_record_is_the_mean_since_the_last_one(tmp_path: Path) -> None:
    """Validations and checkpoints happen at the steps at which they are due.

    Steps 3, 6 and 9 are logged, 5 and 10 validated, 4 and 8 saved; step 11, the last, is all three.
    For comparison, a second run takes the same steps and logs each of them.
    """
    # The sums of loss and count after each step that has no record, since the record before.
    sums: dict[int, list[float]] = {}

    def note(state: State, record: dict | None) -> None:
        if record is None:
            sums[state.step] = torch.as_tensor(state.sums)[:2].tolist()
        assert (record is not None) == (state.step % 3 == 0 or state.step in (5, 10, 11))

    every = {"train__log_every": 3, "train__validate_every": 5, "checkpoint__every": 4}
    run(tiny(tmp_path, train__steps=11, **every), [after_step(note)])
    train(tiny(tmp_path / "each", train__steps=11, train__log_every=1))
    single = losses(tmp_path / "each")
    found = losses(tmp_path)
    assert sorted(found) == [3, 5, 6, 9, 10, 11]
    # After step 1 the sums are those of step 1; step 2 adds its own.
    assert sums[1][0] / sums[1][1] == pytest.approx(single[1], rel=1e-4)
    assert sums[2][0] == pytest.approx(sums[1][0] + single[2] * (sums[2][1] - sums[1][1]), rel=1e-3)
    # The record of step 10 is only of this step, since step 9 has a record. That of step 5 is the
    # mean over steps 4 and 5, so it is between their losses.
    assert found[10] == pytest.approx(single[10], rel=1e-3)
    assert min(single[4], single[5]) <= found[5] * (1 + 1e-4)
    assert found[5] <= max(single[4], single[5]) * (1 + 1e-4)
    assert sorted(losses(tmp_path, "validation_loss")) == [5, 10, 11]
    # The checkpoint of step 4 is step_00000004.
    saved = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == [4, 8, 11]


def test_a_damaged_checkpoint_costs_one_interval(tmp_path: Path, caplog) -> None:
    """The checkpoint of step 10 is damaged, so the run resumes from step 5: step 6 is its first."""
    train(tiny(tmp_path, train__steps=10))
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    # Flip one bit in the middle of the file.
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    steps = []
    run(tiny(tmp_path, train__steps=12), [after_step(lambda state, _: steps.append(state.step))])
    assert steps[0] == 6
    assert "DAMAGED" in caplog.text and max(losses(tmp_path)) == 12


@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_a_failed_save_costs_only_itself(tmp_path: Path, on_failure: str) -> None:
    """From step 7 to 12 the system refuses to write large files, as on a full disk.

    So the save of step 10 fails, and those of steps 5, 15 and 20 do not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def squeeze(state: State, record: dict | None) -> None:
        if state.step in (7, 12):
            # A save in the background must end before the limit changes.
            state.checkpointer.settle()
            files = (tmp_path / "checkpoints/step_00000005").iterdir()
            # Too small for the largest file of a checkpoint.
            small = max(path.stat().st_size for path in files) // 2
            limit = small if state.step == 7 else soft
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    settings = tiny(tmp_path, checkpoint__on_failure=on_failure)
    # With "continue" only step 10 is missing. With "stop" the failed save ends the run.
    ending, saved = contextlib.nullcontext(), {5, 15, 20}
    if on_failure == "stop":
        ending, saved = pytest.raises(RankError, match="step 10 was not saved"), {5}
    try:
        with ending:
            assert run(settings, [after_step(squeeze)]).status == "finished"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir()} == saved
    # In both cases the same command leads to the end.
    assert run(settings).step == 20


def test_a_checkpoint_holds_its_own_step(tmp_path: Path, monkeypatch) -> None:
    """The optimizer waits for the copies of a save, even if they are slow."""
    # Only projects that save in the background have this module. There, make the copies slow.
    staging = sys.modules.get(f"{training.__package__}.checkpoint.staging")
    if staging is not None:
        finish = staging.HostBuffers.finish

        def finish_late(buffers: Any) -> None:
            time.sleep(0.3)
            finish(buffers)

        monkeypatch.setattr(staging.HostBuffers, "finish", finish_late)
    settings = tiny(tmp_path, train__steps=8)
    # Compare the weights right after step 5 with those in its checkpoint.
    weights, model = train(settings, at=5), setup(settings).model
    load_weights(tmp_path, model, 5, Group())
    same(model.state_dict(), weights)


def test_a_stop_before_the_first_step_is_no_dead_end(tmp_path: Path, monkeypatch) -> None:
    """A signal during start-up stops the run without a checkpoint; the same command then trains."""

    def set_up_stopped(*arguments, **options) -> State:
        os.kill(os.getpid(), signal.SIGTERM)
        return setup(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(training, "setup", set_up_stopped)
        assert run(tiny(tmp_path)).status == "preempted"
    assert run(tiny(tmp_path)).status == "finished"


def test_frozen_and_unused_parameters_resume(tmp_path: Path, monkeypatch) -> None:
    """A resume is exact with a frozen parameter, and with one that never gets a gradient."""

    def build(*arguments) -> torch.nn.Module:
        model = build_model(*arguments)
        next(model.parameters()).requires_grad_(False)
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
        return model

    monkeypatch.setattr(training, "build_model", build)
    steps = {"train__steps": 10}
    undisturbed = train(tiny(tmp_path / "a", **steps))
    run(tiny(tmp_path / "b", **steps), [interrupt()])
    same(train(tiny(tmp_path / "b", **steps)), undisturbed)


def test_a_run_directory_has_one_writer(tmp_path: Path) -> None:
    """While a run is active, no other process can open its directory; afterwards a run can."""

    def meanwhile(state: State, record: dict | None) -> None:
        # At step 2 a child process tries to open the directory. It exits with 42 if the error says
        # that this process uses it.
        if state.step == 2 and (child := os.fork()) == 0:
            try:
                RunDirectory(tmp_path, Group()).__enter__()
            except UserError as error:
                os._exit(42 if f"in use by process {os.getppid()}" in str(error) else 1)
            os._exit(1)
        elif state.step == 2:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42

    assert run(tiny(tmp_path, train__steps=4), [after_step(meanwhile)]).status == "finished"
    assert run(tiny(tmp_path, train__steps=5)).status == "finished"


def test_bad_settings_are_told_in_one_line(tmp_path: Path, capsys, monkeypatch) -> None:
    """The exit code is 2, the error names the problem, and nothing is written."""
    for words, message in [
        (["train", "--preset", "none-such"], "none-such: unknown preset"),
        (["train", "--config", str(tmp_path / "nothing")], "cannot be read"),
        (["train", "--name", "../elsewhere"], "--name '../elsewhere'"),
        (["no-such-command"], "there is no command"),
        (["verify", "--run-dir", str(tmp_path)], "no checkpoints"),
        (["infer", "--run-dir", str(tmp_path)], "there is no run named"),
    ]:
        if words[0] == "infer" and not INFER:
            continue
        assert main_with(monkeypatch, *words) == 2
        assert message in capsys.readouterr().err
    assert main_with(monkeypatch, "train", "--train.global-batch-size", "0") == 2
    # tyro prints this error in a box.
    assert "must be at least 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_infer_works_on_a_finished_run(tmp_path: Path, capfd, monkeypatch) -> None:
    """infer.py must work with the data that the project was created with."""
    if not INFER:
        pytest.skip("not applicable: there is no infer.py")
    train(tiny(tmp_path, train__steps=5))
    try:
        code = main_with(monkeypatch, "infer", "--step", "5", "--run-dir", str(tmp_path))
        assert code == 0 and capfd.readouterr().out
    except Exception as error:
        if has_first_batches(setup(tiny(tmp_path))):
            raise
        pytest.skip(f"not applicable: infer.py is not written for this data yet: {error!r}")


def test_the_commands_work_on_a_finished_run(tmp_path: Path, capfd, monkeypatch) -> None:
    """`verify`, `profile` and `baseline` print their results, and return the right exit codes."""

    def command(*words: str, codes: tuple[int, ...] = (0,)) -> str:
        assert main_with(monkeypatch, *words, "--run-dir", str(tmp_path)) in codes, words
        return capfd.readouterr().out

    train(tiny(tmp_path))
    assert "best" in command("verify")
    settings = ("--config", str(tmp_path / "config.json"))
    # You may delete workflow/.
    pytest.importorskip(f"{training.__package__}.workflow.stage")
    from {{ cookiecutter.package_name }}.workflow import STAGES, baseline

    # A few measured steps are enough here.
    monkeypatch.setattr(baseline, "MEASURED", 8)
    if "profile" in STAGES:
        from {{ cookiecutter.package_name }}.workflow import interleaved

        # The measurements do not matter here, so make them short.
        monkeypatch.setattr(interleaved, "SECONDS", 0.1)
        monkeypatch.setattr(interleaved, "WINDOW", 0.01)
        monkeypatch.setattr(interleaved, "WINDOWS", (2, 2))
        few = ("--profile.wait", "0", "--profile.warmup", "1", "--profile.active", "1")
        assert "top operators" in command("profile", *settings, *few)
        assert list((tmp_path / "traces").glob("*.json.gz"))
    # On a slow machine a check may fail (exit code 1).
    assert "deterministic" in command("baseline", *settings, codes=(0, 1))
    (tmp_path / "checkpoints/step_00000020/manifest.json").unlink()
    assert "DAMAGED" in command("verify", codes=(1,))
    report = json.loads((tmp_path / "workflow/baseline.json").read_text())
    passed = [check["name"] for check in report["checks"] if check["status"] == "pass"]
    assert report["stage"] == "baseline" and "deterministic" in passed
