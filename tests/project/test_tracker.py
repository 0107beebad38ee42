"""A tracker's log says what metrics.jsonl says, by its own reader; a broken one changes nothing."""

import contextlib
import json
import logging
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import Project

Lines = dict[int, dict[str, float]]
LOGGED = {"train/loss", "train/lr", "train/grad_norm", "perf/samples_per_second"}
LOGGED |= {
    "perf/data_seconds",
    "perf/host_bytes",
    "validation/loss",
    "validation/bits_per_byte",
    "train/mine",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where W&B keeps what it keeps for a user."""
    home = tmp_path_factory.mktemp("tracker")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(home))
        for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_API_KEY"):
            patch.delenv(name, raising=False)
        yield home


@contextlib.contextmanager
def project_with(home: Path, tracker: str) -> Iterator[Project]:
    """Its tracker is waited for as long as a busy machine may take."""
    answers = {"parallelism": "single", "checkpoint": "torch_save", "tracker": tracker}
    with Project.imported(home / tracker, f"with_{tracker}", **answers) as project:
        if tracker != "none":
            project.module("run.tracker").LIMIT = 150.0
        with pytest.MonkeyPatch.context() as patch:
            if tracker == "wandb":
                import wandb

                long = {"init_timeout": 150, "finish_timeout": 150}
                kind = wandb.Settings
                patch.setattr(wandb, "Settings", lambda **settings: kind(**settings | long))
            yield project


def train(project: Project, name: str, steps: int, stop: int = 0, **changes: Any) -> Any:
    """Train the run `name` with a log line at every step; till an error behind step `stop`."""
    fixed = {"run_dir": project.folder / "runs" / name, "train.steps": steps}
    fixed |= {"train.log_every": 1, "checkpoint.every": 3, "train.validate_every": 3}
    config = project.config(**fixed, **changes)

    def observer(state: Any) -> None:
        if state.step == stop > 0:
            raise InterruptedError

    def add(state: Any, record: Any) -> None:
        if record:
            record["mine"] = state.step / 4

    project.module("train").run(config, [SimpleNamespace(before_step=observer, after_step=add)])
    return config


def journal(run_dir: Path) -> Lines:
    """Of metrics.jsonl, what a tracker should have, by its tags."""
    found = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    return {
        line.pop("step"): {
            f"perf/{name}"
            if name.endswith(("seconds", "per_second", "bytes"))
            else re.sub("^(validation_|)", lambda m: f"{m[0][:-1] or 'train'}/", name): value
            for name, value in line.items()
            if name != "time"
        }
        for line in found
    }


def gather(points: Iterator[tuple[int, str, float]]) -> Lines:
    lines: Lines = {}
    for step, name, value in points:
        assert name not in lines.setdefault(step, {}), f"{name} of step {step} is there twice"
        lines[step][name] = value
    return lines


class TensorBoard:
    """Reads event files."""

    precision = 1e-6  # it holds float32
    takes_back = True

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        self.events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0, "tensors": 0})
        self.events.Reload()

    def lines(self) -> Lines:
        tags = self.events.Tags()["scalars"]
        return gather((e.step, tag, e.value) for tag in tags for e in self.events.Scalars(tag))

    def texts(self, tag: str) -> list[str]:
        found = self.events.Tensors(f"{tag}/text_summary")
        return [value.tensor_proto.string_val[0].decode() for value in found]

    def learning_rates(self) -> list[float]:
        return [json.loads(text)["optim"]["learning_rate"] for text in self.texts("config")]

    def status(self) -> str:
        return self.texts("status")[-1]


class WeightsAndBiases:
    """Reads what would be sent: a log of protocol buffers in LevelDB's framing."""

    precision = 0.0
    takes_back = True

    def __init__(self, run_dir: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        (path,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")  # one, and whole
        self.folder, self.records = path.parent, []
        data, part, at = path.read_bytes(), b"", 7
        while at + 7 <= len(data):
            if (room := 32768 - at % 32768) < 7:
                at += room
                continue
            _, size, kind = struct.unpack_from("<IHB", data, at)
            part += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                self.records.append(Record.FromString(part))
                part = b""

    def of(self, kind: str) -> list[Any]:
        return [getattr(r, kind) for r in self.records if r.WhichOneof("record_type") == kind]

    def lines(self) -> Lines:
        lines: Lines = {}
        for record in self.of("history"):
            values = {(i.nested_key or [i.key])[0]: json.loads(i.value_json) for i in record.item}
            step = values["_step"]
            assert step not in lines, f"step {step} is there twice"
            values.pop("sample", None)
            lines[step] = {name: value for name, value in values.items() if name[0] != "_"}
        return lines

    def learning_rates(self) -> list[float]:
        updates = [u for config in self.of("config") for u in config.update if u.key == "optim"]
        return [json.loads(update.value_json)["learning_rate"] for update in updates]

    def status(self) -> str:
        updates = [u for summary in self.of("summary") for u in summary.update]
        return [json.loads(u.value_json) for u in updates if u.key == "status"][-1]


class MLflow:
    """Asks the store."""

    precision = 0.0
    takes_back = False

    def __init__(self, run_dir: Path) -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
        self.id = json.loads((run_dir / "mlflow.json").read_text("utf-8"))["id"]
        experiments = [e.experiment_id for e in self.client.search_experiments()]
        runs = self.client.search_runs(experiments)
        (self.run,) = (run for run in runs if run.info.run_name == run_dir.name)

    def lines(self) -> Lines:
        histories = (self.client.get_metric_history(self.id, k) for k in self.run.data.metrics)
        return gather((m.step, m.key, m.value) for history in histories for m in history)

    def learning_rates(self) -> list[float]:
        first = float(self.run.data.params["optim.learning_rate"])
        (artifact,) = (p for p in self.artifacts() if p.name == "config.json")
        newest = json.loads(artifact.read_text("utf-8"))["optim"]["learning_rate"]
        return [first] if newest == first else [first, newest]

    def status(self) -> str:
        names = {"FINISHED": "finished", "KILLED": "preempted", "FAILED": "failed"}
        return names[self.run.info.status]

    def artifacts(self) -> list[Path]:
        found = [a.path for a in self.client.list_artifacts(self.id) if not a.is_dir]
        return [Path(self.client.download_artifacts(self.id, path)) for path in found]


READERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


@pytest.mark.parametrize("tracker", READERS)
def test_its_log_is_the_journal(home: Path, tracker: str) -> None:
    """Of a run that began untracked, broke off, went on from before that, and got a new setting."""
    with project_with(home, tracker) as project:
        run_dir, read = project.folder / "runs" / "life", READERS[tracker]
        train(project, "life", 2, track=False)
        with pytest.raises(InterruptedError):
            train(project, "life", 6, stop=5)
        broken_off = read(run_dir)
        assert broken_off.status() == "failed"
        assert list(broken_off.lines()) == [1, 2, 3, 4, 5]

        if tracker == "tensorboard":
            time.sleep(1)  # it reads its files in the order of the seconds in their names
        config = train(project, "life", 6)
        found, wanted = read(run_dir), journal(run_dir)
        assert list(wanted) == [1, 2, 3, 4, 5, 6]
        assert set.union(*map(set, wanted.values())) >= LOGGED
        if not read.takes_back:  # it keeps its first figures of what was done again
            for step, was in broken_off.lines().items():
                for name in ("train/loss", "train/lr"):
                    assert was[name] == wanted[step][name]
                wanted[step] = was
        same(found.lines(), wanted, read.precision)
        assert found.status() == "finished"
        assert found.learning_rates() == [config.optim.learning_rate]

        train(project, "life", 7, optim__learning_rate=1e-4)
        found = read(run_dir)
        same({7: found.lines()[7]}, {7: journal(run_dir)[7]}, read.precision)
        assert found.learning_rates()[-1] == 1e-4

        assert found.status() == "finished"
        assert list(found.lines()) == [1, 2, 3, 4, 5, 6, 7]
        if tracker == "wandb":  # a sweep's runs lie in a folder
            assert [run.run_group for run in found.of("run")] == ["runs"]


def same(found: Lines, wanted: Lines, precision: float) -> None:
    assert sorted(found) == sorted(wanted)
    for step, line in wanted.items():
        assert found[step] == pytest.approx(line, rel=precision, abs=0), step


def test_with_none_there_is_none(home: Path) -> None:
    with project_with(home, "none") as project:
        assert not list(project.folder.glob("src/*/run/tracker_*"))
        source = (project.folder / "src" / project.name / "run/tracker.py").read_text("utf-8")
        assert len(source.splitlines()) < 30 and "thread" not in source
        train(project, "life", 3)
        left = {path.name for path in (project.folder / "runs/life").iterdir()}
        assert left == {
            ".lock",
            "checkpoints",
            "config.json",
            "logs",
            "metrics.jsonl",
            "samples",
            "spec.json",
            "status.json",
        }


@pytest.fixture(scope="module")
def project(home: Path) -> Iterator[Project]:
    """A render to break the tracker of, and what its training comes to untracked."""
    with project_with(home / "broken", "tensorboard") as project:
        train(project, "untracked", 4, track=False)
        project.trained = outcome(project, "untracked")
        yield project


def outcome(project: Project, name: str) -> dict[str, Any]:
    run_dir = project.folder / "runs" / name
    losses = torch.tensor([line["train/loss"] for line in journal(run_dir).values()])
    return {"losses": losses, **project.tensors(run_dir)}


def test_a_run_stopped_in_its_last_validation_is_not_finished(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the tracker says, too, whatever step it is at."""
    with project_with(home / "stopped", "tensorboard") as project:
        validation, run_dir = project.module("validation"), project.folder / "runs/stopped"
        validate = validation.validate

        def stopped(state: Any, *rest: Any) -> dict[str, float]:
            os.kill(os.getpid(), signal.SIGTERM)
            return validate(state, *rest)

        monkeypatch.setattr(validation, "validate", stopped)
        train(project, "stopped", 2)
        assert json.loads((run_dir / "status.json").read_text("utf-8"))["step"] == 2
        assert TensorBoard(run_dir).status() == "preempted"
        monkeypatch.undo()
        time.sleep(1)  # TensorBoard reads its files in the order of the seconds in their names
        train(project, "stopped", 2)
        assert TensorBoard(run_dir).status() == "finished"
        # What the first start did not validate was validated by the second, and is there.
        wanted = json.loads((run_dir / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
        events = TensorBoard(run_dir).events.Scalars("validation/loss")
        assert [event.step for event in events] == [2]
        assert events[0].value == pytest.approx(wanted["validation_loss"])


class Faulty:
    """A tracker that fails at a chosen call."""

    logged = 0
    where, error = "", RuntimeError("no space left on device\nand a long story")

    def __init__(self, *arguments: Any) -> None:
        self.reach("open")

    def scalars(self, step: int, values: dict[str, float], time: float) -> None:
        self.reach("scalars")

    def sample(self, path: Path, step: int) -> None:
        self.reach("sample")

    def close(self, status: str) -> None:
        self.reach("close")

    def reach(self, where: str) -> None:
        if where == self.where:
            if self.error is None:
                time.sleep(60)
            raise self.error


@pytest.mark.parametrize(
    ("where", "error", "told"),
    [
        ("open", Faulty.error, "RuntimeError: no space left on device"),
        ("open", SystemExit(1), "SystemExit: 1"),
        ("open", None, "did not open"),
        ("scalars", ValueError(), "ValueError"),
        ("scalars", None, "did not close"),
        ("sample", Faulty.error, "no space left on device"),
        ("close", Faulty.error, "no space"),
        ("close", None, "did not close"),
        ("import", None, "ModuleNotFoundError"),
        ("disk", None, "FileExistsError"),
        ("nowhere", None, None),
    ],
)
def test_a_broken_tracker_changes_nothing(
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    error: BaseException | None,
    told: str | None,
) -> None:
    name = f"{where}-{str(told)[:9]}"
    tracking = project.module("run.tracker")
    monkeypatch.setattr(tracking, "LIMIT", 1.0 if told and "did not" in told else 150.0)
    if where == "import":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    elif where == "disk":
        (project.folder / "runs" / name).mkdir(parents=True)
        (project.folder / "runs" / name / "tensorboard").write_text("in the way")
    else:
        monkeypatch.setattr(Faulty, "where", where)
        monkeypatch.setattr(Faulty, "error", error)
        monkeypatch.setattr(tracking, "Tracker", Faulty)
    with caplog.at_level(logging.WARNING):
        train(project, name, 4)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (told is not None)
    assert not told or (told in warnings[0] and "\n" not in warnings[0])
    found = outcome(project, name)
    assert found.keys() == project.trained.keys()
    assert all(torch.equal(value, project.trained[key]) for key, value in found.items())


def test_what_it_is_told_and_by_whom(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finite figure once, by one thread that is not the training's; the status at the end."""
    told: list[Any] = []

    class Listener(Faulty):
        def scalars(self, step: int, values: dict[str, float], time: float) -> None:
            told.append((step, values, time, threading.current_thread()))

        def close(self, status: str) -> None:
            told.append(status)

    tracking = project.module("run.tracker")
    monkeypatch.setattr(tracking, "Tracker", Listener)
    config = project.config(train__steps=3)
    record = {"step": 1, "time": 5.0, "loss": float("nan"), "lr": 0.1, "mfu": None, "samples": 8}

    def play(last: int, said: str, error: bool = False) -> list[Any]:
        told.clear()
        (run_dir := project.folder / "runs/nothing").mkdir(parents=True, exist_ok=True)
        (run_dir / "status.json").write_text(said)
        try:
            with tracking.Tracking(config, run_dir, 0) as tracker:
                for step in range(1, last + 1):
                    tracker.after_step(SimpleNamespace(step=step), record if step == 1 else None)
                assert not error, "on purpose"
        except AssertionError:
            assert error
        return told

    finished = '{"status": "finished"}'
    (line, status) = play(3, finished)
    assert line[:3] == (1, {"train/lr": 0.1, "train/samples": 8}, 5.0) and status == "finished"
    assert line[3] is not threading.current_thread() and not line[3].is_alive()
    assert play(3, '{"status": "preempted"}')[1] == "preempted"
    assert play(3, "half a li")[1] == "preempted"
    assert play(2, finished, error=True)[1] == "failed"
    with pytest.raises(KeyboardInterrupt), tracking.Tracking(config, project.folder, 0) as tracker:
        raise KeyboardInterrupt
    assert tracker.status == "preempted"


def test_what_fails_is_one_warning_and_the_rest_is_tracked(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []

    class Picky(Faulty):
        def scalars(self, step: int, values: dict[str, float], time: float) -> None:
            if step in (2, 3):
                raise ConnectionError(f"not step {step}")
            told.append(step)

        def close(self, status: str) -> None:
            told.append(status)

    monkeypatch.setattr(project.module("run.tracker"), "Tracker", Picky)
    with caplog.at_level(logging.WARNING):
        train(project, "picky", 5)
    assert told == [1, 4, 5, "finished"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("training continues: ConnectionError: not step 2")
    log = (project.folder / "runs/picky/logs/train.log").read_text("utf-8")
    assert "ConnectionError: not step 3" in log


def test_a_tracker_that_opens_late_gets_all(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the run ends first."""
    told: list[Any] = []

    class Late(Faulty):
        def __init__(self, *arguments: Any) -> None:
            time.sleep(3)

        def scalars(self, step: int, values: dict[str, float], time: float) -> None:
            told.append(step)

        def close(self, status: str) -> None:
            told.append(status)

    tracking = project.module("run.tracker")
    monkeypatch.setattr(tracking, "Tracker", Late)
    monkeypatch.setattr(tracking, "LIMIT", 0.1)
    leave = tracking.Tracking.__exit__

    def wait_long(self: Any, *rest: Any) -> None:
        monkeypatch.setattr(tracking, "LIMIT", 150.0)
        leave(self, *rest)

    monkeypatch.setattr(tracking.Tracking, "__exit__", wait_long)
    with caplog.at_level(logging.WARNING):
        train(project, "late", 2)
    assert told == [1, 2, "finished"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "did not open within" in line and "records are queued" in line


def test_names_that_mlflow_refuses_are_logged_by_others(home: Path) -> None:
    """In a folder whose name would end an address, too."""
    with project_with(home / "named", "mlflow") as project:
        (odd := project.folder / "50 %? #").mkdir()
        (project.folder / "plain").symlink_to(odd)  # for the reader
        run_dir = odd / "named"
        naming = SimpleNamespace(
            after_validation=lambda state, figures: figures.update({"validation_acc@1": 0.5})
        )
        fixed = {"train__log_every": 1, "train__validate_every": 3, "train__steps": 3}
        project.module("train").run(project.config(run_dir=run_dir, **fixed), [naming])
        read = MLflow(project.folder / "plain/named")
        lines = read.lines()
        assert list(lines) == [1, 2, 3] and lines[3]["validation/acc_1"] == 0.5
        assert {path.name for path in odd.iterdir()} == {"named", "mlflow.db", "mlflow-artifacts"}
        assert not (project.folder / "50 %").exists()


def test_settings_of_the_users_own_win(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with project_with(home / "own", "wandb") as project:
        monkeypatch.setenv("WANDB_PROJECT", "theirs")
        monkeypatch.setenv("WANDB_RUN_GROUP", "sweep")
        import wandb

        wandb.teardown()  # it reads them once in a process
        train(project, "own", 2)
        wandb.teardown()
        run, *_ = WeightsAndBiases(project.folder / "runs/own").of("run")
        assert (run.project, run.run_group, run.display_name) == ("theirs", "sweep", "own")
        monkeypatch.setenv("WANDB_MODE", "disabled")
        wandb.teardown()
        train(project, "disabled", 2)
        assert not (project.folder / "runs/disabled/wandb").exists()
        wandb.teardown()
    with project_with(home / "own", "mlflow") as project:
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
        train(project, "own", 2)
        found = MLflow(project.folder / "runs/own")
        assert found.client.get_experiment(found.run.info.experiment_id).name == "theirs"


@pytest.mark.parametrize("user_home", ["/nonexistent/home", "/dev/null", None])
def test_a_user_without_a_home_has_an_offline_log(tmp_path: Path, user_home: str | None) -> None:
    """As on a compute node, whose home is not mounted, cannot be written, or is not named."""
    with project_with(tmp_path, "wandb") as project:
        environment = {name: value for name, value in os.environ.items() if "WANDB" not in name}
        environment["PYTHONPATH"] = str(project.folder / "src")
        environment.pop("HOME", None)
        if user_home is not None:
            environment["HOME"] = user_home
        options = (*project.settings, "--train.steps", "3", "--name", "homeless")
        process = subprocess.run(
            [sys.executable, "-m", project.name, "train", *options],
            cwd=project.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=300,
        )
        assert process.returncode == 0, process.stdout
        written = WeightsAndBiases(project.folder / "runs/homeless")
        assert list(written.lines()) == [3], process.stdout


@pytest.mark.parametrize(("track", "expected"), [(True, 1), (False, 0)])
def test_a_run_has_a_tracker_unless_it_wants_none(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, track: bool, expected: int
) -> None:
    """On the first rank only: the others write nothing."""
    training = project.module("train")
    made: list[int] = []

    class Tracker:
        def __init__(self, config: Any, run_dir: Path, step: int) -> None:
            made.append(step)

    monkeypatch.setattr(training, "TRACKERS", (Tracker,))
    training.run(project.config(run_dir=tmp_path / "first", track=track, train__steps=1))
    assert len(made) == expected
    group_of = training.Group.__init__

    def of_another_rank(group: Any, world: Any = None) -> None:
        group_of(group, world)
        group.is_first = False

    monkeypatch.setattr(training.Group, "__init__", of_another_rank)
    training.run(project.config(run_dir=tmp_path / "other", track=track, train__steps=1))
    assert len(made) == expected


def test_an_address_with_a_password_is_refused(home: Path) -> None:
    with project_with(home / "refused", "mlflow") as project:
        for uri in ("https://me:word@host/a", "postgresql://me:word@host/db", "http://token@host"):
            with pytest.raises(project.module("errors").UserError, match="MLFLOW_TRACKING_URI"):
                project.config(tracker__uri=uri)
        for uri in ("https://host/a@b", "sqlite:////tmp/a@b.db", "http://127.0.0.1:5000"):
            assert project.config(tracker__uri=uri).tracker.uri == uri
