"""Weights & Biases: offline, without an account, below RUN_DIR/wandb, or straight to a server."""

import html
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..files import to_json, write_json


@dataclass(frozen=True)
class TrackerConfig:
    """Logging to Weights & Biases; the key comes from `wandb login` or WANDB_API_KEY."""

    mode: Literal["offline", "online"] = "offline"
    """offline: `wandb sync` can send it later."""
    project: str = __name__.partition(".")[0]
    entity: str | None = None
    """The team or user that owns the project."""


class Tracker:
    """The log of a run; it has the records up to step `logged`.

    An offline log cannot be continued (one `wandb sync` of a run replaces the one before), so each
    start writes the whole log anew; at the end only the newest is left. A server changes nothing
    that it has: steps that were rolled back keep their first figures.
    """

    def __init__(self, config: Any, run_dir: Path, step: int) -> None:
        import wandb

        # By their variables, since one that the user has set wins.
        mode = os.environ.get("WANDB_MODE", config.tracker.mode)
        ours = {
            "PROJECT": ("project", config.tracker.project),
            "ENTITY": ("entity", config.tracker.entity),
            "NAME": ("run_name", run_dir.name),
            "RUN_GROUP": ("run_group", run_dir.parent.name),  # "runs", or the folder of a sweep
            "DIR": ("root_dir", str(run_dir)),
            "CONSOLE": ("console", "off"),
            "SILENT": ("silent", True),
            "INIT_TIMEOUT": ("init_timeout", 20),
            "FINISH_TIMEOUT": ("finish_timeout", 15),
        }
        unset = [ours[name] for name in ours if f"WANDB_{name}" not in os.environ]
        options: dict[str, Any] = {"mode": mode, **dict(unset)}
        note = run_dir / "wandb.json"
        if not note.exists():
            write_json(note, {"id": uuid.uuid4().hex[:12]})
        name = os.environ.get("WANDB_RUN_ID") or json.loads(note.read_text("utf-8"))["id"]
        # Without a key it would ask for one, and training would wait.
        if mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("--tracker.mode online needs `wandb login` first")
        self.run = wandb.init(id=name, resume="allow", settings=wandb.Settings(**options))
        folder = Path(self.run.dir).parent
        self.older = set(folder.parent.glob(f"offline-run-*-{name}*")) - {folder}
        self.run.config.update(to_json(config), allow_val_change=True)
        self.logged = self.run.starting_step - 1

    def scalars(self, step: int, values: dict[str, float], time: float) -> None:
        """Log the line of a step, taken at `time` (seconds since 1970)."""
        self.run.log({**values, "_timestamp": time}, step=step, commit=True)

    def sample(self, path: Path, step: int) -> None:
        """Log the sample of a step: a text, or a picture."""
        from wandb import Html, Image

        if path.suffix == ".png":
            sample: Any = Image(str(path))
        else:
            sample = Html(f"<pre>{html.escape(path.read_text('utf-8', 'replace'))}</pre>")
        self.run.log({"sample": sample}, step=step, commit=False)

    def close(self, status: str) -> None:
        """End the log with the run's status."""
        self.run.summary["status"] = status
        self.run.finish(exit_code=int(status == "failed"))
        for older in self.older:
            shutil.rmtree(older)
