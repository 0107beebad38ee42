"""Time training steps, and compare and describe the measurements; used by the stages."""

import re
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import Config, with_steps
from ..device import synchronize
from ..loss import means
from ..train import State, load_datasets, train_step


@dataclass(frozen=True)
class Steps:
    """Measurements of consecutive steps: arrays with one entry per step."""

    losses: np.ndarray
    seconds: np.ndarray
    waits: np.ndarray
    """Seconds of waiting for data, which `seconds` includes."""

    def without_first(self, count: int) -> "Steps":
        """Return all steps except the first `count`."""
        return Steps(
            losses=self.losses[count:],
            seconds=self.seconds[count:],
            waits=self.waits[count:],
        )

    def followed_by(self, later: "Steps") -> "Steps":
        """Return these steps followed by the later ones."""
        return Steps(
            losses=np.append(self.losses, later.losses),
            seconds=np.append(self.seconds, later.seconds),
            waits=np.append(self.waits, later.waits),
        )


def record_steps(state: State, steps: int) -> Steps:
    """Take training steps, and wait for the device after each one."""
    losses = np.zeros(steps)
    seconds = np.zeros(steps)
    waits = np.zeros(steps)
    idle = np.zeros(steps)
    synchronize(state.world.device)
    for i in range(steps):
        started = time.perf_counter()
        waited_before = state.loader.seconds
        train_step(state, state.loader.next())
        issued = time.perf_counter()
        synchronize(state.world.device)
        ended = time.perf_counter()
        seconds[i] = ended - started
        idle[i] = ended - issued
        waits[i] = state.loader.seconds - waited_before
        sums = torch.as_tensor(state.sums).tolist()
        losses[i] = means(sums, state.metrics or ())["loss"]
        # The loop sums losses until a record is written. Reset the sums to get each step's loss.
        state.sums = 0.0
    # In training the host would read the next batch while the device works, so subtract that time.
    hidden = np.minimum(waits, idle)
    return Steps(losses=losses, seconds=seconds - hidden, waits=waits - hidden)


def in_rounds(seconds: np.ndarray, workers: int) -> np.ndarray:
    """Return the mean step of each round of the loader workers.

    Several workers deliver their batches in a burst, and then let one step wait for all of them. A
    median over single steps would hide that wait. With fewer than two workers or rounds, returns
    all steps.
    """
    if workers < 2 or len(seconds) < 2 * workers:
        return seconds
    rounds = len(seconds) // workers
    return seconds[: rounds * workers].reshape(rounds, workers).mean(axis=1)


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return the median, the 10th and 90th percentiles and the number of values."""
    p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
    return {"median": median, "p10": p10, "p90": p90, "n": len(values)}


def describe(seconds: dict[str, Any]) -> str:
    """Format a spread of seconds in milliseconds."""
    median = 1e3 * seconds["median"]
    p10 = 1e3 * seconds["p10"]
    p90 = 1e3 * seconds["p90"]
    return f"{median:.2f} ms (p10 {p10:.2f}, p90 {p90:.2f})"


def differences(first: Iterable[float], second: Iterable[float]) -> np.ndarray:
    """Return the difference of each pair, relative to the larger magnitude.

    It is 0 if both values are NaN, and infinite if only one is finite.
    """
    a = np.array([*first], dtype=float)
    b = np.array([*second], dtype=float)
    # NumPy would warn about inf - inf.
    with np.errstate(invalid="ignore"):
        magnitude = np.maximum(np.abs(a), np.abs(b))
        relative = np.abs(a - b) / np.maximum(magnitude, 1e-12)
    relative[np.isnan(a) & np.isnan(b)] = 0
    return np.nan_to_num(relative, nan=np.inf)


def steps_of_run(config: Config) -> int:
    """Return the number of steps of a run, which --train.epochs derives from its data."""
    if not config.train.epochs:
        return config.train.steps
    train, _, _ = load_datasets(config)
    return with_steps(config, samples=len(train)).train.steps


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on CUDA, else resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux's `ru_maxrss` begins with the peak of the process that started this one.
    status = Path("/proc/self/status").read_text()
    kilobytes = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert kilobytes
    return 1024 * int(kilobytes[1])
