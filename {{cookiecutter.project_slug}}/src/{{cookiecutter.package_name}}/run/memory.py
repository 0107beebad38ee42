"""The memory that a run takes as it goes, on its device and on the host."""

import contextlib
import logging
import os
import re
import statistics
from pathlib import Path
from typing import Any

import torch

from .hardware import in_units

log = logging.getLogger(__name__)
STEPS, LINES = 1000, 12  # over which the host's memory is judged, at least
GROWTH = 1.05  # from one third of them to the next: more than the allocator's ups and downs


class MemoryUse:
    """A callback: adds the memory to each log line, and names once a host memory that grows.

    `host_bytes` is what this process and its loader workers hold, where Linux tells; in it are the
    `staging_bytes` of a save in the background. Nothing here waits for the device.
    """

    def __init__(self) -> None:
        self.lines: list[tuple[int, int]] = []  # (step, bytes on the host)
        self.named = False

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Add to the log line, if there is one."""
        if record is None:
            return
        device = state.world.device
        if device.type == "cuda":
            record["device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
            record["device_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        if staged := state.checkpointer.writer.staged_bytes:
            record["staging_bytes"] = staged
        if held := host_memory():
            record["host_bytes"] = held
            self.lines.append((state.step, held))
            self._judge(state.world.rank)

    def _judge(self, rank: int) -> None:
        (first, _), (last, now) = self.lines[0], self.lines[-1]
        if len(self.lines) < LINES or last - first < STEPS:
            return
        size = len(self.lines) // 3
        thirds = [self.lines[start : start + size] for start in (0, size, 2 * size)]
        one, two, three = (statistics.median(held for _, held in third) for third in thirds)
        if two > GROWTH * one and three > GROWTH * two and not self.named:
            self.named = True
            log.warning(
                "the host's memory of rank %d grows: %s at step %d, %s at step %d. Does a dataset "
                "or a callback keep something of each step, such as a loss with its graph?",
                *(rank, in_units(self.lines[0][1]), first, in_units(now), last),
            )
        del self.lines[:size]


def host_memory() -> int:
    """Resident bytes of this process and of those it started; 0 where this is unknown (no Linux).

    Of a forked process only what it does not share with this one: that would count twice.
    """
    with contextlib.suppress(OSError):
        pages = Path("/proc/self/statm").read_text().split()
        own = (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")  # without its files
        return own + sum(map(private_memory, descendants(os.getpid())))
    return 0


def private_memory(pid: int) -> int:
    """Resident bytes of a process that no other one shares; 0 if it is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(int(kib) << 10 for kib in re.findall(r"^Private_\w+: +(\d+)", text, re.M))
    return 0


def descendants(pid: int) -> list[int]:
    """The processes below `pid`; none where this is unknown (no Linux)."""
    pids = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pids += [int(child), *descendants(int(child))]
    return pids
