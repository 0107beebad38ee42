"""Ways to take the same steps, timed in turns, and what tells a difference from noise."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..device import synchronize
from ..train import State, train_step
from .timing import Interval, median_interval

WINDOW, SECONDS = 0.2, 6.0  # of a window of steps, and of all windows together
TURNS = (6, 15)  # windows of each way: at least (for a 95 % interval), and at most
NOISE = 1.2  # an interval whose ends are this far apart cannot tell what is faster
TOO_NOISY = "too noisy to tell"
BATCHES = 4  # read before anything is timed

Way = Callable[[int], None]  # takes so many steps


def in_turns(ways: dict[str, Way], device: torch.device) -> dict[str, list[float]]:
    """Seconds per step of each way, by windows in turns, so that other load meets all alike."""

    def window(way: Way, steps: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        way(steps)
        synchronize(device)
        return (time.perf_counter() - started) / steps

    slowest = max(min(window(way, 1) for _ in range(2)) for way in ways.values())
    steps = int(np.clip(round(WINDOW / slowest), 1, 100))
    turns = int(np.clip(round(SECONDS / (len(ways) * steps * slowest)), *TURNS))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        for name in sorted(ways, reverse=turn % 2 == 0):
            found[name].append(window(ways[name], steps))
    return found


def times_as_fast(before: Sequence[float], after: Sequence[float]) -> tuple[Interval, str]:
    """How many times as fast the steps are, from pairs of windows, and a word for it."""
    speedup = median_interval(np.array(before) / np.array(after))
    if speedup.low > 1 or speedup.high < 1:
        return speedup, "faster" if speedup.low > 1 else "slower"
    return speedup, "within noise" if speedup.high < NOISE * speedup.low else TOO_NOISY


def without_reading(state: State) -> Way:
    """Steps on a few batches that were read before: neither reading nor loader workers count."""
    batches = [state.loader.of(step, state.plan) for step in range(BATCHES)]
    return partial(_take_steps, state, batches)


def _take_steps(state: State, batches: list[list[Any]], steps: int) -> None:
    for _ in range(steps):
        train_step(state, batches[state.step % len(batches)])
