"""Find stragglers: ranks that do not hang, but for which the others wait at each step."""

import logging
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import watchdog
from .agreement import Group

if TYPE_CHECKING:
    from ..train import State

log = logging.getLogger(__name__)

# A rank's own time is the part of a step until the rank may first wait for others. A rank is slow
# if its own time is more than SLOW_RATIO times the median of the ranks, and the difference is more
# than SLOW_FRACTION of a step.
SLOW_RATIO = 1.2
SLOW_FRACTION = 0.05
# A warning names the slowest rank once it has been slow in this many windows in a row. A window is
# the steps between two log lines.
SLOW_WINDOWS = 3
# Only the first steps of each window are timed, at most this many.
TIMED_STEPS = 64


def monitors(state: "State", run_dir: Path, group: Group) -> tuple[list[Any], list[Any]]:
    """Return the callbacks that watch the ranks, to call before and after the journal."""
    before, after = watchdog.monitors(state, run_dir, group)
    if state.world.size > 1:
        stragglers = Stragglers(group, state.world.device, state.module)
        before.append(stragglers)
        after.append(BeginStep(stragglers))
    return before, after


class Stragglers:
    """Callback that adds the slowest rank to each log line, and warns if it stays the slowest.

    Since ranks wait for each other, a step takes the same time on all of them. So this measures
    each rank's own time: from the start of the step until the rank may first wait for others. It
    includes the work between steps, loading the batch and, with DDP, all micro-batches up to the
    last forward. (With FSDP it ends before the first forward, since ranks wait for weights there.
    So a slow device is not found.) On CUDA, events measure the device's time. They are read only at
    log lines, where the host has already waited for the device. At a log line, ranks start to
    exchange the means of a window. The next log line shows the result, so that no rank has to wait
    for it.
    """

    def __init__(self, group: Group, device: torch.device, module: nn.Module) -> None:
        self.group = group
        self.module = module
        self.cuda = device.type == "cuda"
        # The start of the step; None if the step is not timed. On a CPU, times are numbers of
        # seconds; on CUDA, they are events.
        self.began: Any = None
        # The time at which this rank may first wait for others.
        self.arrived: Any = None
        # `began` and `arrived` of each timed step of this window.
        self.spans: list[tuple[Any, Any]] = []
        # The value of `group.resumed` when the step began. Each phase, such as a save or a
        # validation, changes `group.resumed` at its end.
        self.resumed = group.resumed
        # Waits for the exchange of means that began at the last log line, and returns each rank's
        # mean.
        self.maxima: Callable[[], list[float]] | None = None
        # The slowest rank of the last window, and for how many windows in a row it was slow.
        self.last_slowest = 0
        self.slow_windows = 0
        self.hook: Any = None

    def __enter__(self) -> "Stragglers":
        """Gather the ranks' host names and, with DDP, register a hook after forward."""
        self.hosts = self.group.gather(socket.gethostname())
        if isinstance(self.module, DistributedDataParallel):
            self.hook = self.module.register_forward_hook(self._after_forward)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Remove the hook; after a normal end, finish the pending collective."""
        if self.hook:
            self.hook.remove()
        if kind is None and self.maxima:
            self.maxima()

    def before_step(self, state: "State") -> None:
        """Note that this rank has its batch."""
        # Do not time this step if a phase, such as a save, has ended since `begin`: in a phase,
        # ranks wait for each other.
        if self.resumed != self.group.resumed:
            self.began = None
        self._arrive()

    def after_step(self, state: "State", record: dict[str, Any] | None) -> None:
        """At a log line, add the slowest rank of the previous window, and send this window's mean.

        `record` is None except at a log line.
        """
        if self.began is not None:
            self.spans.append((self.began, self.arrived))
        if record is None:
            return
        if self.maxima:
            record |= self._judge(self.maxima(), record["step_seconds"])
        # Each rank sends its own entry, and zeros for the others. So the maxima are the entries of
        # all ranks.
        seconds = [0.0] * self.group.size
        seconds[self.group.rank] = self._mean_seconds()
        self.maxima = self.group.maximum(seconds)
        self.spans = []

    def begin(self, state: "State", record: dict[str, Any] | None) -> None:
        """Start the timer of the next step, if it is one of the window's first."""
        self.resumed = self.group.resumed
        self.began = self._now() if len(self.spans) < TIMED_STEPS else None

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        # Validation calls forward, too, but in evaluation mode.
        if module.training:
            self._arrive()

    def _arrive(self) -> None:
        """Note the time from which this rank may wait for others."""
        # A step may call this several times, and the last call counts. No rank waits before the
        # last call: DDP communicates only in the backward of the last micro-batch.
        if self.began is not None:
            self.arrived = self._now()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _mean_seconds(self) -> float:
        """Return this rank's mean seconds per step in the window; 0 if no step was timed."""
        if not self.spans:
            return 0.0
        seconds = []
        for began, arrived in self.spans:
            if self.cuda:
                # Events measure in milliseconds.
                seconds.append(began.elapsed_time(arrived) / 1e3)
            else:
                seconds.append(arrived - began)
        return statistics.fmean(seconds)

    def _judge(self, seconds: list[float], step_seconds: float) -> dict[str, float]:
        """Return the slowest rank of a window; warn if it was slow for several windows in a row.

        `seconds` has the mean of each rank.
        """
        # For an even number of ranks, take the lower of the two middle values. So with two ranks,
        # the slower rank is compared with the faster one.
        median = sorted(seconds)[(len(seconds) - 1) // 2]
        longest = max(seconds)
        slowest = seconds.index(longest)
        excess = longest - median
        slow = longest > SLOW_RATIO * median and excess > SLOW_FRACTION * step_seconds
        if not slow:
            self.slow_windows = 0
        elif slowest == self.last_slowest:
            self.slow_windows += 1
        else:
            self.slow_windows = 1
        self.last_slowest = slowest
        # Compare with == instead of >=, to warn only once while the rank stays slow.
        if self.slow_windows == SLOW_WINDOWS and self.group.rank == 0:
            text = "rank %d on %s slows the others down: %.3g s per step by itself, median %.3g s"
            log.warning(text, slowest, self.hosts[slowest], longest, median)
        return {
            "slowest_rank": slowest,
            "slowest_rank_seconds": longest,
            "median_rank_seconds": median,
        }


class BeginStep:
    """Callback that starts the timer after the journal, whose time on rank 0 must not count."""

    def __init__(self, stragglers: Stragglers) -> None:
        self.stragglers = stragglers

    def after_step(self, state: "State", record: dict[str, Any] | None) -> None:
        """Start the timer of the next step."""
        self.stragglers.begin(state, record)
