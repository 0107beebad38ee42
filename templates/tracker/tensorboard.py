"""TensorBoard: event files in RUN_DIR/tensorboard, for `tensorboard --logdir runs`."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import flatten, make_folder, open_to_write
from .samples import read_sample


@dataclass(frozen=True)
class TrackerConfig:
    """Logging to TensorBoard: nothing to set."""


class Tracker:
    """The log of a run, cut off after `step`; it has the records up to step `logged`.

    It holds float32. TensorBoard cannot hold a file, so its path is logged.
    """

    def __init__(
        self, config: TrackerConfig, run_dir: Path, settings: dict[str, Any], step: int, status: str
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run_dir / "tensorboard"
        make_folder(folder)
        self.note, self.status = folder / "logged.json", status
        known: dict[str, Any] = {}
        if self.note.exists():
            known = json.loads(self.note.read_text("utf-8") or "{}")
        self.logged = min(step, known.get("step", 0))
        self.settings, self.tags = settings, set[str]()
        # Readers then ignore this step and later ones in the files of earlier starts.
        self.writer: Any = SummaryWriter(folder, purge_step=self.logged + 1)
        if known.get("settings") != settings:
            text = json.dumps(settings, indent=2).replace("\n", "\n    ")
            self.writer.add_text("config", f"    {text}", 0)  # indented, it is code to Markdown
        self._flush(self.logged)

    def scalars(self, step: int, values: dict[str, float], time: float) -> None:
        """Log the line of a step, taken at `time` (seconds since 1970)."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=time)
        self.tags |= values.keys()
        self._flush(step)

    def sample(self, path: Path, step: int) -> None:
        """Log the sample of a step: a text, or a picture."""
        content = read_sample(path)
        if path.suffix == ".txt":
            text = content.decode(errors="replace").replace("\n", "\n    ")
            self.writer.add_text("sample", f"    {text}", step)
            return
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore

        size = {"width": content[16:20], "height": content[20:24]}  # where a PNG has them
        size = {name: int.from_bytes(number) for name, number in size.items()}
        image = Summary.Image(encoded_image_string=content, **size)
        summary = Summary(value=[Summary.Value(tag="sample", image=image)])
        self.writer.file_writer.add_summary(summary, step)

    def file(self, path: Path) -> None:
        """Log the path of a file."""
        self.writer.add_text(path.name, str(path.resolve()), self.logged)

    def close(self, status: str) -> None:
        """End the log with the run's status, and its settings for the HParams tab."""
        from torch.utils.tensorboard.summary import hparams

        if status != self.status:
            self.writer.add_text("status", status, self.logged)
            named = flatten(self.settings)
            plain = {name: v if isinstance(v, int | float) else str(v) for name, v in named}
            # The tab looks the newest of these figures up by their tags.
            figures = filter(re.compile("train/loss$|validation/").match, sorted(self.tags))
            for summary in hparams(plain, dict.fromkeys(figures, 0.0)):
                self.writer.file_writer.add_summary(summary, self.logged)
        self.writer.close()

    def _flush(self, step: int) -> None:
        """Write the records to disk, as a run may be killed, then the step of the last one."""
        self.writer.flush()
        self.logged = step
        with open_to_write(self.note) as file:
            file.write(json.dumps({"step": step, "settings": self.settings}))
