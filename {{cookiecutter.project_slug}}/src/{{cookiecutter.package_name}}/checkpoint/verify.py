"""Verify and list the checkpoints of a run: the `verify` command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..errors import UserError
from .manifest import verify
from .paths import Place, checkpoints_of, damaged, published, storage_path
from .publish import best_by_validation


@dataclass(frozen=True)
class Listing:
    """The lines to print about a run's checkpoints, and whether any, or their base, is damaged.

    Checkpoints that were set aside do not count as damaged.
    """

    lines: list[str]
    any_damaged: bool


def list_checkpoints(run_dir: Path) -> Listing:
    """Verify every byte of each checkpoint of a run; return lines for them and their base."""
    directory = checkpoints_of(storage_path(run_dir))
    good: dict[Place, dict[str, Any]] = {}
    problems_of: dict[Place, list[str]] = {}
    for path in published(directory):
        manifest, problems = verify(path)
        problems_of[path] = problems
        if not problems:
            good[path] = manifest
    # `damaged` lists the checkpoints that were set aside, as a resume does with damaged ones.
    if not problems_of and not damaged(directory):
        raise UserError(f"there are no checkpoints in {directory}: train first")
    best = best_by_validation({path: manifest["score"] for path, manifest in good.items()})

    lines: list[str] = []
    any_damaged = False
    for path, problems in problems_of.items():
        if path in good:
            line = _describe(path, good[path])
            if path == best:
                line += "  best"
            lines.append(line)
        elif path.exists():
            # A checkpoint that no longer exists gets no line: a run that is still training has
            # pruned it since it was found.
            any_damaged = True
            lines.append(f"{path.name}  DAMAGED  {'; '.join(problems)}")
    for name in damaged(directory):
        lines.append(f"{name}  set aside")
    # All checkpoints that have a base have the same one, so check it once. Take its path from the
    # newest of them, since the base may have moved after the older ones were saved.
    for manifest in reversed(good.values()):
        if "base" in manifest:
            problem = _problem_of_base(manifest, run_dir)
            if problem:
                any_damaged = True
                lines.append(problem)
            else:
                lines.append(f"frozen weights  good  {manifest['base']['path']}")
            break
    return Listing(lines, any_damaged)


def _problem_of_base(manifest: dict[str, Any], run_dir: Path) -> str:
    """Return a line if the base of a checkpoint is missing or has changed; "" if it is good."""
    # Imported here, since few checkpoints have a base.
    from .base import check_base

    try:
        check_base(manifest, given=None, run_dir=run_dir, group=Group())
    except UserError as error:
        return f"frozen weights  MISSING  {error}"
    return ""


def _describe(path: Place, manifest: dict[str, Any]) -> str:
    """Return the line for a good checkpoint: its name, its size, and its score if it has one."""
    sizes = [entry["size"] for entry in manifest["files"].values()]
    files = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
    line = f"{path.name}  good  {sum(sizes) / 1e6:,.1f} MB in {files}"
    # A rule is "min" or "max" followed by the metric, as in "min validation_loss".
    rule, score = manifest["score"]
    if score is not None:
        metric = rule.partition(" ")[2]
        line += f"  {metric.replace('_', ' ')} {score:.4f}"
    return line
