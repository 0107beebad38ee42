"""How the stages time the project's own steps, and compare figures."""

import resource
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..device import synchronize
from ..loss import means
from ..train import State, train_step


class Steps(NamedTuple):
    """Consecutive steps: arrays with one entry per step."""

    losses: np.ndarray
    seconds: np.ndarray
    waits: np.ndarray  # seconds of waiting for data, part of `seconds`


def record_steps(state: State, steps: int) -> Steps:
    """Take steps of the project's loop, waiting for the device after each."""
    losses, seconds, waits, idle = np.zeros((4, steps))
    synchronize(state.world.device)
    for i in range(steps):
        started, waited = time.perf_counter(), state.loader.seconds
        train_step(state, state.loader.next())
        issued = time.perf_counter()
        synchronize(state.world.device)
        seconds[i], idle[i] = (time.perf_counter() - since for since in (started, issued))
        waits[i] = state.loader.seconds - waited
        losses[i] = means(state.sums.tolist(), state.metrics or ())["loss"]
        state.sums = 0.0
    # In training the host would not wait for the device here, but read the next batch meanwhile.
    hidden = np.minimum(waits, idle)
    return Steps(losses, seconds - hidden, waits - hidden)


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median, 10th and 90th percentile, and number of values, as figures hold them."""
    p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
    return {"median": median, "p10": p10, "p90": p90, "n": len(values)}


def describe(seconds: dict[str, Any]) -> str:
    """A spread of seconds in words."""
    median, p10, p90 = (1e3 * seconds[key] for key in ("median", "p10", "p90"))
    return f"{median:.2f} ms (p10 {p10:.2f}, p90 {p90:.2f})"


def differences(first: Iterable[float], second: Iterable[float]) -> np.ndarray:
    """Relative differences of pairs; 0 where both are NaN, infinite where one is not finite."""
    a, b = np.array([*first], dtype=float), np.array([*second], dtype=float)
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b) / np.maximum(np.maximum(abs(a), abs(b)), 1e-12)
    apart[np.isnan(a) & np.isnan(b)] = 0
    return np.nan_to_num(apart, nan=np.inf)


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: allocated on a CUDA device, else the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
