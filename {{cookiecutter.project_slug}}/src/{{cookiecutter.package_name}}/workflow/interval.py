"""How often to save: what a save costs against what a failure loses."""

import math
from typing import Any

from .stage import Stage


def best_interval(cost: float, failures: float, least: float = 0.0) -> float:
    """Seconds between saves at which the least time is lost (Young, 1974; Daly, 2006).

    `cost` is what a save holds training up for, `failures` the mean time between two, both in
    seconds. Never below `least`, the time a save takes until it is published.
    """
    return max(math.sqrt(2 * cost * failures), least)


def lost_share(interval: float, cost: float, restart: float, failures: float) -> float:
    """Expected share of time that is lost: saving, steps done again, restarting.

    To first order: for an interval and a restart that are short beside the time between failures.
    """
    return cost / interval + (interval / 2 + restart) / failures


def judge_interval(stage: Stage, figures: dict[str, Any], step_seconds: float) -> None:
    """Work out the interval from measured `figures`, add it to them, and say what follows."""
    config = stage.config
    cost, upload = (figures[key]["median"] for key in ("blocked_seconds", "save_seconds"))
    restart = figures["restart_seconds"]["total"]
    hours = config.workflow.hours_between_failures

    def lost(interval: float) -> str:
        return f"{lost_share(interval, cost, restart, 3600 * hours):.2%}"

    best = best_interval(cost, 3600 * hours, upload)
    steps = max(1, math.ceil(best / step_seconds))
    figures |= {
        "interval_seconds": best,
        "interval_steps": steps,
        "hours_between_failures": hours,
        "step_seconds": step_seconds,
        "lost_share": lost_share(best, cost, restart, 3600 * hours),
    }
    print(
        f"     with a failure every {hours:g} h, save every {best:.3g} s: {steps} steps of "
        f"{1e3 * step_seconds:.3g} ms; {lost(best)} of the time is lost then",
        flush=True,
    )
    every, rounded = config.checkpoint.every or config.train.steps, _two_digits(steps)
    ends = f" (this run of {config.train.steps} steps then saves only at its end)"
    flag = f"--checkpoint.every {rounded}{ends if rounded >= config.train.steps else ''}"
    now = every * step_seconds
    if now < upload:
        stage.advise(f"{flag}: a save takes longer than the {every} steps between two, and waits")
    elif not 0.5 <= now / best <= 2:
        stage.advise(f"{flag}: {lost(best)} of the time is lost then, {lost(now)} as it is")


def _two_digits(steps: int) -> int:
    """Rounded up to two significant digits: no one wants to save every 487 steps."""
    size = 10 ** max(0, len(str(steps)) - 2)
    return math.ceil(steps / size) * size
