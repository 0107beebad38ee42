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
    """Take training steps and measure each one; wait for the device after each step."""
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
        # How long the host waited for the device.
        idle[i] = ended - issued
        waits[i] = state.loader.seconds - waited_before
        sums = torch.as_tensor(state.sums).tolist()
        losses[i] = means(sums, state.metrics or ())["loss"]
        # `train_step` adds to the sums, so reset them to get the loss of the next step alone.
        state.sums = 0.0
    # Here the host waits for the device first, and for the next batch afterwards. In training it
    # waits for the next batch while the device is still working. So subtract the wait for data
    # that fits into the wait for the device. As an approximation, take the wait for this step's
    # batch instead of the next one's.
    hidden = np.minimum(waits, idle)
    return Steps(losses=losses, seconds=seconds - hidden, waits=waits - hidden)


def in_rounds(seconds: np.ndarray, workers: int) -> np.ndarray:
    """Return the mean seconds per step in each round of the loader workers.

    A round has as many steps as there are workers. Several workers deliver their batches in a
    burst, and then one step waits for the next burst. A median over single steps would hide that
    wait. Steps of an incomplete last round are left out. With fewer than two workers or rounds, the
    steps are returned as they are.
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
    """Format a result of `spread`, whose values are in seconds, in milliseconds."""
    median = 1e3 * seconds["median"]
    p10 = 1e3 * seconds["p10"]
    p90 = 1e3 * seconds["p90"]
    return f"{median:.2f} ms (p10 {p10:.2f}, p90 {p90:.2f})"


def differences(first: Iterable[float], second: Iterable[float]) -> np.ndarray:
    """Return the difference of each pair, relative to the larger magnitude.

    The difference of two NaNs is 0. The difference of any other pair with a NaN or an infinity is
    infinite.
    """
    a = np.array([*first], dtype=float)
    b = np.array([*second], dtype=float)
    # inf - inf and inf / inf are NaN, about which NumPy would warn. They become infinite below.
    with np.errstate(invalid="ignore"):
        magnitude = np.maximum(np.abs(a), np.abs(b))
        # The lower bound avoids a division by 0.
        relative = np.abs(a - b) / np.maximum(magnitude, 1e-12)
    relative[np.isnan(a) & np.isnan(b)] = 0
    return np.nan_to_num(relative, nan=np.inf)


def steps_of_run(config: Config) -> int:
    """Return the number of steps of a run; with --train.epochs, it depends on the dataset."""
    if not config.train.epochs:
        return config.train.steps
    train, _, _ = load_datasets(config)
    return with_steps(config, samples=len(train)).train.steps


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes.

    On CUDA, this is the memory allocated on the device, otherwise the resident memory on the host.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "darwin":
        # macOS counts bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux `ru_maxrss` begins with the peak of the process that started this one, so read the
    # peak of the resident memory ("high water mark") from /proc.
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match
    return 1024 * int(match[1])
