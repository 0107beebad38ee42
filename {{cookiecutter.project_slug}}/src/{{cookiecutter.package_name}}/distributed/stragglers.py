"""Which rank the others wait for: the one that is last to come to where ranks first wait in a step.

All steps take all ranks the same time, since they wait for each other. What differs is how long a
rank is on its own before the first wait: for its batch, and, where nothing is gathered in forward
(DDP), for forward and the micro-batches before the last. On CUDA it is the device that is timed,
between two events: a batch that was late counts, one that was read while the device was busy does
not. Under FSDP ranks wait for each other in every block, so that a device that computes slowly is
not told from one that waits; late batches are.

Megatron-LM's StragglerDetector times batches and computing by events, too; here nothing waits for
them: means over a log window are sent around at its end, and told with the line after it.
"""

import logging
import socket
import statistics
import time
from typing import Any

import torch
from torch import nn

from .agreement import Group

log = logging.getLogger(__name__)
RATIO = 1.2  # over the median rank, from which a rank is said to be slower,
SHARE = 0.05  # if that comes to so much of a step,
WINDOWS = 3  # so many log lines in a row
KEPT = 64  # steps of a window that are timed: the first ones


class Pace:
    """Times this rank's own part of steps and compares it with the other ranks'.

    `begin` and `arrive` cost a microsecond, or an event each on CUDA, and wait for nothing.
    """

    def __init__(self, group: Group, device: torch.device, module: nn.Module) -> None:
        self.group, self.cuda, self.module = group, device.type == "cuda", module
        self.spans: list[list[Any]] = []
        self.timed = 0
        self.span: list[Any] | None = None  # of the step under way, if it is timed
        self.hook: Any = None
        self.everyone: torch.Tensor | None = None
        self.streak = (0, 0)  # the slowest rank, windows that it has been so

    def open(self, wrapped: bool) -> None:
        """Begin to time; `wrapped`: the ranks first wait behind `module`'s forward (DDP)."""
        self.hosts = self.group.agree(socket.gethostname)
        if wrapped:
            self.hook = self.module.register_forward_hook(self._arrive_after)

    def close(self, kind: type[BaseException] | None) -> None:
        """End; after a regular one no collective is left under way."""
        if self.hook:
            self.hook.remove()
        if kind is None and self.everyone is not None:
            self.group.wait(self.work)

    def begin(self) -> None:
        """The rank turns to its next step; it waits for nobody until it arrives."""
        self.span = None
        if self.timed < KEPT:
            if self.timed == len(self.spans):
                event = torch.cuda.Event
                self.spans.append([event(True), event(True)] if self.cuda else [0.0, 0.0])
            self.span = self.spans[self.timed]
            self.timed += 1
            self._mark(0)

    def arrive(self) -> None:
        """From here on others are waited for; the last call of a step counts."""
        if self.span is not None:
            self._mark(1)

    def _arrive_after(self, module: nn.Module, *ignored: Any) -> None:
        if module.training:
            self.arrive()

    def _mark(self, end: int) -> None:
        if self.cuda:
            self.span[end].record()
        else:
            self.span[end] = time.perf_counter()

    def window(self, step_seconds: float) -> dict[str, float]:
        """Send this window's mean; what the one before said of all ranks, for the log line.

        To be called by all ranks at the same step, when the device has done what it was given.
        """
        found = self._judge(step_seconds) if self.everyone is not None else {}
        pairs = self.spans[: self.timed]
        spans = [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairs]
        self.everyone = torch.zeros(self.group.size, dtype=torch.float64)
        self.everyone[self.group.rank] = statistics.fmean(spans) if spans else 0.0
        self.work = self.group.all_max(self.everyone)
        self.timed = 0
        return found

    def _judge(self, step_seconds: float) -> dict[str, float]:
        self.group.wait(self.work)
        seconds = self.everyone.tolist()
        median = sorted(seconds)[(len(seconds) - 1) // 2]
        slowest = seconds.index(max(seconds))
        own = seconds[slowest]
        slow = own > RATIO * median and own - median > SHARE * step_seconds
        windows = self.streak[1] * (self.streak[0] == slowest) + 1 if slow else 0
        self.streak = (slowest, windows)
        if windows == WINDOWS and self.group.rank == 0:
            log.warning(
                "rank %d on %s holds up the others: before it comes to where they wait for each "
                "other it takes %.3g s of a step, the median rank %.3g s (steps take %.3g s)",
                *(slowest, self.hosts[slowest], own, median, step_seconds),
            )
        return {
            "slowest_rank": slowest,
            "slowest_rank_seconds": own,
            "median_rank_seconds": median,
        }
