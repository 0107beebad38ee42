"""Stragglers: which rank the others wait for, step after step, though it does not hang."""

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

# A rank is slow if it takes more than this many times what the median rank takes by itself, and if
# the difference is more than this fraction of a step.
SLOW_RATIO = 1.2
SLOW_FRACTION = 0.05
# The slowest rank is named when it was slow for this many log lines in a row.
SLOW_WINDOWS = 3
# Only the first steps of each log line are timed.
TIMED_STEPS = 64


def monitors(state: "State", run_dir: Path, group: Group) -> tuple[list[Any], list[Any]]:
    """Return the callbacks that watch the ranks: those before the journal, and those after it."""
    before, after = watchdog.monitors(state, run_dir, group)
    if state.world.size > 1:
        stragglers = Stragglers(group, state.world.device, state.module)
        before.append(stragglers)
        after.append(BeginStep(stragglers))
    return before, after


class Stragglers:
    """Adds the slowest rank to each log line, and warns when the same one stays the slowest.

    A step takes all ranks the same time, since they wait for each other. So this times what a rank
    does before it first waits for others: between steps, for its batch and, under DDP, in forward
    and in all micro-batches before the last. (FSDP gathers in forward: there a slow device looks
    like one that waits.) On CUDA events time the device; nothing waits for them before the log
    line. Each line has the means of the window before it, so that no rank waits for the others'.
    """

    def __init__(self, group: Group, device: torch.device, module: nn.Module) -> None:
        self.group = group
        self.module = module
        self.cuda = device.type == "cuda"
        # When this rank began the step, None if the step is not timed. Times are seconds on a CPU
        # and events on CUDA.
        self.began: Any = None
        # When this rank got to the point where it may first wait for others.
        self.arrived: Any = None
        self.spans: list[tuple[Any, Any]] = []
        # The end of the last phase (a save, a validation) when the step began.
        self.resumed = group.resumed
        # Waits for the exchange that began at the last log line, and returns its result.
        self.maxima: Callable[[], list[float]] | None = None
        # The slowest rank of the last window, and the number of windows in a row it was slow.
        self.last_slowest = 0
        self.slow_windows = 0
        self.hook: Any = None

    def __enter__(self) -> "Stragglers":
        """Learn the ranks' hosts; watch forward under DDP."""
        self.hosts = self.group.gather(socket.gethostname())
        if isinstance(self.module, DistributedDataParallel):
            self.hook = self.module.register_forward_hook(self._after_forward)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Remove the hook; after a regular end no collective is left unfinished."""
        if self.hook:
            self.hook.remove()
        if kind is None and self.maxima:
            self.maxima()

    def before_step(self, state: "State") -> None:
        """Note that this rank has its batch."""
        # In a save or a validation the ranks have waited for each other: such a step is not timed.
        if self.resumed != self.group.resumed:
            self.began = None
        self._arrive()

    def after_step(self, state: "State", record: dict[str, Any] | None) -> None:
        """At a log line add the slowest of the window before, and send this window's mean."""
        if self.began is not None:
            self.spans.append((self.began, self.arrived))
        if record is None:
            return
        if self.maxima:
            record |= self._judge(self.maxima(), record["step_seconds"])
        # Each rank sends zeros but for its own entry, so the maxima are the entries of all ranks.
        seconds = [0.0] * self.group.size
        seconds[self.group.rank] = self._mean_seconds()
        self.maxima = self.group.maximum(seconds)
        self.spans = []

    def begin(self, state: "State", record: dict[str, Any] | None) -> None:
        """Time the next step."""
        self.resumed = self.group.resumed
        self.began = self._now() if len(self.spans) < TIMED_STEPS else None

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        # Validation calls forward, too.
        if module.training:
            self._arrive()

    def _arrive(self) -> None:
        """Note the time: from here on this rank may wait for others."""
        # A step calls this several times, and the last call counts. Between the calls no rank waits
        # for another one: DDP communicates in the backward of the last micro-batch only.
        if self.began is not None:
            self.arrived = self._now()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _mean_seconds(self) -> float:
        """Return the mean of what this rank has timed in the window; 0 if it timed nothing."""
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
        """Return the slowest rank of a window; warn if it was slow for several windows in a row."""
        median = sorted(seconds)[(len(seconds) - 1) // 2]
        longest = max(seconds)
        slowest = seconds.index(longest)
        slow = longest > SLOW_RATIO * median and longest - median > SLOW_FRACTION * step_seconds
        if not slow:
            self.slow_windows = 0
        elif slowest == self.last_slowest:
            self.slow_windows += 1
        else:
            self.slow_windows = 1
        self.last_slowest = slowest
        # By == rather than >=, since one warning is enough while the rank stays slow.
        if self.slow_windows == SLOW_WINDOWS and self.group.rank == 0:
            text = "rank %d on %s holds up the others: it waits after %.3g s, the median %.3g s"
            log.warning(text, slowest, self.hosts[slowest], longest, median)
        return {
            "slowest_rank": slowest,
            "slowest_rank_seconds": longest,
            "median_rank_seconds": median,
        }


class BeginStep:
    """A callback behind the journal, which takes time on rank 0 alone: that is not timed."""

    def __init__(self, stragglers: Stragglers) -> None:
        self.stragglers = stragglers

    def after_step(self, state: "State", record: dict[str, Any] | None) -> None:
        """Time the next step."""
        self.stragglers.begin(state, record)
