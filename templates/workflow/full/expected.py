"""Check measured losses against the expected ones in a TOML file that you keep with your code.

The file has a tolerance, and the expected losses by step:

tolerance = 0.01  # relative

[losses]
10 = 3.2
45 = 2.9
"""

import tomllib
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json, replace_file
from .stage import Stage
from .timing import differences


def read_expected(path: Path | None) -> dict[str, Any] | None:
    """Return "losses" (by step) and "tolerance" from the file, or None if there is no file.

    Raises UserError if the file is invalid.
    """
    if path is None or not path.exists():
        return None
    try:
        content = read_json(path, tomllib.loads)
        losses: dict[int, float] = {}
        for step, loss in content.pop("losses", {}).items():
            losses[int(step)] = float(loss)
        tolerance = float(content.pop("tolerance", 0.01))
        # The known keys were popped above, so any remaining key in `content` is unknown.
        if content or not losses or min(losses) < 1:
            raise ValueError("its keys must be tolerance and losses (by step, from 1)")
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a file of expected losses: {error}") from None
    return {"losses": losses, "tolerance": tolerance}


def hold_to(stage: Stage, path: Path, expected: dict[str, Any] | None) -> None:
    """Check measured losses against the content of the file at `path`, as from `read_expected`.

    If the file does not exist (None), write a proposal and fail the check.
    """
    losses = stage.figures["losses"]
    if expected is None:
        proposal = stage.file.with_name("expected.toml")
        propose(proposal, losses)
        advice = f"check the losses measured now in {proposal}, and copy it to {path}"
        measured = f"{path} does not exist"
        stage.check("expected", False, measured=measured, wanted="a file", advice=advice)
        return
    # The expected losses by step, without those of later steps than were taken.
    reached: dict[int, float] = {}
    for step, loss in expected["losses"].items():
        if step <= len(losses):
            reached[step] = loss
    if reached:
        # Step 1 has index 0 in `losses`.
        losses_there = [losses[step - 1] for step in reached]
        relative = differences(losses_there, reached.values())
        worst_step = list(reached)[int(relative.argmax())]
        loss = losses[worst_step - 1]
        limit = expected["tolerance"]
        measured = f"{loss:.6g} at step {worst_step}, where {reached[worst_step]:.6g} is expected"
        stage.check(
            "expected_losses",
            bool(relative.max() <= limit),
            measured=measured,
            wanted=f"within {limit:.2%}",
            advice=f"find out what changed the training, or write the new losses into {path}",
        )
    if len(reached) < len(expected["losses"]):
        measured = f"only {len(losses)} steps were taken"
        stage.check("expected_at_later_steps", None, measured=measured, wanted="all its steps")


def propose(path: Path, losses: list[float]) -> None:
    """Write a file with the measured losses of the first, the tenth and the last step."""
    last = len(losses)
    lines = ["tolerance = 0.01  # relative", "", "[losses]"]
    for step in sorted({1, min(10, last), last}):
        lines.append(f"{step} = {losses[step - 1]:.6g}")
    replace_file(path, "\n".join([*lines, ""]))
