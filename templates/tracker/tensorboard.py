"""Log to TensorBoard: event files in RUN_DIR/tensorboard, for `tensorboard --logdir runs`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import read_json, to_json, write_json

if TYPE_CHECKING:
    from ..config import Config


@dataclass(frozen=True)
class TrackerConfig:
    """Settings of TensorBoard: there are none."""


class Tracker:
    """Logs a run to TensorBoard. `logged` is the last step that the event files have.

    A start that trains from `step` hides the later records of earlier starts.
    """

    def __init__(self, config: "Config", run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run_dir / "tensorboard"
        # This file has the last step that an earlier start has logged, and its settings.
        self.note = folder / "logged.json"
        earlier = read_json(self.note) if self.note.exists() else {}
        self.settings = to_json(config)
        self.logged = min(step, earlier.get("step", 0))
        # In the files of earlier starts, TensorBoard then ignores `purge_step` and later steps.
        self.writer: Any = SummaryWriter(folder, purge_step=self.logged + 1)
        if earlier.get("settings") != self.settings:
            self._text("config", json.dumps(self.settings, indent=2), 0)
        self._flush(self.logged)

    def scalars(self, step: int, values: dict[str, float], time: float) -> None:
        """Log the metrics of a step, taken at `time` (seconds since 1970)."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=time)
        self._flush(step)

    def sample(self, path: Path, step: int) -> None:
        """Log a sample of the model's output at a step: a text or a picture."""
        if path.suffix == ".txt":
            self._text("sample", path.read_text("utf-8", "replace"), step)
        else:
            # TensorBoard depends on Pillow, so it is installed.
            from PIL import Image

            picture = np.asarray(Image.open(path).convert("RGB"))
            self.writer.add_image("sample", picture, step, dataformats="HWC")

    def close(self, status: str) -> None:
        """Log the run's status and close the files."""
        self.writer.add_text("status", status, self.logged)
        self.writer.close()

    def _text(self, tag: str, text: str, step: int) -> None:
        # TensorBoard renders Markdown, so indent the text to show it literally.
        indented = text.replace("\n", "\n    ")
        self.writer.add_text(tag, f"    {indented}", step)

    def _flush(self, step: int) -> None:
        """Write the records to disk, since the run may be killed; then note the last step."""
        self.writer.flush()
        self.logged = step
        write_json(self.note, {"step": step, "settings": self.settings})
