"""Log to Weights & Biases: offline to RUN_DIR/wandb, without an account, or online to a server."""

import html
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..files import to_json, write_json

if TYPE_CHECKING:
    from ..config import Config


@dataclass(frozen=True)
class TrackerConfig:
    """Logging to Weights & Biases; the key comes from `wandb login` or WANDB_API_KEY."""

    mode: Literal["offline", "online"] = "offline"
    """online: upload while it trains; offline: later, by `wandb sync`. WANDB_MODE overrides it."""
    project: str = __name__.partition(".")[0]
    """Project of the run; WANDB_PROJECT overrides it."""
    entity: str | None = None
    """Team or user that owns the project; WANDB_ENTITY overrides it."""


class Tracker:
    """Logs a run to wandb. `logged` is the last step that wandb has from earlier starts.

    In offline mode, each start of the run begins a new log. `wandb sync` of this log replaces what
    was uploaded from an older log of the run. So each start logs all records again, and `close`
    removes the older logs. In online mode, the server cannot change logged values: a step that a
    resume repeats keeps its first metrics.
    """

    def __init__(self, config: "Config", run_dir: Path, step: int) -> None:
        import wandb

        options = _options(config.tracker, run_dir)
        run_id = _run_id(run_dir / "wandb.json")
        # Without a key, wandb would prompt for one and block.
        if options["mode"] == "online" and not wandb.login(prompt=False):
            raise RuntimeError("--tracker.mode online: run `wandb login` first")
        settings = wandb.Settings(**options)
        self.run = wandb.init(id=run_id, resume="allow", settings=settings)
        # `run.dir` is the folder "files" in the folder of this log.
        folder = Path(self.run.dir).parent
        # The offline logs of earlier starts.
        self.older = set(folder.parent.glob(f"offline-run-*-{run_id}*"))
        self.older.discard(folder)
        self.run.config.update(to_json(config), allow_val_change=True)
        # `starting_step` is the first step that wandb does not have yet. It is 0 in offline mode,
        # where each start begins a new log.
        self.logged = self.run.starting_step - 1

    def scalars(self, step: int, values: dict[str, float], time: float) -> None:
        """Log the metrics of a step, taken at `time` (seconds since 1970)."""
        self.run.log({**values, "_timestamp": time}, step=step, commit=True)

    def sample(self, path: Path, step: int) -> None:
        """Log a sample of the model's output at a step: a text or a picture."""
        from wandb import Html, Image

        if path.suffix == ".png":
            sample: Any = Image(str(path))
        else:
            text = html.escape(path.read_text("utf-8", "replace"))
            sample = Html(f"<pre>{text}</pre>")
        # `scalars` logs the metrics of the same step next, and commits them with the sample.
        self.run.log({"sample": sample}, step=step, commit=False)

    def close(self, status: str) -> None:
        """Finish wandb's run with the status of this run."""
        self.run.summary["status"] = status
        exit_code = 1 if status == "failed" else 0
        self.run.finish(exit_code=exit_code)
        for folder in self.older:
            shutil.rmtree(folder)


def _options(config: TrackerConfig, run_dir: Path) -> dict[str, Any]:
    """Return the settings for wandb, without those that the user's environment sets."""
    options: dict[str, Any] = {"mode": os.environ.get("WANDB_MODE", config.mode)}
    defaults: dict[str, dict[str, Any]] = {
        "WANDB_PROJECT": {"project": config.project},
        "WANDB_ENTITY": {"entity": config.entity},
        "WANDB_NAME": {"run_name": run_dir.name},
        # The parent folder of the run: "runs", or a sweep's folder.
        "WANDB_RUN_GROUP": {"run_group": run_dir.parent.name},
        "WANDB_DIR": {"root_dir": str(run_dir)},
        "WANDB_CONSOLE": {"console": "off"},
        "WANDB_SILENT": {"silent": True},
        # In seconds. tracker.py waits 20 s for wandb to start, and 20 s for it to finish.
        "WANDB_INIT_TIMEOUT": {"init_timeout": 20},
        "WANDB_FINISH_TIMEOUT": {"finish_timeout": 15},
    }
    # wandb prefers a setting to the environment variable for it. Here the variable must win, so
    # leave out the setting if the variable is set.
    for variable, setting in defaults.items():
        if variable not in os.environ:
            options |= setting
    return options


def _run_id(note: Path) -> str:
    """Return wandb's id of the run, which is the same at each start."""
    if not note.exists():
        write_json(note, {"id": uuid.uuid4().hex[:12]})
    chosen_by_user = os.environ.get("WANDB_RUN_ID")
    return chosen_by_user or json.loads(note.read_text("utf-8"))["id"]
