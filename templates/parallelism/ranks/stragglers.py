"""Stragglers: which rank the others wait for, step after step, though it does not hang."""

import logging
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import watchdog
from .agreement import Group

log = logging.getLogger(__name__)

SLOW_RATIO = 1.2  # a straggler takes so many times what the median rank takes on its own,
SLOW_SHARE = 0.05  # which makes up this share of a step,
SLOW_WINDOWS = 3  # for so many log lines in a row
TIMED_STEPS = 64  # of each log line: the first ones


def monitors(state: Any, run_dir: Path, group: Group) -> tuple[list[Any], list[Any]]:
    """The callbacks that watch the ranks: those before the journal, and those after it."""
    before, after = watchdog.monitors(state, run_dir, group)
    if state.world.size == 1:
        return before, after
    stragglers = Stragglers(group, state.world.device, state.module)
    # After the journal, which takes time on rank 0 alone.
    return [*before, stragglers], [*after, SimpleNamespace(after_step=stragglers.begin)]


class Stragglers:
    """Adds the slowest rank to each log line, and warns when the same one stays the slowest.

    A step takes all ranks the same time, since they wait for each other. So this times what a rank
    does on its own before it first waits: between steps, for its batch and, under DDP, in forward
    and in all micro-batches before the last. (FSDP gathers in forward: there a slow device looks
    like one that waits.) On CUDA events time the device; nothing waits for them before the log
    line. The line has the means of the window before, so that no rank waits for the others'.
    """

    def __init__(self, group: Group, device: torch.device, module: nn.Module) -> None:
        self.group, self.module, self.cuda = group, module, device.type == "cuda"
        self.began: Any = None  # turning to this step, if it is timed
        self.arrived: Any = None  # where this rank may first wait for others
        self.resumed = group.resumed
        self.spans: list[tuple[Any, Any]] = []
        self.maxima: Callable[[], list[float]] | None = None
        self.streak = (0, 0)  # the slowest rank; for how many windows in a row
        self.hook: Any = None

    def __enter__(self) -> "Stragglers":
        """Learn the ranks' hosts; watch forward under DDP."""
        self.hosts = self.group.gather(socket.gethostname())
        if isinstance(self.module, DistributedDataParallel):
            self.hook = self.module.register_forward_hook(
                lambda module, *_: self._arrive() if module.training else None
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """End; after a regular end no collective is left unfinished."""
        if self.hook:
            self.hook.remove()
        if kind is None and self.maxima:
            self.maxima()

    def before_step(self, state: Any) -> None:
        """The batch is there. After a save or a validation, the ranks have waited already."""
        if self.resumed != self.group.resumed:
            self.began = None
        self._arrive()

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """At a log line add the slowest of the window before, and send this window's mean."""
        if self.began is not None:
            self.spans.append((self.began, self.arrived))
        if record is None:
            return
        if self.maxima:
            record |= self._judge(self.maxima(), record["step_seconds"])
        spans = [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in self.spans]
        own = [0.0] * self.group.size  # of which each rank fills its place
        own[self.group.rank] = statistics.fmean(spans) if spans else 0.0
        self.maxima, self.spans = self.group.maximum(own), []

    def begin(self, state: Any, record: dict[str, Any] | None) -> None:
        """Time the next step."""
        self.resumed = self.group.resumed
        self.began = self._now() if len(self.spans) < TIMED_STEPS else None

    def _arrive(self) -> None:
        """From here on this rank may wait for others; the last call of a step counts."""
        if self.began is not None:
            self.arrived = self._now()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _judge(self, seconds: list[float], step_seconds: float) -> dict[str, float]:
        median = sorted(seconds)[(len(seconds) - 1) // 2]
        slowest = seconds.index(max(seconds))
        own = seconds[slowest]
        slow = own > SLOW_RATIO * median and own - median > SLOW_SHARE * step_seconds
        windows = self.streak[1] * (self.streak[0] == slowest) + 1 if slow else 0
        self.streak = (slowest, windows)
        if windows == SLOW_WINDOWS and self.group.rank == 0:
            text = "rank %d on %s holds up the others: it waits after %.3g s, the median %.3g s"
            log.warning(text, slowest, self.hosts[slowest], own, median)
        return {"slowest_rank": slowest, "slowest_rank_seconds": own, "median_rank_seconds": median}
