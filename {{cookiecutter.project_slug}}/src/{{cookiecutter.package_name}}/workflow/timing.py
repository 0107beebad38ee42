"""How the stages time the project's own steps, and tell a difference from noise."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..device import synchronize
from ..loss import means
from ..sampling import seed_step
from ..train import State, train_step


class Steps(NamedTuple):
    """Consecutive steps: arrays with one entry per step."""

    losses: np.ndarray
    seconds: np.ndarray
    waits: np.ndarray
    """Seconds of waiting for data, part of `seconds`."""


def record_steps(state: State, steps: int) -> Steps:
    """Take steps of the project's loop, waiting for the device after each."""
    losses, seconds, waits = [], [], []
    synchronize(state.world.device)
    for _ in range(steps):
        started, waited = time.perf_counter(), state.loader.seconds
        train_step(state, state.loader.next())
        synchronize(state.world.device)
        seconds.append(time.perf_counter() - started)
        waits.append(state.loader.seconds - waited)
        losses.append(means(state.sums, state.metrics)["loss"])
        state.sums = 0.0
    return Steps(np.array(losses), np.array(seconds), np.array(waits))


def has_drawn(state: State) -> bool:
    """Whether the last step drew random numbers from torch, as dropout does."""
    device, seed = state.world.device, state.config.train.seed
    generators = [torch] if device.type == "cpu" else [torch, getattr(torch, device.type)]
    after = [generator.get_rng_state() for generator in generators]
    seed_step(seed, state.step - 1, state.world.rank, device)  # as the step began
    before = [generator.get_rng_state() for generator in generators]
    return not all(map(torch.equal, after, before))


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median, 10th and 90th percentile, and number of values, as figures hold them."""
    p10, median, p90 = (float(x) for x in np.percentile(values, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90, "n": len(values)}


def describe(seconds: dict[str, Any]) -> str:
    """A spread of seconds in words."""
    median, p10, p90 = (1e3 * seconds[key] for key in ("median", "p10", "p90"))
    return f"{median:.2f} ms (p10 {p10:.2f}, p90 {p90:.2f})"


def difference(a: float, b: float) -> float:
    """Relative difference; infinite unless both are finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def differences(first: Iterable[float], second: Iterable[float]) -> np.ndarray:
    """Relative differences of pairs; 0 where both are NaN."""
    both = zip(first, second, strict=True)
    return np.array([0.0 if math.isnan(a) and math.isnan(b) else difference(a, b) for a, b in both])
