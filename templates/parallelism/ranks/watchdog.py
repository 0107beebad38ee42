"""The watchdog: which rank hangs, which one the others wait for.

When a rank stops (its process is stopped, its code loops, its machine or GPU is gone), the others
wait for it in the next collective, by default for hours. So a thread on each rank measures the time
since the last step. Past the limit it writes down where its rank stands, waits for the reports of
the other ranks and ends the process. The lowest rank that still can names those to blame: the ranks
without a report, or else those that have begun the fewest collectives.

The limit is `--parallel.timeout-minutes`, but PATIENCE for start-up with the first step (which may
compile) and inside `Group.patience` (a validation, a save).
"""

import contextlib
import faulthandler
import json
import logging
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..files import open_to_write, write_json
from .agreement import Group
from .output import say
from .world import PATIENCE, TRACE, World, prefer, traces_in

log = logging.getLogger(__name__)

REPORTING_SECONDS = 10.0  # and twice the longest step, by which a rank may lag
SUSPENDED_SECONDS = 5.0  # a thread that did not run for so long was stopped, with its process

SLOW_RATIO = 1.2  # a straggler takes so many times what the median rank takes on its own,
SLOW_SHARE = 0.05  # which makes up this share of a step,
SLOW_WINDOWS = 3  # for so many log lines in a row
TIMED_STEPS = 64  # of each log line: the first ones


def watchdog(
    run_dir: Path, world: World, group: Group, module: nn.Module
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The callbacks that watch over the ranks: those before the journal, and those after it."""
    if not world.distributed:
        return (), ()
    watch = Watchdog(run_dir, group)
    if world.size == 1:
        return (watch,), ()
    stragglers = Stragglers(group, world.device, module)
    return (watch, stragglers), (SimpleNamespace(after_step=stragglers.begin),)


class Watchdog:
    """Ends the run, and says why, when this rank takes too long for a step."""

    def __init__(self, run_dir: Path, group: Group) -> None:
        self.run_dir, self.group = run_dir, group
        self.limit = group.step_limit.total_seconds()
        self.began = time.monotonic()
        self.longest = 0.0  # step so far, in seconds
        self.stepping = False
        self.over = threading.Event()
        self.watched, self.parent = threading.get_ident(), os.getppid()

    def __enter__(self) -> "Watchdog":
        """Start the thread; let NCCL write its own account of a hang into the run."""
        stamp = self.group.from_first(lambda: time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
        self.folder = self.run_dir / f"hang-{stamp}"
        prefer(traces_in(self.run_dir))
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Give the next step its time."""
        before, self.began = self.began, time.monotonic()
        if self.stepping:
            self.longest = max(self.longest, min(self.began - before, self.limit))
        else:  # the first one may have compiled
            self.stepping = True
            self.group.patient -= 1

    def _watch(self) -> None:
        last = time.monotonic()
        while not self.over.wait(min(1.0, self.limit / 10)):
            now = time.monotonic()
            if sys.platform != "linux" and os.getppid() != self.parent:
                os._exit(1)  # torchrun was killed; on Linux the kernel ends its ranks (world.py)
            # Read before the times, which are set before patience ends.
            patience = PATIENCE.total_seconds() if self.group.patient else 0.0
            began = max(self.began, self.group.resumed)
            if now - last > SUSPENDED_SECONDS:
                self.began = began = began + now - last  # the whole job may have been: no hang
            last = now
            if now - began > max(self.limit, patience):
                try:
                    self._report(now - began)
                except OSError as error:  # the disk may be what hangs
                    say(f"error: no step was finished in time, and {error}")
                finally:
                    os._exit(1)

    def _report(self, waited: float) -> None:
        """Write down where this rank stands; the lowest rank that does then says who hangs."""
        rank, size, verdict = self.group.rank, self.group.size, self.folder / "verdict.txt"
        self.folder.mkdir(exist_ok=True)
        with open_to_write(self.folder / f"stacks_rank_{rank}.txt") as file:
            faulthandler.dump_traceback(file)
        report = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "where": _position_of(self.watched),
            "collectives": _collectives(),
        }
        write_json(self.folder / f"rank_{rank}.json", report)
        # On a thread of its own, since it asks CUDA, which may be what hangs.
        trace = threading.Thread(target=self._write_trace, daemon=True)
        trace.start()
        deadline = time.monotonic() + REPORTING_SECONDS + 2 * self.longest
        while len(reports := self._reports()) < size and time.monotonic() < deadline:
            time.sleep(0.2)
        trace.join(REPORTING_SECONDS)
        if rank == min(reports):
            self._blame(reports, waited, verdict)
        # The first rank that leaves ends the others, so wait until all have reported.
        deadline = time.monotonic() + 2 * REPORTING_SECONDS
        while not verdict.exists() and time.monotonic() < deadline:
            time.sleep(0.2)

    def _blame(self, reports: dict[int, dict[str, Any]], waited: float, verdict: Path) -> None:
        reason = f"no step was finished for {waited:.0f} s: {blame(reports, self.group.size)}"
        fewest_first = sorted(reports.items(), key=lambda item: item[1]["collectives"])
        lines = [
            f"rank {rank} (process {report['process']} on {report['host']}) is at {report['where']}"
            for rank, report in fewest_first[:8]
        ]
        lines.append(f"stacks and last collectives are in {self.folder}")
        if torch.cuda.is_available():
            lines.append(f"read the latter with `torchfrtrace --prefix {TRACE} {self.folder}`")
        text = "\n  ".join([reason, *lines])
        say(f"error: {text}")
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(self.run_dir / "status.json", {"status": "failed", "at": at, "reason": reason})
        with open_to_write(verdict) as file:
            file.write(text + "\n")

    def _write_trace(self) -> None:
        """Write what the flight recorder knows of the last 2,000 collectives."""
        core: Any = torch._C
        recorder = core._distributed_c10d
        nccl = hasattr(recorder, "_dump_nccl_trace")
        content = recorder._dump_nccl_trace() if nccl else recorder._dump_fr_trace()
        with open_to_write(self.folder / f"{TRACE}{self.group.rank}", "wb") as file:
            file.write(content)

    def _reports(self) -> dict[int, dict[str, Any]]:
        found = {}
        for path in self.folder.glob("rank_*.json"):
            with contextlib.suppress(OSError):
                found[int(path.stem.removeprefix("rank_"))] = json.loads(path.read_text("utf-8"))
        return dict(sorted(found.items()))


def blame(reports: dict[int, dict[str, Any]], size: int) -> str:
    """Which ranks the others wait for, from the reports of those that wrote one."""
    if silent := [rank for rank in range(size) if rank not in reports]:
        return f"{_named(silent)} gave no sign of life"
    counts = {rank: report["collectives"] for rank, report in reports.items()}
    behind = [rank for rank, count in counts.items() if count == min(counts.values())]
    if len(behind) == size:
        return "all ranks wait within the same collective"
    return f"{_named(behind)} did not come to the collective that the others wait in"


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _position_of(thread: int) -> str:
    """The innermost line of a thread that is not of a library."""
    inner = frame = sys._current_frames()[thread]
    while frame and any(part in frame.f_code.co_filename for part in ("-packages/", "<frozen")):
        frame = frame.f_back
    frame = frame or inner
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _collectives() -> int:
    """How many collectives this rank has begun, in all its groups."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


class Stragglers:
    """Adds to each log line which rank is the slowest, and which takes the most memory.

    It warns of a rank that stays the slowest. A step takes all ranks the same time, since they wait
    for each other. So this times what a rank does on its own before it first waits: between steps,
    for its batch and, under DDP, in forward and in all micro-batches before the last. (FSDP gathers
    in forward: there a slow device cannot be told from one that waits.) On CUDA events time the
    device; nothing waits for them before the log line. The line has the means of the window before,
    so that no rank waits for the others'.
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
        """Learn where the ranks run; watch forward under DDP."""
        self.hosts = self.group.agree(socket.gethostname)
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
        """Add to the log line, if there is one."""
        if self.began is not None:
            self.spans.append((self.began, self.arrived))
        if record is not None:
            memory = record.get("device_peak_bytes") or record.get("host_bytes", 0)
            record |= self._compare(record["step_seconds"], memory)

    def begin(self, state: Any, record: dict[str, Any] | None) -> None:
        """Time the next step, after the journal: writing the record takes rank 0 alone its time."""
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

    def _compare(self, step_seconds: float, memory: int) -> dict[str, float]:
        """Send this window's mean and memory; judge those of the window before."""
        size, rank, record = self.group.size, self.group.rank, dict[str, float]()
        if self.maxima:
            found = self.maxima()
            seconds, held = found[:size], found[size:]
            most = {"most_memory_rank": held.index(max(held)), "most_memory_bytes": max(held)}
            record = self._judge(seconds, step_seconds) | most
        spans = [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in self.spans]
        own = [0.0] * 2 * size
        own[rank], own[size + rank] = statistics.fmean(spans) if spans else 0.0, float(memory)
        self.maxima = self.group.maximum(own)
        self.spans = []
        return record

    def _judge(self, seconds: list[float], step_seconds: float) -> dict[str, float]:
        median = sorted(seconds)[(len(seconds) - 1) // 2]
        slowest = seconds.index(max(seconds))
        own = seconds[slowest]
        slow = own > SLOW_RATIO * median and own - median > SLOW_SHARE * step_seconds
        windows = self.streak[1] * (self.streak[0] == slowest) + 1 if slow else 0
        self.streak = (slowest, windows)
        if windows == SLOW_WINDOWS and self.group.rank == 0:
            log.warning(
                "rank %d on %s holds up the others: before it waits for them it takes %.3g s of a "
                "step, the median rank %.3g s (steps take %.3g s)",
                *(slowest, self.hosts[slowest], own, median, step_seconds),
            )
        return {"slowest_rank": slowest, "slowest_rank_seconds": own, "median_rank_seconds": median}
