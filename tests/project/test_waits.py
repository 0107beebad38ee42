"""What a run says of saves that hold it up, and of how it is compiled."""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.conftest import Project, project_fixture

project = project_fixture("waiting", checkpoint="dcp_async", tracker="none")


@pytest.mark.parametrize("every", [5, 100])
def test_a_warning_names_the_steps_of_a_save(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int
) -> None:
    """A save takes 6 s, of which training waits 4 s after 5 steps: 15 steps fit into one.

    If these 5 steps were fewer than usual, as before a stop, the warning would be wrong.
    """
    writer_file = project.module("checkpoint.writer")
    config = project.config(device="cpu", run_dir=tmp_path, checkpoint__every=every)
    state = project.module("train").setup(config)
    group = project.module("distributed").Group(state.world)
    writer = writer_file.Writer(config.checkpoint, group, state.model, state.world.device)
    assert writer_file.steps_of_a_save(5, 6.0, 4.0) == 15
    writer.begin({}, lambda step, facts: None, 100, {})
    writer.settle()
    writer.waited = 4.0
    writer.began -= 6.0
    with caplog.at_level(logging.WARNING):
        writer.begin({}, lambda step, facts: None, 105, {})
    writer.close()
    state.loader.close()
    messages = [record.getMessage() for record in caplog.records if "waited" in record.message]
    if every == 100:
        assert not messages
        return
    (message,) = messages
    assert message.startswith("training waited 4.0 s for the previous save: raise ")
    # The clock goes on between the lines above.
    assert message.endswith(("every to 15 or more", "every to 16 or more"))


def test_the_save_that_meets_a_failed_one_still_begins(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure of step 1 is first seen by the save of step 2, which loses nothing by it."""
    config = project.config(device="cpu", run_dir=tmp_path, checkpoint__on_failure="continue")
    state = project.module("train").setup(config)
    group = project.module("distributed").Group(state.world)
    checkpointer = project.module("resume").resume(state, tmp_path, group)
    publish = checkpointer.publisher.publish

    def fail_once(step: int, *arguments: object) -> object:
        if step == 1:
            raise project.module("checkpoint").CheckpointError("no space left")
        return publish(step, *arguments)

    monkeypatch.setattr(checkpointer.publisher, "publish", fail_once)
    checkpointer.save(1)
    checkpointer.save(2)
    checkpointer.close()
    state.loader.close()
    assert checkpointer.last_good == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]


def test_a_save_whose_copy_fails_is_not_published(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = project.module("train").setup(project.config(device="cpu", run_dir=tmp_path))
    group = project.module("distributed").Group(state.world)
    checkpointer = project.module("resume").resume(state, tmp_path, group)

    def fail() -> None:
        raise MemoryError("no memory is left")

    monkeypatch.setattr(checkpointer.writer.buffers, "finish", fail)
    checkpointer.save(1)
    with pytest.raises(project.module("errors").RankError, match="no memory is left"):
        checkpointer.settle()
    checkpointer.close()
    state.loader.close()
    assert not [*(tmp_path / "checkpoints").glob("step_*")]


def test_a_failed_save_that_training_waited_for_is_counted(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the wait of the save before it."""
    config = project.config(device="cpu", run_dir=tmp_path)
    state = project.module("train").setup(config)
    group = project.module("distributed").Group(state.world)
    writer_file = project.module("checkpoint.writer")
    writer = writer_file.Writer(config.checkpoint, group, state.model, state.world.device)
    error = project.module("checkpoint").CheckpointError

    def fail_later(step: int, facts: object) -> None:
        writer_file.time.sleep(0.3)
        raise error("no space left")

    writer.waited = 4.0
    writer.begin({}, fail_later, 1, {})
    with pytest.raises(error, match="no space left"):
        writer.settle()
    assert 0.1 < writer.waited < 4
    # The error was reported, and the next call finds no save.
    writer.settle()

    # If Ctrl-C interrupts the wait, the save is still waited for at the end.
    def interrupted() -> None:
        raise KeyboardInterrupt

    writer.begin({}, fail_later, 2, {})
    monkeypatch.setattr(writer.writing, "exception", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.settle()
    monkeypatch.undo()
    with pytest.raises(error, match="no space left"):
        writer.settle()
    writer.close()
    state.loader.close()


def test_after_an_error_a_store_that_is_taken_over_is_a_warning(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error that ended the run is the one that is raised."""
    state = project.module("train").setup(project.config(device="cpu", run_dir=tmp_path))
    group = project.module("distributed").Group(state.world)
    checkpointer = project.module("resume").resume(state, tmp_path, group)

    def taken_over(step: int, *arguments: object) -> None:
        raise project.module("errors").UserError("another run has taken over")

    monkeypatch.setattr(checkpointer.publisher, "publish", taken_over)
    with pytest.raises(ZeroDivisionError), checkpointer:
        checkpointer.save(1)
        raise ZeroDivisionError
    state.loader.close()
    assert "another run has taken over" in caplog.text


def test_a_rank_that_fails_after_the_commit_does_not_unsave_it(
    project: Project, tmp_path: Path
) -> None:
    publish, errors = project.module("checkpoint.publish"), project.module("errors")
    group = project.module("distributed").Group()
    publisher = publish.Publisher(tmp_path, publish.RetentionConfig(), group)
    together = group.together

    @contextlib.contextmanager
    def failing_after_the_commit() -> Iterator[None]:
        with together():
            yield
        if (tmp_path / "step_00000003").exists():
            raise errors.RankError("rank 1: is gone")

    group.together = failing_after_the_commit
    with pytest.raises(errors.RankError, match="step 3 was saved, but then a rank failed: rank 1"):
        publisher.publish(3, lambda folder: [], {})
    assert (tmp_path / "step_00000003/manifest.json").exists()


def test_what_cannot_be_removed_is_one_warning(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publish = project.module("checkpoint.publish")
    group = project.module("distributed").Group()
    publisher = publish.Publisher(tmp_path, publish.RetentionConfig(), group)
    (tmp_path / f"{publish.DISCARDED}step_00000001-0").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(publish.shutil, "rmtree", lambda *arguments, **options: None)
        publisher.remove_leftovers()
        publisher.remove_leftovers()
    assert caplog.text.count("cannot be removed: look at its permissions") == 1
    publisher.remove_leftovers()
    assert not any(tmp_path.iterdir())


def test_an_interrupt_while_dcp_works_stays_one(project: Project) -> None:
    """DCP catches it, too, and raises its own exception on all ranks."""
    from torch.distributed.checkpoint import CheckpointException

    failures_of = project.module("checkpoint.dcp").failures_of
    error = CheckpointException("read", {0: (KeyboardInterrupt("Ctrl-C"), None)})
    with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
        failures_of(error)
    error = CheckpointException("read", {1: (OSError("no disk"), None)})
    assert failures_of(error) == "rank 1: OSError: no disk"


def test_each_name_of_a_tied_weight_is_copied_in_the_background(project: Project) -> None:
    """Only registered buffers are copied at once."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.tied = model[0]
    buffers = project.module("checkpoint.staging").HostBuffers(model, torch.device("cpu"))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    buffers.copy(tensors)
    assert len(tensors) == 9
    # The weights and biases of three names; the three buffers of batch norm are not among them.
    assert len(buffers.to_copy) == 6


def test_host_buffers_are_named_apart(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = project.module("checkpoint.staging")
    allocate = staging.in_blocks

    def slow(*arguments: object, **options: object) -> object:
        project.module("checkpoint.checkpointer").time.sleep(1.5)
        return allocate(*arguments, **options)

    monkeypatch.setattr(staging, "in_blocks", slow)
    words = ("--preset", "tiny", "--device", "cpu", "--data.path", "text.txt")
    project("train", *words, "--run-dir", str(tmp_path), "--train.log-every", "1")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    buffers = [line["checkpoint_buffers_seconds"] for line in lines]
    # Once in a run, in the step before the optimizer has its state for the first time.
    assert [seconds >= 1.5 for seconds in buffers] == [False, True, *[False] * (len(lines) - 2)]
    assert sum(line["checkpoint_blocked_seconds"] for line in lines) < 1.5


def test_on_a_gpu_the_start_says_what_is_compiled(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = project.module("run.journal")
    config = project.config(device="cpu", run_dir=tmp_path, compile__mode="blocks")
    monkeypatch.setattr(journal, "device_name", lambda device: "NVIDIA H100")
    state = SimpleNamespace(
        config=config,
        model=torch.nn.Linear(2, 2),
        compute_dtype=torch.bfloat16,
        world=SimpleNamespace(device=torch.device("cuda"), size=1),
    )
    expected = "6 parameters, bfloat16 on NVIDIA H100, ranks: 1, --compile.mode blocks"
    assert journal._model(state) == expected
    state.world.device = torch.device("cpu")
    assert "compile" not in journal._model(state)


def test_a_parameter_that_no_backward_reaches_is_named(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the hooks of the last micro-batch or, if there is one alone, by its gradient."""
    parallel = project.module("distributed.parallel")
    error = project.module("errors").UserError
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module = SimpleNamespace(module=parallel.DdpModule(model), find_unused_parameters=False)
    monkeypatch.setattr(parallel, "DistributedDataParallel", SimpleNamespace)
    state = SimpleNamespace(module=module, plan=[1])
    x = torch.ones(1, 2)
    model[0](x).sum().backward()
    with pytest.raises(error, match=r"^the loss does not depend on 1\.weight: remove"):
        parallel.require_gradients(state)
    model(x).sum().backward()
    parallel.require_gradients(state)
    state.plan = [1, 2]
    parallel.accumulate(state, last=True)
    model[0](x).sum().backward()
    with pytest.raises(error, match=r"^the loss of the last micro-batch does not depend on 1\.w"):
        parallel.require_gradients(state)
    module.find_unused_parameters = True
    parallel.require_gradients(state)


def test_ranks_compare_what_they_have_loaded_and_nothing_else(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    monkeypatch.setattr(
        project.module("distributed.parallel"),
        "compare_loaded",
        lambda tensors, world: compared.append(len(list(tensors))),
    )
    state = project.module("train").setup(project.config(device="cpu", run_dir=tmp_path))
    group = project.module("distributed").Group(state.world)
    checkpointer = project.module("resume").resume(state, tmp_path, group)
    assert compared == []
    checkpointer.save(1)
    checkpointer.close()
    resumed = project.module("resume").resume(state, tmp_path, group)
    resumed.close()
    state.loader.close()
    assert compared == [len(resumed.tensors())]
