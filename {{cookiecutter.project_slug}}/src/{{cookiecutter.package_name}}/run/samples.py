"""Samples of a model's output, kept by callbacks: `samples/step_00000100.txt` or `.png`."""

import contextlib
import os
from pathlib import Path

from ..files import replace_file

LIMIT = 2**20  # bytes of a sample that are read


def keep_sample(run_dir: Path, step: int, content: str | bytes) -> None:
    """Write a text, or the bytes of a PNG, for the tracker and the report."""
    (folder := run_dir / "samples").mkdir(parents=True, exist_ok=True)
    ending = "txt" if isinstance(content, str) else "png"
    replace_file(folder / f"step_{step:08}.{ending}", content)


def samples_of(run_dir: Path, step: int | None = None) -> list[Path]:
    """The paths of the samples of one step, or of all steps in order."""
    name = "step_*" if step is None else f"step_{step:08}"
    found = sorted((run_dir / "samples").glob(f"{name}.*"))
    return [path for path in found if path.suffix in (".txt", ".png")]


def read_sample(path: Path) -> bytes:
    """The content of a sample, if it is a plain file."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            return file.read(LIMIT)
    return b""
