"""Hangs: a rank that makes no headway is noticed, named, and the job ended.

When one rank stops (its process is stopped, its code loops, its machine or GPU is gone), the others
wait for it in the next collective, and by themselves would wait for hours. So a thread on each rank
watches over how long the loop takes from one step to the next. Past the limit it writes down where
its rank stands into the run directory, waits for the other ranks to do so, and the lowest rank that
can tells who is to blame: who wrote nothing, or else who has begun the fewest collectives.

How long is too long, in one place:

- a step: `--parallel.timeout-minutes`. Where hosts wait for each other in one they do so for longer
  (`network.after`), should there be no thread left to watch;
- start-up with the first step (which may compile), validation, a save: `PATIENCE`. So long, too, a
  collective or an agreement may take by itself.

The others then have REPORTING_SECONDS, and twice the longest step by which they may lag, to report.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..files import write_json
from .agreement import Group
from .network import PATIENCE, TRACE, after, prefer, traces_in
from .stragglers import Pace
from .world import World

REPORTING_SECONDS = 10.0
SUSPENDED_SECONDS = 5.0  # not to have been scheduled for so long is to have been stopped


def watchdog(run_dir: Path, world: World, group: Group, module: Any, say: Any) -> list[Any]:
    """The hang watchdog and the search for stragglers, as callbacks."""
    watch = Watch(run_dir, world, group, say)
    return [watch, Stragglers(group, world, module)] if group.size > 1 else [watch]


class Stragglers:
    """Which rank the others wait for."""

    def __init__(self, group: Group, world: World, module: Any) -> None:
        self.pace, self.module = Pace(group, world.device, module), module

    def __enter__(self) -> "Stragglers":
        self.pace.open(wrapped=type(self.module).__name__ == "DistributedDataParallel")
        return self

    def __exit__(self, kind: Any, *rest: object) -> None:
        self.pace.close(kind)

    def before_step(self, state: Any) -> None:
        """The batch is there."""
        self.pace.arrive()

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Add figures to the record."""
        if record is not None:
            record.update(self.pace.window(record["step_seconds"]))
        self.pace.begin()


class Watch:
    """Watches over this rank from its making on; call it after every step, as an observer is.

    On a plain process, which nobody waits for, it does nothing.
    """

    def __init__(self, run_dir: Path, world: World, group: Group, say: Any) -> None:
        self.run_dir, self.world, self.group, self.say = run_dir, world, group, say
        self.limit = PATIENCE.total_seconds()
        self.began = self.longest = 0.0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self.watched = threading.get_ident()

    def __enter__(self) -> "Watch":
        """Start the thread; say where NCCL is to write its own account of a hang."""
        if self.group.group is not None:
            stamp = self.group.from_first(lambda: time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
            self.folder = self.run_dir / f"hang-{stamp}"
            prefer(traces_in(self.run_dir))
            self.began = time.monotonic()
            self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop watching."""
        self.over.set()

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """A step is done; from now on the next one has its time."""
        now, limit = time.monotonic(), self.world.step_limit.total_seconds()
        if self.limit == limit:  # not the first step, which may compile
            self.longest = max(self.longest, min(now - self.began, limit))
        self.began, self.limit = now, limit
        self.group.limit = after(self.world.step_limit)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self.over.wait(min(1.0, self.limit / 10)):
            now = time.monotonic()
            if now - last > SUSPENDED_SECONDS:
                self.began += now - last  # the whole job may have been: that is no hang
            last = now
            slow = PATIENCE.total_seconds() if self.group.patient else 0.0
            if now - self.began > max(self.limit, slow):
                try:
                    self._report()
                except OSError as error:  # the disk may be what hangs
                    self.say(f"error: no step was finished in time, and {error}")
                finally:
                    os._exit(1)

    def _report(self) -> None:
        rank, size = self.group.rank, self.group.size
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / f"stacks_rank_{rank}.txt", "w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        report = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "where": _place_of(self.watched),
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
            self._tell(reports)
        deadline = time.monotonic() + 2 * REPORTING_SECONDS
        while not (self.folder / "verdict.txt").exists() and time.monotonic() < deadline:
            time.sleep(0.2)  # a rank that leaves brings down the others, and what they have to say

    def _tell(self, reports: dict[int, dict[str, Any]]) -> None:
        waited = time.monotonic() - self.began
        reason = f"no step was finished for {waited:.0f} s: {verdict(reports, self.group.size)}"
        lines = [reason, *_places(reports), f"stacks and last collectives are in {self.folder}"]
        if torch.cuda.is_available():
            lines.append(f"the latter are for `torchfrtrace --prefix {TRACE} {self.folder}`")
        text = "\n  ".join(lines)
        self.say(f"error: {text}")
        write_json(self.run_dir / "status.json", {"status": "failed", "reason": reason})
        (self.folder / "verdict.txt").write_text(text + "\n", "utf-8")

    def _write_trace(self) -> None:
        """What the flight recorder, which is always on, knows of the last 2,000 collectives."""
        recorder = torch._C._distributed_c10d
        nccl = hasattr(recorder, "_dump_nccl_trace")
        content = recorder._dump_nccl_trace() if nccl else recorder._dump_fr_trace()
        (self.folder / f"{TRACE}{self.group.rank}").write_bytes(content)

    def _reports(self) -> dict[int, dict[str, Any]]:
        found = {}
        for path in self.folder.glob("rank_*.json"):
            with contextlib.suppress(OSError):
                found[int(path.stem.removeprefix("rank_"))] = json.loads(path.read_text("utf-8"))
        return dict(sorted(found.items()))


def verdict(reports: dict[int, dict[str, Any]], size: int) -> str:
    """Which ranks the others wait for, from what those that answered have written."""
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


def _places(reports: dict[int, dict[str, Any]]) -> list[str]:
    fewest_first = sorted(reports.items(), key=lambda item: item[1]["collectives"])
    return [
        f"rank {rank} (process {report['process']} on {report['host']}) is at {report['where']}"
        for rank, report in fewest_first[:8]
    ]


def _place_of(thread: int) -> str:
    """The innermost line of a thread that is not of a library."""
    inner = frame = sys._current_frames()[thread]
    while frame and any(part in frame.f_code.co_filename for part in ("-packages/", "<frozen")):
        frame = frame.f_back
    frame = frame or inner
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _collectives() -> int:
    """How many collectives this rank has begun, in all groups that it is in."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)
