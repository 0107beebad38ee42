"""The watchdog: ends a run that hangs, and names the rank that the others wait for.

When a rank stops (its process is stopped, its code loops, its machine or GPU is gone), the others
wait for it in the next collective, by default for hours. So a thread on each rank measures the time
since the last step. Past the limit it writes down where its rank stands, waits for the reports of
the other ranks and ends the process. The lowest rank that still can names those to blame: the ranks
without a report, or else those that have begun the fewest collectives.

The limit is `--parallel.timeout-minutes`, but PHASE_LIMIT for start-up with the first step (which
may compile) and inside `Group.phase` (a validation, a save).
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

from ..files import open_to_write, write_json
from .agreement import Group
from .world import PHASE_LIMIT

TRACE = "collectives_rank_"  # files of the last collectives
REPORTING_SECONDS = 10.0  # and twice the longest step, by which a rank may lag
SUSPENDED_SECONDS = 5.0  # a thread that did not run for so long was stopped, with its process


def monitors(state: Any, run_dir: Path, group: Group) -> tuple[list[Any], list[Any]]:
    """The callbacks that watch the ranks: those before the journal, and those after it."""
    return [Watchdog(run_dir, group)] if state.world.distributed else [], []


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
        """Start the thread."""
        stamp = self.group.broadcast(time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
        self.folder = self.run_dir / f"hang-{stamp}"
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
            self.group.phases -= 1  # start-up

    def _watch(self) -> None:
        last = time.monotonic()
        while not self.over.wait(min(1.0, self.limit / 10)):
            now = time.monotonic()
            if sys.platform != "linux" and os.getppid() != self.parent:
                os._exit(1)  # torchrun was killed; on Linux the kernel ends its ranks (world.py)
            # Read before the times: a phase sets them before it ends.
            limit = max(self.limit, PHASE_LIMIT.total_seconds() if self.group.phases else 0.0)
            began = max(self.began, self.group.resumed)
            if now - last > SUSPENDED_SECONDS:
                self.began = began = began + now - last  # the whole job may have been: no hang
            last = now
            if now - began > limit:
                try:
                    self._report(now - began)
                except OSError as error:  # the disk may be what hangs
                    self.group.say(f"error: no step was finished in time, and {error}")
                finally:
                    os._exit(1)

    def _report(self, waited: float) -> None:
        """Write down where this rank stands; the lowest rank that does then says who hangs."""
        rank, size, verdict = self.group.rank, self.group.size, self.folder / "verdict.txt"
        self.folder.mkdir(exist_ok=True)
        with open_to_write(self.folder / f"stacks_rank_{rank}.txt") as file:
            faulthandler.dump_traceback(file)
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        report = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "where": _position_of(self.watched),
            # How many this rank has begun, in all its groups.
            "collectives": sum(one._get_sequence_number_for_group() for one in groups),
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
        self.group.say(f"error: {text}")
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(self.run_dir / "status.json", {"status": "failed", "at": at, "reason": reason})
        with open_to_write(verdict) as file:
            file.write(text + "\n")

    def _write_trace(self) -> None:
        """Write what the flight recorder knows of the last 2,000 collectives."""
        recorder: Any = torch._C._distributed_c10d  # pyright: ignore
        dump = getattr(recorder, "_dump_nccl_trace", None) or recorder._dump_fr_trace
        with open_to_write(self.folder / f"{TRACE}{self.group.rank}", "wb") as file:
            file.write(dump())

    def _reports(self) -> dict[int, dict[str, Any]]:
        reports = {}
        for path in self.folder.glob("rank_*.json"):
            with contextlib.suppress(OSError):
                reports[int(path.stem.removeprefix("rank_"))] = json.loads(path.read_text("utf-8"))
        return dict(sorted(reports.items()))


def blame(reports: dict[int, dict[str, Any]], size: int) -> str:
    """Which ranks the others wait for, from the reports of those that wrote one."""
    ranks, problem = [rank for rank in range(size) if rank not in reports], "gave no sign of life"
    if not ranks:
        counts = {rank: report["collectives"] for rank, report in reports.items()}
        ranks = [rank for rank, count in counts.items() if count == min(counts.values())]
        problem = "did not enter the collective that the others are waiting in"
        if len(ranks) == size:
            return "all ranks wait within the same collective"
    named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named} {problem}"


def _position_of(thread: int) -> str:
    """The innermost line of a thread that is not of a library."""
    inner = frame = sys._current_frames()[thread]
    while frame and any(part in frame.f_code.co_filename for part in ("-packages/", "<frozen")):
        frame = frame.f_back
    frame = frame or inner
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
