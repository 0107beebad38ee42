"""What a team holds its code to, in a file that it keeps beside it: losses, and throughput.

tolerance = 0.01  # relative, of the losses

[losses]
10 = 3.2
45 = 2.9

[samples_per_second]  # at least, by machine
"AMD EPYC 7B13, 2 cores" = 700
"""

import json
import tomllib
from pathlib import Path
from typing import Any

from ..device import pick_device
from ..errors import UserError
from ..files import read_json, replace_file
from ..run.hardware import where_measured
from .stage import Stage
from .timing import differences

TOLERANCE, ROOM = 0.01, 0.8  # proposed: of losses, and the share of the throughput that is enough


def read_expected(path: Path | None) -> dict[str, Any] | None:
    """What the file expects; None if there is no file; UserError if it cannot be read."""
    if path is None or not path.exists():
        return None
    try:
        content = read_json(path, tomllib.loads)
        losses = {int(step): float(loss) for step, loss in content.pop("losses", {}).items()}
        rates = {on: float(rate) for on, rate in content.pop("samples_per_second", {}).items()}
        tolerance = float(content.pop("tolerance", TOLERANCE))
        if content or not (losses or rates) or min(losses, default=1) < 1:
            raise ValueError("its keys are tolerance, losses (by step, from 1), samples_per_second")
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no expectations: {error}") from None
    return {"losses": losses, "samples_per_second": rates, "tolerance": tolerance}


def hold_to(stage: Stage, path: Path, expected: dict[str, Any] | None) -> None:
    """Check what was measured; without a file, propose one and fail."""
    losses, rate = stage.figures["losses"], stage.figures["samples_per_second"]
    here = name_of(where_measured(pick_device(stage.config.device))["machine"])
    if expected is None:
        proposal = propose(stage.file.with_name("expected.toml"), losses, rate, here)
        advice = f"look at {proposal}, which holds what was measured now, and copy it to {path}"
        measured = f"there is no {path}"
        stage.check("expected", False, measured=measured, wanted="a file", advice=advice)
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
    if not expected["samples_per_second"]:
        return
    least = expected["samples_per_second"].get(here)
    measured = f"{rate:,.1f} samples/s" if least else f"{path} has no figure for {here!r}"
    wanted = f"at least {least:,.1f} on this machine" if least else "a figure for this machine"
    advice = "measure again when nothing else runs, then see `compare` with an earlier result"
    passed = rate >= least if least else None
    stage.check("expected_throughput", passed, measured=measured, wanted=wanted, advice=advice)


def propose(path: Path, losses: list[float], rate: float, here: str) -> Path:
    """Write what was measured in the form of such a file."""
    steps = [step for step in (1, 10, len(losses)) if step <= len(losses)]
    lines = [f"tolerance = {TOLERANCE}  # relative, of the losses", "", "[losses]"]
    lines += dict.fromkeys(f"{step} = {losses[step - 1]:.6g}" for step in steps)
    lines += ["", "[samples_per_second]  # at least, by machine"]
    lines.append(f"{json.dumps(here, ensure_ascii=False)} = {ROOM * rate:.4g}")
    replace_file(path, "\n".join(lines) + "\n")
    return path


def name_of(machine: dict[str, Any]) -> str:
    """A kind of machine in words, as the file names it."""
    gpu = f"{machine['gpus']} x {machine['device']}, " if machine["device"] != "cpu" else ""
    return f"{gpu}{machine['cpu']}, {machine['cores']} cores"
