"""The losses that a team holds its code to, in a file that it keeps beside it.

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
    """What the file expects; None if there is no file; UserError if it cannot be read."""
    if path is None or not path.exists():
        return None
    try:
        content = read_json(path, tomllib.loads)
        losses = {int(step): float(loss) for step, loss in content.pop("losses", {}).items()}
        tolerance = float(content.pop("tolerance", 0.01))
        if content or not losses or min(losses) < 1:
            raise ValueError("its keys are tolerance and losses (by step, from 1)")
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no expectations: {error}") from None
    return {"losses": losses, "tolerance": tolerance}


def hold_to(stage: Stage, path: Path, expected: dict[str, Any] | None) -> None:
    """Check what was measured; without a file, propose one and fail."""
    losses = stage.figures["losses"]
    if expected is None:
        proposal, taken = stage.file.with_name("expected.toml"), len(losses)
        lines = [f"{step} = {losses[step - 1]:.6g}" for step in sorted({1, min(10, taken), taken})]
        lines = ["tolerance = 0.01  # relative", "", "[losses]", *lines, ""]
        replace_file(proposal, "\n".join(lines))
        advice = f"look at {proposal}, which holds what was measured now, and copy it to {path}"
        stage.check("expected", False, measured=f"no {path}", wanted="a file", advice=advice)
        return
    known = {step: loss for step, loss in expected["losses"].items() if step <= len(losses)}
    if known:
        apart = differences([losses[step - 1] for step in known], known.values())
        step, limit = [*known][int(apart.argmax())], expected["tolerance"]
        measured = f"{losses[step - 1]:.6g} at step {step}, where {known[step]:.6g} is expected"
        passed, wanted = bool(apart.max() <= limit), f"within {limit:.2%}"
        tip = f"find what changed the training, or state the new losses in {path}"
        stage.check("expected_losses", passed, measured=measured, wanted=wanted, advice=tip)
    if len(known) < len(expected["losses"]):
        measured = f"only {len(losses)} steps were taken"
        stage.check("expected_at_later_steps", None, measured=measured, wanted="all steps of it")
