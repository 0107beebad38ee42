"""How a run ends: what it prints, what status.json holds, and from where it resumes."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import Project, project_fixture, recipe

project = project_fixture(
    "of_endings", parallelism="single", checkpoint="dcp_async", tracker="none"
)


# Stops at step 7 by Ctrl-C, and a second time where it is asked to: in a step, or while the save of
# the last step is under way.
TWICE = """
import os, signal, sys, time
from of_endings import __main__, callbacks
from of_endings.checkpoint.publish import Publisher

WHERE = sys.argv.pop()

def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)

class Stopping:
    def after_step(self, state, record):
        if state.step == 7:
            ctrl_c()
            if WHERE == "step":
                ctrl_c()

commit = Publisher.commit
def committed(self, reserved, manifest):
    if manifest["step"] == 7:
        ctrl_c()
        time.sleep(0.5)
    commit(self, reserved, manifest)

Publisher.commit = committed
callbacks.callbacks = lambda config, run_dir: [Stopping()]
sys.exit(__main__.main())
"""


@pytest.mark.parametrize(("where", "saved"), [("step", 4), ("save", 7)])
def test_a_second_ctrl_c_says_what_is_saved(
    project: Project, tmp_path: Path, where: str, saved: int
) -> None:
    words = ["train", *project.settings, "--run-dir", str(tmp_path / "run"), "--checkpoint.every"]
    outcome = project.python("-c", TWICE, *words, "4", where)
    assert outcome.returncode == 130, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert f"step {saved} is saved. To resume, run the same command again" in outcome.stderr
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["status"], status["saved_step"]) == ("preempted", saved)
    assert max((tmp_path / "run/checkpoints").iterdir()).name == f"step_{saved:08}"
    assert not re.search("failed|KeyboardInterrupt", json.dumps(status))


@pytest.mark.parametrize(
    "content", [None, "running", "[1]", "\0\0", "[" * 100_000, '{"status": 1}']
)
def test_a_run_finished_before_has_a_true_status(
    project: Project, tmp_path: Path, content: str | None, caplog: Any
) -> None:
    """Also one that was killed before it could say so; the summary reads nothing unguarded."""
    words = ("train", *project.settings, "--run-dir", str(tmp_path), "--train.steps", "3")
    project(*words)
    path, metrics = tmp_path / "status.json", tmp_path / "metrics.jsonl"
    before = path.read_text()
    project(*words)
    assert path.read_text() == before, "it was true"
    caplog.set_level("INFO")
    metrics.write_bytes(b'{"step": 3, "samples_per_second": "x", "validation_loss": [1]}\n\xff\n')
    for content in (None, '{"status": "running", "step": 0}', "[1]", "\0\0", "[" * 100_000):
        path.unlink()
        if content is not None:
            path.write_text(content)
        caplog.clear()
        project(*words)
        status = json.loads(path.read_text())
        assert (status["status"], status["step"]) == ("finished", 3)
        assert "already finished at step 3" in caplog.text
    # It keeps what the start that trained has recorded of itself, even if that start was killed.
    path.write_text(json.dumps({**json.loads(before), "status": "running", "step": 0}))
    project(*words)
    status, recorded = json.loads(path.read_text()), json.loads(before)
    for name in ("status", "step", "ranks", "machine", "versions", "source"):
        assert status[name] == recorded[name], name
    metrics.unlink()
    metrics.mkdir()
    project(*words)


def test_many_checkpoints_are_one_short_line(project: Project, tmp_path: Path) -> None:
    for step in range(1, 3001):
        (tmp_path / f"checkpoints/step_{step:08}").mkdir(parents=True)
    result = project.module("train").Result("already finished", 3000)
    line = project.module("run.summary").summary(tmp_path, result)[0]
    assert line == f"checkpoints in {tmp_path}/checkpoints: 3000, the newest is step_00003000"


def test_a_log_that_cannot_be_opened_is_named(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed seek says no name of its own."""

    def seek(*arguments: Any, **named: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(project.module("run.logs"), "LogFile", seek)
    line = project.refuses("train", *project.settings, "--run-dir", str(tmp_path / "run"))
    assert f"Input/output error: '{tmp_path}/run/logs/train.log'" in line


def test_a_fresh_run_is_set_aside_once_and_not_by_its_own_restart(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restarted ranks get --fresh again; the lock file tells them whose run it is."""
    module, group = project.module("run.directory"), project.module("distributed").Group()

    def start(launcher: str) -> list[str]:
        monkeypatch.setattr(module, "launcher", lambda: launcher)
        with module.RunDirectory(tmp_path / "run", group, fresh=True) as taken:
            (taken.path / "status.json").touch()
        return sorted(path.name for path in tmp_path.iterdir())

    assert start("the first") == ["run"]
    assert start("the first") == ["run"]
    assert start("another") == ["run", "run.old-1"]
    assert start("another") == ["run", "run.old-1"]


def test_a_start_that_never_began_leaves_nothing(project: Project, tmp_path: Path) -> None:
    """Whether it came as far as its log or not."""
    module, group = project.module("run.directory"), project.module("distributed").Group()
    for logged in (True, False):
        with module.RunDirectory(tmp_path / "run", group) as taken:
            if not logged:
                shutil.rmtree(taken.path / "logs")
        assert list(tmp_path.iterdir()) == []


class FailingInWorkers:
    """Samples of a dataset; after a number of batches of a worker, what `then` does."""

    def __init__(self, samples: Any, then: Any, after: int = 0) -> None:
        self.samples, self.then, self.batches = samples, then, after

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, numbers: list[int]) -> Any:
        batch = self.samples.__getitems__(numbers)
        self.batches -= multiprocessing.parent_process() is not None
        return {**batch, "more": self.then()} if self.batches < 0 else batch


@pytest.fixture
def of_workers(project: Project, tmp_path: Path, monkeypatch: Any) -> Any:
    """A run with a loader worker that at last does something; callbacks as they are given."""
    training = project.module("train")
    config = project.config(
        run_dir=tmp_path, train__loader_workers=1, checkpoint__every=2, track=False
    )
    build = training.build_datasets

    def run(then: Any, after: int = 0, *callbacks: Any) -> None:
        def built(config: Any) -> tuple[Any, ...]:
            samples, *others = build(config)
            return FailingInWorkers(samples, then, after), *others

        monkeypatch.setattr(training, "build_datasets", built)
        training.run(config, callbacks)

    return run


def test_a_batch_that_a_worker_cannot_send_ends_the_run(project: Project, of_workers: Any) -> None:
    error = project.module("errors").UserError
    with pytest.raises(error, match=r"^a loader worker cannot send a batch: .*pickle"):
        of_workers(lambda: lambda: None, 2)
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_while_it_sends_is_named(
    project: Project, of_workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks the connection over which a batch is received, which alone tells no cause."""
    sampling = project.module("sampling")

    def die_and_break(iterator: Any) -> Any:
        (worker,) = iterator._workers
        worker.kill()
        raise ConnectionResetError(104, "Connection reset by peer")

    iterator = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    start = sampling.start_workers

    def start_and_break(*arguments: Any) -> Any:
        made = start(*arguments)
        monkeypatch.setattr(iterator, "__next__", die_and_break)
        return made

    monkeypatch.setattr(sampling, "start_workers", start_and_break)
    with pytest.raises(RuntimeError, match="is killed by signal: Killed"):
        of_workers(dict)
    monkeypatch.undo()


# A run whose loader worker hangs at its fourth batch.
HANGS = """
import multiprocessing, re, sys, time
from of_endings import __main__, data, sampling, train

build = data.build_datasets


class Hanging:
    def __init__(self, samples):
        self.samples, self.batches = samples, 0

    def __len__(self):
        return len(self.samples)

    def __getitems__(self, numbers):
        self.batches += multiprocessing.parent_process() is not None
        if self.batches == 4:
            HANG
        return self.samples.__getitems__(numbers)


def built(config):
    samples, *others = build(config)
    return Hanging(samples), *others


train.build_datasets = built
sampling.PATIENCE = sampling.AFTER_PATIENCE = 1.0
sys.exit(__main__.main())
"""
# C code that holds Python's lock: the worker cannot hand over the batch before, either.
HOLDS_THE_LOCK = 're.match("(a|aa)+$", "a" * 200 + "b")'


@pytest.mark.parametrize(
    ("hang", "last", "signals"),
    [
        ("time.sleep(1e6)", 3, [signal.SIGTERM]),
        ("time.sleep(1e6)", 3, [signal.SIGINT, signal.SIGINT]),
        (HOLDS_THE_LOCK, 2, [signal.SIGTERM]),
    ],
)
def test_a_stop_ends_the_wait_for_a_worker_that_hangs(
    project: Project, tmp_path: Path, hang: str, last: int, signals: list[int]
) -> None:
    """And the worker, which ignores stop signals, does not outlive the run."""
    words = (*project.settings, "--run-dir", str(tmp_path / "run"), "--checkpoint.every", "2")
    words += ("--train.log-every", "1", "--train.micro-batch-size", "8")
    with subprocess.Popen(
        [
            *(sys.executable, "-c", HANGS.replace("HANG", hang)),
            *("train", *words, "--train.loader-workers", "1"),
        ],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": str(project.folder / "src")},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        watch = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
        watch.start()
        assert any(line.startswith(f"step {last}/") for line in process.stderr)
        for number in signals:
            time.sleep(1.5)  # it waits for the worker now
            process.send_signal(number)
        said = process.stderr.read()  # until the worker is gone, too
        assert process.wait() == 130, said
        watch.cancel()
    assert "; step 2 is saved. To resume, run the same command again" in said
    assert json.loads((tmp_path / "run/status.json").read_text())["status"] == "preempted"


def test_a_pinning_thread_that_has_died_ends_the_run(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a time limit DataLoader does not look for it."""

    class Iterator:
        _pin_memory_thread = threading.Thread()  # which does not run

        def __next__(self) -> None:
            raise RuntimeError("DataLoader timed out after 5 seconds")

    loader = project.module("train").setup(project.config()).loader
    loader.iterator = Iterator()
    with pytest.raises(RuntimeError, match="timed out"):
        loader._wait(None)


def test_a_slow_batch_is_waited_for_after_a_stop_signal(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience begins anew with each batch; without a signal there is no end to it."""
    sampling, clock = project.module("sampling"), iter(range(0, 1000, 9))
    stop = project.module("distributed.stop").Stop(project.module("distributed").Group())

    class Iterator:
        answers = iter([*["late"] * 9, 0, "late", "late", 1, "late", "late", 2, *["late"] * 9])

        def __next__(self) -> int:
            if (answer := next(self.answers)) == "late":
                raise RuntimeError("DataLoader timed out after 5 seconds")
            return answer

    loader = project.module("train").setup(project.config()).loader
    loader.iterator = Iterator()
    with monkeypatch.context() as patch:
        patch.setattr(sampling.time, "monotonic", lambda: next(clock))
        assert loader._wait(stop) == 0
        stop.received_at = 1.0
        assert [loader._wait(stop), loader._wait(stop)] == [1, 2]
        with pytest.raises(KeyboardInterrupt):
            loader._wait(stop)


def test_a_batch_that_fails_when_nobody_waits_any_more_is_not_told(project: Project) -> None:
    """A worker's queue is closed by then; a traceback would follow the run's error."""
    samples, queue = project.module("sampling"), multiprocessing.Queue()
    queue.close()
    samples._send_error(queue, OSError("AF_UNIX path too long"), (0, None))


def test_a_temporary_folder_of_a_long_name_ends_the_run(project: Project, tmp_path: Path) -> None:
    """A worker's socket stands in it, and its name may have some hundred letters."""
    (folder := tmp_path / ("scratch_of_user_" * 7)).mkdir()
    words = ("-m", project.name, "train", *project.settings, "--run-dir", str(tmp_path / "run"))
    outcome = project.python(*words, "--train.loader-workers", "2", TMPDIR=str(folder))
    *_, line = outcome.stderr.splitlines()
    assert outcome.returncode == 2, outcome.stderr
    assert line.startswith("error: a loader worker cannot send a batch: AF_UNIX path too long")
    assert "Traceback" not in outcome.stderr


def test_early_stopping_survives_a_resume(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same command then has nothing to do; with more steps it goes on."""
    names: dict[str, Any] = {"Any": Any}
    exec(recipe("python", "class EarlyStopping"), names)

    class Worse(names["EarlyStopping"]):
        """Sees losses that get worse."""

        def after_validation(self, state: Any, figures: dict[str, float]) -> None:
            super().after_validation(state, {"validation_loss": float(state.step)})

    train = project.module("train")
    caplog.set_level("INFO")
    changes = {"run_dir": tmp_path, "train__validate_every": 2}
    assert train.run(project.config(**changes, train__steps=4), [Worse()]).step == 4
    result = train.run(project.config(**changes), [Worse()])  # after one bad validation
    assert (result.status, result.step) == ("finished", 8)
    why = "no validation was better than 2.0000"
    assert f"{why}: stopping at step 8" in caplog.text
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["step"], status["reason"]) == ("finished", 8, why)
    assert (tmp_path / "checkpoints/step_00000008").exists()
    project("report", "--run-dir", str(tmp_path))
    assert f"finished at step 8: {why}" in (tmp_path / "report.html").read_text("utf-8")
    again = train.run(project.config(**changes), [Worse()])
    assert (again.status, again.step) == ("already finished", 8)
    assert again.validation == result.validation
    longer = train.run(project.config(**changes, train__steps=30))
    assert (longer.status, longer.step) == ("finished", 30)


def test_a_run_that_ended_early_goes_on_from_an_earlier_checkpoint(
    project: Project, tmp_path: Path
) -> None:
    """Where the last one is damaged, the run is not over."""

    class Now:
        def after_step(self, state: Any, record: Any) -> None:
            if state.step == 7:
                state.finish("now")

    train, changes = project.module("train"), {"run_dir": tmp_path, "checkpoint__every": 5}
    assert train.run(project.config(**changes), [Now()]).step == 7
    shutil.rmtree(tmp_path / "checkpoints/step_00000007")
    assert train.run(project.config(**changes)).step == 20


@pytest.mark.parametrize("when", ["before_step", "after_step", "after_validation"])
def test_an_early_end_is_kept_wherever_a_validation_is_due(
    project: Project, tmp_path: Path, when: str
) -> None:
    """It cuts none short, and a stop signal after it changes nothing; nor does a second start."""

    def end(state: Any, *rest: Any) -> None:
        if state.step == 4 - (when == "before_step"):
            state.finish("now")
            signal.raise_signal(signal.SIGTERM)

    train, changes = project.module("train"), {"run_dir": tmp_path, "train__validate_every": 1}
    before = signal.getsignal(signal.SIGTERM)
    results = [train.run(project.config(**changes), [SimpleNamespace(**{when: end})])]
    results.append(train.run(project.config(**changes)))
    assert [result.step for result in results] == [4, 4]
    assert [result.status for result in results] == ["finished", "already finished"]
    assert results[0].validation == results[1].validation != {}
    assert signal.getsignal(signal.SIGTERM) is not before  # it did come


def test_what_a_callback_saves_is_that_of_the_step(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a save in the background is slow, and the callback gives away its own list."""
    publish = project.module("checkpoint.publish")
    commit = publish.Publisher.commit
    slow = lambda *rest: (time.sleep(0.3), commit(*rest))[1]  # noqa: E731
    monkeypatch.setattr(publish.Publisher, "commit", slow)

    class Seen:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def after_step(self, state: Any, record: Any) -> None:
            self.steps.append(state.step)

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]

    config = project.config(run_dir=tmp_path, checkpoint__every=5)
    project.module("train").run(config, [Seen()])
    for step in (10, 15, 20):
        manifest = json.loads((tmp_path / f"checkpoints/step_{step:08}/manifest.json").read_text())
        assert manifest["callbacks"] == {"Seen": {"steps": [*range(1, step + 1)]}}


def test_the_state_of_a_callback_is_in_each_checkpoint(project: Project, tmp_path: Path) -> None:
    class Counting:
        """Adds up at each step, and notes with what it began."""

        count, began = 0, 0

        def __init__(self, by: int) -> None:
            self.by = by

        def after_step(self, state: Any, record: Any) -> None:
            self.count += self.by

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = self.began = state["count"]

    train, changes = project.module("train"), {"run_dir": tmp_path, "checkpoint__every": 5}
    for newest, steps in ((0, 10), (10, 20), (15, 20)):
        two = Counting(1), Counting(7)  # of one class
        train.run(project.config(**changes, train__steps=steps), two)
        for one in two:
            assert (one.began, one.count) == (one.by * newest, one.by * steps)
        if steps == 20:
            shutil.rmtree(tmp_path / "checkpoints/step_00000020")
    shutil.rmtree(tmp_path / "checkpoints/step_00000015")
    train.run(project.config(**changes, train__steps=20))  # without it: what is saved is left alone


def test_buffers_are_not_prepared_while_a_save_is_in_flight(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a base, both would compare it at once: two threads in collectives of one group."""
    writer = project.module("checkpoint.writer").Writer
    in_flight: list[bool] = []
    prepare = writer.prepare

    def noted(self: Any, tensors: Any) -> None:
        in_flight.append(self.writing is not None)
        prepare(self, tensors)

    monkeypatch.setattr(writer, "prepare", noted)
    for every in (1, 3):
        config = project.config(
            run_dir=tmp_path / str(every), train__steps=4, checkpoint__every=every
        )
        project.module("train").run(config)
    # Where the first step is saved, the save has prepared them.
    assert in_flight == [False]
