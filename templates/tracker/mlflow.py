"""MLflow: by default a SQLite file beside the runs, for `mlflow ui`; or a server."""

import contextlib
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import flatten, to_json, write_json

STATUS = {"preempted": "KILLED", "failed": "FAILED"}  # else FINISHED


@dataclass(frozen=True)
class TrackerConfig:
    """Logging to MLflow."""

    uri: str | None = None
    """Server or database (default: MLFLOW_TRACKING_URI, else mlflow.db beside the run's folder)."""
    experiment: str = __name__.partition(".")[0]

    def __post_init__(self) -> None:
        if self.uri and "@" in self.uri.partition("://")[2].partition("/")[0]:
            raise UserError(
                "--tracker.uri is saved with the run, so it must not hold a password: set "
                "MLFLOW_TRACKING_URI instead, or MLFLOW_TRACKING_USERNAME and _PASSWORD"
            )


class Tracker:
    """The log of a run; it has the records up to step `logged`.

    MLflow changes nothing that it has: steps that were rolled back keep their first figures, and
    parameters their first values (the artifact config.json has the newest).
    """

    def __init__(self, config: Any, run_dir: Path, step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # else it reports each table it makes
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.metric, settings = Metric, to_json(config)
        home = run_dir.resolve().parent
        uri = config.tracker.uri or os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None if uri else (home / "mlflow-artifacts").as_uri()
        # A question mark would end the address of the file.
        folder = f"/proc/self/fd/{os.open(home, os.O_RDONLY)}" if "?" in str(home) else home
        self.client = MlflowClient(uri or f"sqlite:///{folder}/mlflow.db")
        note = run_dir / "mlflow.json"
        run = None
        if note.exists():
            with contextlib.suppress(MlflowException):  # it is in another store
                run = self.client.get_run(json.loads(note.read_text("utf-8"))["id"])
        if run is None:
            experiment: str = os.environ.get("MLFLOW_EXPERIMENT_NAME") or config.tracker.experiment
            known = self.client.get_experiment_by_name(experiment)
            number = known and known.experiment_id
            number = number or self.client.create_experiment(experiment, artifacts)
            run = self.client.create_run(number, run_name=run_dir.name)
            write_json(note, {"id": run.info.run_id})
            params = [Param(name, str(value)) for name, value in flatten(settings)]
            for start in range(0, len(params), 100):
                self.client.log_batch(run.info.run_id, params=params[start : start + 100])
        self.id = run.info.run_id
        self.client.update_run(self.id, "RUNNING")
        self.client.log_dict(self.id, settings, "config.json")
        samples = int(run.data.metrics.get("train/samples", 0))
        self.logged = samples // config.train.global_batch_size

    def scalars(self, step: int, values: dict[str, float], time: float) -> None:
        """Log the line of a step, taken at `time` (seconds since 1970)."""
        named = {re.sub(r"[^\w./ :-]", "_", name): value for name, value in values.items()}
        metrics = [self.metric(name, value, int(time * 1e3), step) for name, value in named.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def sample(self, path: Path, step: int) -> None:
        """Keep a copy of the sample of a step, a text or a picture."""
        self.client.log_artifact(self.id, str(path), "samples")

    def close(self, status: str) -> None:
        """End the log with the run's status."""
        self.client.set_terminated(self.id, STATUS.get(status, "FINISHED"))
