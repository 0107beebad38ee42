"""Summarize a run: the lines that `train` prints at its end."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.paths import checkpoints_of, published
from ..errors import RankError, UserError
from .journal import validation_of

if TYPE_CHECKING:
    from ..train import Result


def summary(run_dir: Path, result: "Result") -> list[str]:
    """Return lines with the validation metrics, the checkpoints and the directory of a run."""
    try:
        directory = checkpoints_of(run_dir)
        paths = published(directory)
        checkpoints = f"checkpoints in {directory}: {len(paths)}"
        if paths:
            checkpoints += f", the newest is {paths[-1].name}"
    except (OSError, RankError, UserError) as error:
        checkpoints = f"checkpoints: cannot be listed now ({error})"
    already_finished = result.status == "already finished"
    if not already_finished:
        checkpoints += f" (training waited {result.blocked_seconds:.2f} s for saves)"
    lines: list[str] = []
    for name, value in validation_of(result.validation).items():
        lines.append(f"{name.replace('_', ' ')}: {value:.4f}")
    lines += [checkpoints, f"everything is in {run_dir}"]
    if already_finished:
        lines.append("to train further: raise --train.steps (or epochs); for a new run: --name NEW")
    elif result.status == "preempted":
        lines.append("to resume: run the same command again")
    return lines
