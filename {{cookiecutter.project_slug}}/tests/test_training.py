"""The loop on your model and data: it learns, resumes exactly, and refuses what would not be."""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    after_step,
    losses,
    same,
    skip_batch_statistics,
    skip_random,
    skip_stream,
    tiny,
    train,
)

from {{ cookiecutter.package_name }} import callbacks
from {{ cookiecutter.package_name }} import train as training
from {{ cookiecutter.package_name }}.__main__ import main
from {{ cookiecutter.package_name }}.checkpoint.transfer import load_weights
from {{ cookiecutter.package_name }}.config import override
from {{ cookiecutter.package_name }}.distributed import Group, World
from {{ cookiecutter.package_name }}.errors import RankError, UserError
from {{ cookiecutter.package_name }}.model import build_model, compute_loss
from {{ cookiecutter.package_name }}.run.directory import RunDirectory
from {{ cookiecutter.package_name }}.schedule import set_schedule
from {{ cookiecutter.package_name }}.train import State, run, setup, train_step

INFER = Path(training.__file__).with_name("infer.py").exists()  # yours to delete


def interrupt(number: int = signal.SIGTERM):
    """A callback that signals this process at step 7."""
    return after_step(lambda state, _: state.step == 7 and os.kill(os.getpid(), number))


def main_with(monkeypatch, *words: str) -> int:
    """The exit code of a command."""
    monkeypatch.setattr("sys.argv", ["program", *words])
    return main()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run directory, and the weights at the end."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    return run_dir, train(tiny(run_dir))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_an_interrupted_run_goes_on_exactly(tmp_path: Path, number: int, undisturbed) -> None:
    assert run(tiny(tmp_path), [interrupt(number)]).status == "preempted"
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "preempted"
    run_dir, weights = undisturbed
    same(train(tiny(tmp_path)), weights)
    last = tiny(tmp_path).train.steps
    assert losses(tmp_path)[last] == losses(run_dir)[last]


def test_the_loop_does_what_a_plain_one_does(tmp_path: Path) -> None:
    """Accumulation, scale, clipping, schedule; with your model, data, loss and optimizer."""
    schedule = {"train__steps": 9, "optim__warmup_steps": 3, "optim__final_fraction": 0.1}
    settings = tiny(tmp_path, train__micro_batch_size=3, **schedule)
    state, plain = setup(settings), setup(override(settings, {"train.micro_batch_size": 8}))
    skip_batch_statistics(state.model, "batch statistics depend on how a batch is divided")
    skip_random(state)
    for model in (state.model, plain.model):
        model.eval()  # dropout draws other numbers for other micro-batches

    def norm_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    given, clip = [], 0.0
    state.optimizer.register_step_pre_hook(lambda optimizer, *_: given.append(norm_of(optimizer)))
    for step in range(9):
        (batch,) = plain.loader.next()
        loss = compute_loss(plain.model, batch)
        (loss.total / loss.count).backward()
        norm = norm_of(plain.optimizer)
        clip = clip or 0.7 * float(norm)  # one that bites
        torch.nn.utils.clip_grads_with_norm_(plain.model.parameters(), clip, norm)
        set_schedule(plain.optimizer, settings, step)
        plain.optimizer.step()
        plain.optimizer.zero_grad()

        state.config, state.sums = override(settings, {"optim.clip": clip}), 0.0
        train_step(state, state.loader.next())
        seen = [*state.sums[:2].tolist(), float(state.grad_norm), float(given[-1])]
        wanted = [loss.total.item(), int(loss.count), float(norm), min(float(norm), clip)]
        assert seen == pytest.approx(wanted, rel=1e-3)
        rates = [[g["lr"] for g in one.optimizer.param_groups] for one in (state, plain)]
        assert rates[0] == pytest.approx(rates[1])
    same(state.model.state_dict(), plain.model.state_dict(), near=1e-4)


def test_a_step_that_is_not_finite_is_skipped() -> None:
    state = setup(tiny(Path("unused"), optim__clip=1.0))
    train_step(state, state.loader.next())
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    hook = parameters[0].register_hook(lambda gradient: gradient * torch.nan)
    train_step(state, state.loader.next())
    hook.remove()
    assert int(state.bad_steps) == 1
    assert all(map(torch.equal, parameters, before))
    train_step(state, state.loader.next())
    assert not torch.equal(parameters[0], before[0])


def test_a_step_reads_no_value_on_the_host(monkeypatch) -> None:
    """`if tensor`, .item() or float() would wait for a GPU: tensors on `meta` have no values."""
    monkeypatch.setattr(training, "step_unless", lambda bad, optimizer: optimizer.step())
    state = setup(tiny(Path("unused")), World(rank=0, size=1, device=torch.device("meta")))
    try:
        train_step(state, state.loader.next())
    except NotImplementedError as error:
        pytest.skip(f"not applicable: an operator does not run on `meta`: {error}")
    assert state.step == 1


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({"train__loader_workers": 1}, 0),
        ({"train__activation_checkpointing": True}, 1e-6),
        ({"compile__mode": "blocks", "compile__backend": "eager"}, 1e-5),
        ({"compile__mode": "full", "compile__backend": "eager"}, 1e-5),
    ],
    ids=("loader workers", "activation checkpointing", "compiled blocks", "compiled"),
)
def test_another_way_changes_no_name_and_no_result(tmp_path, changes, near, caplog) -> None:
    if "train__activation_checkpointing" in changes:
        skip_batch_statistics(setup(tiny(tmp_path)).model, "they would be updated twice")
    if "train__loader_workers" in changes:
        skip_stream(setup(tiny(tmp_path)), "a stream is read ahead by workers of its own")
    plain = train(tiny(tmp_path / "a", train__steps=6))
    caplog.set_level("INFO")
    same(train(tiny(tmp_path / "b", train__steps=6, **changes)), plain, near)
    assert ("graph breaks: " in caplog.text) == ("compile__mode" in changes)


def test_training_can_be_traced_while_it_runs(tmp_path: Path) -> None:
    train(tiny(tmp_path, profile__warmup=1, profile__active=1, profile__every=8))
    assert len(list((tmp_path / "traces").glob("*.json.gz"))) == 2


def test_callbacks_are_called_and_left_out_if_harmless(tmp_path, monkeypatch, caplog) -> None:
    calls = []

    class Recorder:
        harmless = True

        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *exception):
            calls.append("exit")

        def before_step(self, state):
            calls.append(f"before {state.step}")

        def after_step(self, state, record):
            calls.append(f"after {state.step} {record is not None}")

        def after_validation(self, state, figures):
            figures["validation_extra"] = 7.0
            raise RuntimeError("on purpose")

    monkeypatch.setattr(callbacks, "callbacks", lambda config, run_dir: [Recorder()])
    result = run(tiny(tmp_path, train__steps=4, train__log_every=2, train__validate_every=3))
    steps = ["before 0", "after 1 False", "before 1", "after 2 True", "before 2"]
    assert calls == ["enter", *steps, "exit"]  # after the error at step 3 it is left out
    assert result.status == "finished" and "on purpose" in caplog.text
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("validation_extra") for line in lines] == [None, 7.0, None]
    Recorder.harmless = False
    with pytest.raises(RuntimeError, match="on purpose"):
        run(tiny(tmp_path, train__steps=9, train__validate_every=6))


def test_bfloat16_learns_what_float32_does(tmp_path: Path) -> None:
    for precision in ("bf16", "fp32"):
        train(tiny(tmp_path / precision, train__precision=precision))
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "fp32"), rel=0.1)


def test_a_finished_run_says_so_and_can_be_prolonged(tmp_path: Path) -> None:
    train(tiny(tmp_path, train__steps=5))
    assert run(tiny(tmp_path, train__steps=5)).status == "already finished"
    result = run(tiny(tmp_path, train__steps=8))
    assert (result.status, result.step) == ("finished", 8)


def test_another_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    train(tiny(tmp_path / "a", train__steps=5))
    with pytest.raises(UserError, match=r"seed: 0 saved, 1 now[\s\S]*--fresh"):
        run(tiny(tmp_path / "a", train__steps=8, train__seed=1))
    with pytest.raises(UserError, match="global_batch_size"):
        run(tiny(tmp_path / "a", train__steps=8, train__global_batch_size=4))
    afresh = tiny(tmp_path / "a", train__steps=6, train__seed=1, fresh=True)
    assert run(afresh).status == "finished" and (tmp_path / "a.old-1/checkpoints").is_dir()
    changes = {"train__seed": 1, "train__steps": 2, "init_from": tmp_path / "a"}
    assert run(tiny(tmp_path / "b", **changes)).status == "finished"


def test_a_damaged_checkpoint_costs_one_interval(tmp_path: Path, caplog) -> None:
    train(tiny(tmp_path, train__steps=10))
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    steps = []
    run(tiny(tmp_path, train__steps=12), [after_step(lambda state, _: steps.append(state.step))])
    assert steps[0] == 6
    assert "DAMAGED" in caplog.text and max(losses(tmp_path)) == 12


@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_a_failed_save_costs_only_itself(tmp_path: Path, on_failure: str) -> None:
    """The system refuses to write large files for a while, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def squeeze(state: State, record: dict | None) -> None:
        if state.step in (7, 12):
            state.checkpointer.settle()
            files = (tmp_path / "checkpoints/step_00000005").iterdir()
            small = max(path.stat().st_size for path in files) // 2
            limit = small if state.step == 7 else soft
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    settings = tiny(tmp_path, checkpoint__on_failure=on_failure)
    ending, saved = contextlib.nullcontext(), {5, 15, 20}
    if on_failure == "stop":
        ending, saved = pytest.raises(RankError, match="step 10 was not saved"), {5}
    try:
        with ending:
            assert run(settings, [after_step(squeeze)]).status == "finished"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir()} == saved
    assert run(settings).step == 20


def test_a_checkpoint_holds_its_own_step(tmp_path: Path, monkeypatch) -> None:
    """However slow the copying: the optimizer has to wait for it."""
    name = "copy_on_one_core"
    for module in [m for key, m in sys.modules.items() if key.startswith(training.__package__)]:
        if copy := getattr(module, name, None):  # of a checkpoint that is saved in the background
            slow = lambda *pairs, copy=copy: (time.sleep(0.3), copy(*pairs))  # noqa: E731
            monkeypatch.setattr(module, name, slow)
    settings = tiny(tmp_path, train__steps=8)
    weights, model = train(settings, at=5), setup(settings).model
    load_weights(tmp_path, model, 5, Group())
    same(model.state_dict(), weights)


def test_a_stop_before_the_first_step_is_no_dead_end(tmp_path: Path, monkeypatch) -> None:
    def set_up_stopped(*arguments) -> State:
        os.kill(os.getpid(), signal.SIGTERM)
        return setup(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, "setup", set_up_stopped)
        assert run(tiny(tmp_path)).status == "preempted"
    assert run(tiny(tmp_path)).status == "finished"


def test_frozen_and_unused_parameters_resume(tmp_path: Path, monkeypatch) -> None:
    def build(*arguments) -> torch.nn.Module:
        model = build_model(*arguments)
        next(model.parameters()).requires_grad_(False)
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
        return model

    monkeypatch.setattr(training, "build_model", build)
    undisturbed = train(tiny(tmp_path / "a"))
    run(tiny(tmp_path / "b"), [interrupt()])
    same(train(tiny(tmp_path / "b")), undisturbed)


def test_a_run_directory_has_one_writer(tmp_path: Path) -> None:
    def meanwhile(state: State, record: dict | None) -> None:
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
    assert "must be at least 1" in capsys.readouterr().err  # in a box of its own
    assert not list(tmp_path.iterdir())


def test_the_commands_work_on_a_finished_run(tmp_path: Path, capfd, monkeypatch) -> None:
    def command(*words: str, codes: tuple[int, ...] = (0,)) -> str:
        assert main_with(monkeypatch, *words, "--run-dir", str(tmp_path)) in codes, words
        return capfd.readouterr().out

    train(tiny(tmp_path))
    assert "best" in command("verify")
    if INFER:
        assert command("infer", "--step", "20")
    settings = ("--config", str(tmp_path / "config.json"))
    pytest.importorskip(f"{training.__package__}.workflow.stage")  # or you deleted it
    from {{ cookiecutter.package_name }}.workflow import STAGES

    if "profile" in STAGES:
        from {{ cookiecutter.package_name }}.workflow import interleaved

        monkeypatch.setattr(interleaved, "SECONDS", 0.1)  # what is measured does not matter here
        monkeypatch.setattr(interleaved, "WINDOW", 0.01)
        assert "top operators" in command("profile", *settings)
        assert list((tmp_path / "traces").glob("*.json.gz"))
    assert "deterministic" in command("baseline", *settings, codes=(0, 1))  # 1: a slow machine
    (tmp_path / "checkpoints/step_00000020/manifest.json").unlink()
    assert "DAMAGED" in command("verify", codes=(1,))
    report = json.loads((tmp_path / "workflow/baseline.json").read_text())
    passed = [check["name"] for check in report["checks"] if check["status"] == "pass"]
    assert report["stage"] == "baseline" and "deterministic" in passed
