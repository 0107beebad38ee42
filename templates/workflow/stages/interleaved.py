"""Time alternative ways to take steps, interleaved; intervals tell differences from noise."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..device import synchronize
from ..train import State, train_step

# Seconds of a window of steps, and of all windows together.
WINDOW = 0.2
SECONDS = 6.0
# Minimum and maximum number of windows for each way; six are needed for a 95 % interval.
WINDOWS = (6, 15)
# Maximum number of steps in a window.
MOST_STEPS = 100
# If the ends of an interval differ by more than this factor, the result is inconclusive.
NOISE = 1.2
TOO_NOISY = "too noisy to tell"
# The number of batches that `without_loader` reads in advance.
BATCHES = 4

# Takes this many steps and returns the seconds per step.
Way = Callable[[int], float]


class Interval(NamedTuple):
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Format the interval, as in 1.25 (1.21 to 1.3)."""
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def time_interleaved(ways: dict[str, Way], multiple: int = 1) -> dict[str, list[float]]:
    """Time the ways in alternating windows, so that other load affects all of them alike.

    Returns the seconds per step of each window. A window has a multiple of `multiple` steps.
    """
    slowest = 0.0
    for way in ways.values():
        # The first call may warm something up.
        first = way(multiple)
        second = way(multiple)
        slowest = max(slowest, min(first, second))
    wanted_steps = min(MOST_STEPS, WINDOW / slowest)
    steps = multiple * math.ceil(wanted_steps / multiple)
    round_seconds = len(ways) * steps * slowest
    fewest, most = WINDOWS
    windows = min(max(round(SECONDS / round_seconds), fewest), most)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for window in range(windows):
        # Alternate the order, so that a way does not always follow the same other one.
        for name in sorted(ways, reverse=window % 2 == 0):
            seconds[name].append(ways[name](steps))
    return seconds


def median_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Return the median with its distribution-free 95 % confidence interval.

    With fewer than six values, the interval is their range, which covers less than 95 %.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    count = len(ordered)
    # The number of values below the true median follows a binomial distribution, like heads in
    # `count` throws of a coin. Leave out as many values at each end as possible, such that the
    # true median is outside the interval with a probability of at most 5 %.
    left_out = 0
    outcomes = 0
    for heads in range(count // 2):
        outcomes += math.comb(count, heads)
        if 2 * outcomes > 0.05 * 2**count:
            break
        left_out = heads
    return Interval(
        value=float(np.median(ordered)),
        low=float(ordered[left_out]),
        high=float(ordered[count - 1 - left_out]),
    )


def speedup_of(before: Sequence[float], after: Sequence[float]) -> tuple[Interval, str]:
    """Return the speedup from pairs of windows, and a verdict."""
    speedup = median_interval(np.array(before) / np.array(after))
    if speedup.low > 1:
        return speedup, "faster"
    if speedup.high < 1:
        return speedup, "slower"
    if speedup.high < NOISE * speedup.low:
        return speedup, "within noise"
    return speedup, TOO_NOISY


def without_loader(state: State) -> Way:
    """Return a way to take steps on batches read in advance, so that loading is not timed."""
    batches = [state.loader.of(step, state.plan) for step in range(BATCHES)]

    def read() -> list[Any]:
        return batches[state.step % BATCHES]

    def take_steps(steps: int) -> float:
        return _seconds_per_step(state, read, steps)

    return take_steps


def with_loader(state: State) -> Way:
    """Return a way to take steps as in training; loader workers end with each window.

    Otherwise they would read ahead during windows of another way. All workers deliver their first
    batch at the same time, so only a multiple of their number shows the speed of training.
    """

    def take_steps(steps: int) -> float:
        return _seconds_per_step(state, state.loader.next, steps)

    return take_steps


def _seconds_per_step(state: State, read: Callable[[], list[Any]], steps: int) -> float:
    """Time steps after a first one that is not timed; `read` returns the batch of each step."""
    with contextlib.closing(state.loader):
        # The first step starts the workers.
        train_step(state, read())
        synchronize(state.world.device)
        started = time.perf_counter()
        for _ in range(steps):
            train_step(state, read())
        synchronize(state.world.device)
        return (time.perf_counter() - started) / steps
