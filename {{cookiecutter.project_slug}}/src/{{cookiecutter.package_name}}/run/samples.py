"""Samples of what a model has learned, left by callbacks: `samples/step_00000100.txt` or `.png`."""

import contextlib
import os
from pathlib import Path

from ..files import make_folder, open_to_write, replacing

MOST = 2**20  # bytes of one that is shown


def keep_sample(run_dir: Path, step: int, content: str | bytes) -> None:
    """Keep a text, or the bytes of a PNG, for the tracker and the report."""
    ending, mode = (".txt", "w") if isinstance(content, str) else (".png", "wb")
    make_folder(folder := run_dir / "samples")
    path = folder / f"step_{step:08}{ending}"
    with replacing(path) as temporary, open_to_write(temporary, mode) as file:
        file.write(content)


def samples_of(run_dir: Path, step: int | None = None) -> list[Path]:
    """The samples of one step, or of all in their order."""
    name = "step_*" if step is None else f"step_{step:08}"
    found = sorted((run_dir / "samples").glob(f"{name}.*"))
    return [path for path in found if path.suffix in (".txt", ".png")]


def read_sample(path: Path) -> bytes:
    """What is in a sample; nothing of what is none, as a link or a pipe."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            return file.read(MOST)
    return b""
