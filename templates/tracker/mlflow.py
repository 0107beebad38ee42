"""Log to MLflow: by default to a SQLite file next to the runs, for `mlflow ui`, or to a server."""

import contextlib
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import flatten, to_json, write_json

if TYPE_CHECKING:
    from ..config import Config

# MLflow's name for the status of a run. A status that is not listed becomes FINISHED.
STATUS = {"preempted": "KILLED", "failed": "FAILED"}
# MLflow accepts at most this many parameters in one request.
PARAMETERS_AT_ONCE = 100


@dataclass(frozen=True)
class TrackerConfig:
    """Settings of MLflow."""

    uri: str | None = None
    """Server or database (none: MLFLOW_TRACKING_URI, or mlflow.db next to the run directory)."""
    experiment: str = __name__.partition(".")[0]
    """Experiment of the run; MLFLOW_EXPERIMENT_NAME overrides it."""

    def __post_init__(self) -> None:
        if self.uri is None:
            return
        without_protocol = self.uri.partition("://")[2]
        host = without_protocol.partition("/")[0]
        if "@" in host:
            raise UserError(
                "--tracker.uri must not contain a password, since it is saved with the run: set "
                "MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )


class Tracker:
    """Logs a run to MLflow. `logged` is the last step that MLflow has from earlier starts.

    MLflow cannot change logged values. So a step that a resume repeats keeps its first metrics, and
    parameters keep the settings of the first start; the artifact config.json has the newest.
    """

    def __init__(self, config: "Config", run_dir: Path, step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # At a lower level, MLflow would report each table of a new database.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self.metric = Metric
        uri = config.tracker.uri or os.environ.get("MLFLOW_TRACKING_URI")
        runs_folder = run_dir.resolve().parent
        self.client = MlflowClient(uri or _database(runs_folder))
        settings = to_json(config)
        # This file keeps the id of MLflow's run for later starts.
        note = run_dir / "mlflow.json"
        run = self._find(note)
        if run is None:
            # A server decides itself where to store artifacts.
            artifacts = None if uri else (runs_folder / "mlflow-artifacts").as_uri()
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or config.tracker.experiment
            run = self._create(experiment, artifacts, run_dir.name)
            write_json(note, {"id": run.info.run_id})
            self._log_parameters(run.info.run_id, settings)
        self.id = run.info.run_id
        self.client.update_run(self.id, "RUNNING")
        self.client.log_dict(self.id, settings, "config.json")
        # `run.data.metrics` has the last value of each metric, but not the step of that value. So
        # compute the step from the number of samples.
        samples = int(run.data.metrics.get("train/samples", 0))
        self.logged = samples // config.train.global_batch_size

    def scalars(self, step: int, values: dict[str, float], time: float) -> None:
        """Log the metrics of a step, taken at `time` (seconds since 1970)."""
        milliseconds = int(time * 1e3)
        metrics = []
        for name, value in values.items():
            # Replace each character that MLflow does not allow in a name.
            allowed = re.sub(r"[^\w./ :-]", "_", name)
            metrics.append(self.metric(allowed, value, milliseconds, step))
        self.client.log_batch(self.id, metrics=metrics)

    def sample(self, path: Path, step: int) -> None:
        """Upload a sample of the model's output at a step: a text or a picture."""
        self.client.log_artifact(self.id, str(path), "samples")

    def close(self, status: str) -> None:
        """End MLflow's run with the status of this run."""
        self.client.set_terminated(self.id, STATUS.get(status, "FINISHED"))

    def _find(self, note: Path) -> Any:
        """Return MLflow's run from an earlier start, or None."""
        from mlflow.exceptions import MlflowException

        if not note.exists():
            return None
        run_id = json.loads(note.read_text("utf-8"))["id"]
        # MLflow does not find the id if an earlier start used another database (--tracker.uri).
        with contextlib.suppress(MlflowException):
            return self.client.get_run(run_id)
        return None

    def _create(self, experiment: str, artifacts: str | None, name: str) -> Any:
        """Create a run in an experiment, which is created if it does not exist."""
        existing = self.client.get_experiment_by_name(experiment)
        if existing and existing.experiment_id:
            experiment_id = existing.experiment_id
        else:
            experiment_id = self.client.create_experiment(experiment, artifacts)
        return self.client.create_run(experiment_id, run_name=name)

    def _log_parameters(self, run_id: str, settings: dict[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [Param(name, str(value)) for name, value in flatten(settings)]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            chunk = parameters[start : start + PARAMETERS_AT_ONCE]
            self.client.log_batch(run_id, params=chunk)


def _database(folder: Path) -> str:
    """Return the URI of the database mlflow.db in a folder."""
    # A question mark in the folder's path would end the path in the URI. So open the folder, and
    # use the path of the descriptor, such as /proc/self/fd/7. The descriptor is never closed, since
    # its path is valid only while it is open.
    if "?" in str(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        return f"sqlite:////proc/self/fd/{descriptor}/mlflow.db"
    return f"sqlite:///{folder}/mlflow.db"
