"""Time alternative ways to take steps, interleaved; confidence intervals show what is noise."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..device import synchronize
from ..train import State, train_step

# The intended duration of a window of steps, and of all windows together (seconds).
WINDOW = 0.2
SECONDS = 6.0
# Minimum and maximum number of windows for each way; a 95 % interval needs six.
WINDOWS = (6, 15)
# Maximum number of steps in a window, before it is rounded up (`multiple` below).
MOST_STEPS = 100
# A speedup is inconclusive if its interval contains 1 and is wide: the upper end is at least this
# factor times the lower end.
NOISE = 1.2
TOO_NOISY = "too noisy to tell"
# The number of global batches that `without_loader` reads in advance and then repeats.
BATCHES = 4

# A function that takes the given number of steps and returns the seconds per step.
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

    Returns, for each way, the seconds per step of each window. The number of steps in a window is
    divisible by `multiple`.
    """
    # The seconds per step of the slowest way.
    slowest = 0.0
    for way in ways.values():
        # The first call may be slower, since it warms up. So take the faster one of two calls.
        first = way(multiple)
        second = way(multiple)
        slowest = max(slowest, min(first, second))
    wanted_steps = min(MOST_STEPS, WINDOW / slowest)
    # Round up to a multiple of `multiple`.
    steps = multiple * math.ceil(wanted_steps / multiple)
    # A round has one window of each way.
    round_seconds = len(ways) * steps * slowest
    rounds = round(SECONDS / round_seconds)
    fewest, most = WINDOWS
    rounds = min(max(rounds, fewest), most)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        # Reverse the order in every other round, so that no way always runs after the same other.
        is_reversed = number % 2 == 0
        for name in sorted(ways, reverse=is_reversed):
            seconds[name].append(ways[name](steps))
    return seconds


def median_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Return the median with its distribution-free 95 % confidence interval.

    With fewer than six values, the interval is their range, which covers less than 95 %.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    count = len(ordered)
    # Each value is below the true median with probability 1/2, so the values are like `count`
    # throws of a coin, in which heads means "below". Leave out as many values at each end as
    # possible, while the true median is outside the interval with a probability of at most 5 %.
    left_out = 0
    # The number of outcomes with at most `heads` heads, out of 2**count equally likely outcomes.
    outcomes = 0
    for heads in range(count // 2):
        outcomes += math.comb(count, heads)
        # In these outcomes, at most `heads` values are below the true median. If `heads` values are
        # left out at each end, the smallest one that is kept is then above the true median, so the
        # interval misses it. As many outcomes miss it at the other end: hence the factor 2.
        if 2 * outcomes > 0.05 * 2**count:
            break
        left_out = heads
    return Interval(
        value=float(np.median(ordered)),
        low=float(ordered[left_out]),
        high=float(ordered[count - 1 - left_out]),
    )


def speedup_of(before: Sequence[float], after: Sequence[float]) -> tuple[Interval, str]:
    """Return the speedup from `before` to `after` with its interval, and a verdict.

    Both arguments have the seconds per step of each window, in pairs that were timed together.
    """
    speedup = median_interval(np.array(before) / np.array(after))
    if speedup.low > 1:
        return speedup, "faster"
    if speedup.high < 1:
        return speedup, "slower"
    # The interval contains 1. If it is narrow, there is hardly a difference.
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

    If workers kept running, they would read ahead during windows of another way. Workers that start
    together deliver their batches in bursts of one batch per worker. So a window shows the speed of
    training only if its number of steps is a multiple of the number of workers.
    """

    def take_steps(steps: int) -> float:
        return _seconds_per_step(state, state.loader.next, steps)

    return take_steps


def _seconds_per_step(state: State, read: Callable[[], list[Any]], steps: int) -> float:
    """Take one step, then time `steps` steps; `read` returns the micro-batches of a step."""
    # Closing the loader stops its workers, if `read` has started any.
    with contextlib.closing(state.loader):
        # The first step starts the workers.
        train_step(state, read())
        synchronize(state.world.device)
        started = time.perf_counter()
        for _ in range(steps):
            train_step(state, read())
        synchronize(state.world.device)
        return (time.perf_counter() - started) / steps
