"""Samples of a model's output, kept by callbacks: `samples/step_00000100.txt` or `.png`."""

from pathlib import Path

from ..files import replace_file


def keep_sample(run_dir: Path, step: int, content: str | bytes) -> None:
    """Write a text, or the bytes of a PNG, for the tracker and the report."""
    (folder := run_dir / "samples").mkdir(parents=True, exist_ok=True)
    ending = "txt" if isinstance(content, str) else "png"
    replace_file(folder / f"step_{step:08}.{ending}", content)


def samples_of(run_dir: Path, step: int | None = None) -> list[Path]:
    """The paths of the samples of one step, or of all steps in order."""
    name = "step_*" if step is None else f"step_{step:08}"
    paths = sorted((run_dir / "samples").glob(f"{name}.*"))
    # No link, which may lead to any file of the user.
    files = [path for path in paths if path.is_file() and not path.is_symlink()]
    return [path for path in files if path.suffix in (".txt", ".png")]
