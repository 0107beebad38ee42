"""Time several ways to take the same steps, interleaved; intervals tell a difference from noise."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..device import synchronize
from ..train import State, train_step

WINDOW, SECONDS = 0.2, 6.0  # of a window of steps, and of all windows together
WINDOWS = (6, 15)  # of each way: at least (for a 95 % interval), and at most
NOISE = 1.2  # an interval whose ends are this far apart cannot tell what is faster
TOO_NOISY = "too noisy to tell"
BATCHES = 4  # read before anything is timed

Way = Callable[[int], float]  # takes so many steps; seconds per step


class Interval(NamedTuple):
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:  # as in 1.25 (1.21 to 1.3)
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def time_interleaved(ways: dict[str, Way], multiple: int = 1) -> dict[str, list[float]]:
    """Seconds per step of each way, window by window in turn, so that other load meets all alike.

    Each window has a multiple of `multiple` steps.
    """
    slowest = max(min(way(multiple) for _ in range(2)) for way in ways.values())
    steps = multiple * math.ceil(min(100, WINDOW / slowest) / multiple)
    windows = int(np.clip(round(SECONDS / (len(ways) * steps * slowest)), *WINDOWS))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for window in range(windows):
        for name in sorted(ways, reverse=window % 2 == 0):
            seconds[name].append(ways[name](steps))
    return seconds


def median_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """The median with its 95 % confidence interval, by order statistics: no distribution assumed.

    With fewer than six values the interval is their range, which covers less than 95 %.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    count = len(ordered)
    # The number of values on one side of the true median is distributed as heads in `count` throws.
    ways = itertools.accumulate(math.comb(count, heads) for heads in range(count // 2))
    rank = max(0, sum(2 * fewer <= 0.05 * 2**count for fewer in ways) - 1)
    return Interval(float(np.median(ordered)), float(ordered[rank]), float(ordered[-1 - rank]))


def speedup_of(before: Sequence[float], after: Sequence[float]) -> tuple[Interval, str]:
    """How many times as fast the steps are, from pairs of windows, and a word for it."""
    speedup = median_interval(np.array(before) / np.array(after))
    if speedup.low > 1 or speedup.high < 1:
        return speedup, "faster" if speedup.low > 1 else "slower"
    return speedup, "within noise" if speedup.high < NOISE * speedup.low else TOO_NOISY


def without_loader(state: State) -> Way:
    """Steps on a few batches that were read before: neither reading nor loader workers count."""
    batches = [state.loader.of(step, state.plan) for step in range(BATCHES)]
    return partial(_seconds, state, lambda: batches[state.step % BATCHES])


def with_loader(state: State) -> Way:
    """Steps as in training, with loader workers that end with the window.

    Else they would read ahead during the windows of another way. All of them deliver their first
    batch at the same time, so only a multiple of their number shows the pace of training.
    """
    return partial(_seconds, state, lambda: state.loader.next())


def _seconds(state: State, read: Callable[[], list[Any]], steps: int) -> float:
    with contextlib.closing(state.loader):
        train_step(state, read())  # starts the workers
        synchronize(state.world.device)
        started = time.perf_counter()
        for _ in range(steps):
            train_step(state, read())
        synchronize(state.world.device)
        return (time.perf_counter() - started) / steps
