"""Weights & Biases: offline, without an account, below RUN_DIR/wandb, or straight to a server."""

import html
import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..files import open_to_write
from .samples import read_sample


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

    def __init__(
        self, config: TrackerConfig, run_dir: Path, settings: dict[str, Any], step: int, status: str
    ) -> None:
        import wandb

        note = run_dir / "wandb.json"
        if not note.exists():
            with open_to_write(note) as file:
                file.write(json.dumps({"id": uuid.uuid4().hex[:12]}) + "\n")
        name = json.loads(note.read_text("utf-8"))["id"]
        # Without a key it would ask for one, and training would wait.
        if config.mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("--tracker.mode online needs `wandb login` first")
        self.older = set((run_dir / "wandb").glob(f"offline-run-*-{name}*"))
        self.run = wandb.init(
            project=config.project,
            entity=config.entity,
            id=name,
            name=run_dir.name,
            group=run_dir.parent.name,  # "runs", or the folder of a sweep in it
            dir=run_dir,
            mode=config.mode,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, init_timeout=20, finish_timeout=15),
        )
        self.run.config.update(settings, allow_val_change=True)
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
            sample = Html(f"<pre>{html.escape(read_sample(path).decode(errors='replace'))}</pre>")
        self.run.log({"sample": sample}, step=step, commit=False)

    def file(self, path: Path) -> None:
        """Put a copy of a file among the run's files."""
        copy = shutil.copy(path, self.run.dir)
        self.run.save(copy, base_path=self.run.dir, policy="now")

    def close(self, status: str) -> None:
        """End the log with the run's status."""
        folder = Path(self.run.dir).parent
        self.run.summary["status"] = status
        self.run.finish(exit_code=int(status == "failed"))
        for older in self.older - {folder}:
            shutil.rmtree(older)
