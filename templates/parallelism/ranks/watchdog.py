"""The watchdog: ends a run that hangs, and names the rank that the others wait for.

When a rank stops (its process is stopped, its code loops, its machine or GPU is gone), the others
wait for it in the next collective, by default for hours. So a thread on each rank measures the time
since the last step. Past the limit it

1. writes the stacks of its rank, then a report: where its rank is, and how many collectives it has
   begun. The report comes second, so it shows that the stacks are complete;
2. reads the reports of the other ranks until all are there or time is up;
3. writes a verdict if it is on the lowest rank with a report. The verdict names the ranks without a
   report (they are stopped, or gone) or else those that have begun the fewest collectives (the
   others wait in one that these did not enter);
4. ends the process as soon as there is a verdict, since the first process that ends takes the
   others with it.

All this goes through files in the run directory: a collective would hang, too.

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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import note_step
from ..files import open_to_write, write_json
from .agreement import Group
from .world import PHASE_LIMIT

if TYPE_CHECKING:
    from ..train import State

# The files that hold the last collectives of each rank begin with this.
TRACE = "collectives_rank_"
# Ranks wait for reports this long, and twice the longest step, by which a rank may lag.
REPORTING_SECONDS = 10.0
# A thread that did not run for this long was stopped, and its process with it.
SUSPENDED_SECONDS = 5.0


def monitors(state: "State", run_dir: Path, group: Group) -> tuple[list[Any], list[Any]]:
    """Return the callbacks that watch the ranks: those before the journal, and those after it."""
    before: list[Any] = []
    if state.world.distributed:
        before.append(Watchdog(run_dir, group))
    return before, []


class Watchdog:
    """Ends the run, and says why, when this rank takes too long for a step."""

    def __init__(self, run_dir: Path, group: Group) -> None:
        self.run_dir = run_dir
        self.group = group
        self.limit = group.step_limit.total_seconds()
        self.began = time.monotonic()
        # The longest step so far, in seconds.
        self.longest = 0.0
        # Whether the first step is done.
        self.stepping = False
        self.over = threading.Event()
        self.watched = threading.get_ident()
        self.parent = os.getppid()

    def __enter__(self) -> "Watchdog":
        """Start the thread."""
        # All ranks report into one folder, so its name is rank 0's.
        stamp = self.group.broadcast(time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
        self.folder = self.run_dir / f"hang-{stamp}"
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()

    def before_step(self, state: "State") -> None:
        """Note when a whole step is done, all callbacks after it included."""
        if self.stepping:
            note_step()

    def after_step(self, state: "State", record: dict[str, Any] | None) -> None:
        """Restart the clock for the next step."""
        before = self.began
        # The thread reads `phases` first and `began` second, so they are written the other way
        # round: it never sees that start-up is over together with the time at which it began.
        self.began = time.monotonic()
        if self.stepping:
            self.longest = max(self.longest, min(self.began - before, self.limit))
        else:
            # The first step belongs to start-up, since it may compile.
            self.stepping = True
            self.group.phases -= 1

    def _watch(self) -> None:
        """End the process when a step takes too long; runs on the watchdog's thread."""
        last = time.monotonic()
        while not self.over.wait(min(1.0, self.limit / 10)):
            now = time.monotonic()
            # On Linux the kernel ends the ranks of a killed torchrun (world.py).
            if sys.platform != "linux" and os.getppid() != self.parent:
                os._exit(1)
            # `phases` is read before the times: at its end a phase sets `resumed`, then `phases`.
            # Read the other way round, a long save could count as a step.
            limit = self.limit
            if self.group.phases:
                limit = max(limit, PHASE_LIMIT.total_seconds())
            began = max(self.began, self.group.resumed)
            # If this process was suspended, the whole job may have been: that is not a hang.
            suspended = now - last
            if suspended > SUSPENDED_SECONDS:
                began += suspended
                self.began = began
            last = now
            if now - began > limit:
                self._end(now - began)

    def _end(self, waited: float) -> None:
        """Report and end the process, whatever happens."""
        try:
            self._report(waited)
        except OSError as error:
            # The disk may be what hangs.
            self.group.say(f"error: no step was finished in time, and {error}")
        finally:
            os._exit(1)

    def _report(self, waited: float) -> None:
        """Write where this rank is; the lowest rank that does so then says who hangs."""
        rank = self.group.rank
        verdict = self.folder / "verdict.txt"
        self.folder.mkdir(exist_ok=True)
        with open_to_write(self.folder / f"stacks_rank_{rank}.txt") as file:
            faulthandler.dump_traceback(file)
        report = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "where": _position_of(self.watched),
            "collectives": _count_collectives(),
        }
        write_json(self.folder / f"rank_{rank}.json", report)
        # This asks CUDA, which may be what hangs, so it has a thread to itself.
        trace = threading.Thread(target=self._write_trace, daemon=True)
        trace.start()
        reports = self._wait_for_reports()
        trace.join(REPORTING_SECONDS)
        if rank == min(reports):
            self._blame(reports, waited, verdict)
        # The first rank that leaves ends the others, so each waits until all have reported.
        deadline = time.monotonic() + 2 * REPORTING_SECONDS
        while not verdict.exists() and time.monotonic() < deadline:
            time.sleep(0.2)

    def _wait_for_reports(self) -> dict[int, dict[str, Any]]:
        """Return the reports by rank, once all are there or time is up."""
        deadline = time.monotonic() + REPORTING_SECONDS + 2 * self.longest
        reports = self._read_reports()
        while len(reports) < self.group.size and time.monotonic() < deadline:
            time.sleep(0.2)
            reports = self._read_reports()
        return reports

    def _blame(self, reports: dict[int, dict[str, Any]], waited: float, verdict: Path) -> None:
        """Say who hangs: on the console, in status.json, then in the verdict."""
        reason = f"no step was finished for {waited:.0f} s: {blame(reports, self.group.size)}"
        lines = [reason]
        fewest_first = sorted(reports, key=lambda rank: reports[rank]["collectives"])
        for rank in fewest_first[:8]:
            report = reports[rank]
            process = f"process {report['process']} on {report['host']}"
            lines.append(f"rank {rank} ({process}) is at {report['where']}")
        lines.append(f"stacks and last collectives are in {self.folder}")
        if torch.cuda.is_available():
            lines.append(f"read the latter with `torchfrtrace --prefix {TRACE} {self.folder}`")
        text = "\n  ".join(lines)
        self.group.say(f"error: {text}")
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(self.run_dir / "status.json", {"status": "failed", "at": at, "reason": reason})
        # The verdict comes last: when the other ranks see it, they end.
        with open_to_write(verdict) as file:
            file.write(text + "\n")

    def _write_trace(self) -> None:
        """Write what the flight recorder knows of the last 2,000 collectives."""
        recorder: Any = torch._C._distributed_c10d  # pyright: ignore
        # Newer versions of torch have renamed it.
        dump = getattr(recorder, "_dump_nccl_trace", None) or recorder._dump_fr_trace
        with open_to_write(self.folder / f"{TRACE}{self.group.rank}", "wb") as file:
            file.write(dump())

    def _read_reports(self) -> dict[int, dict[str, Any]]:
        """Return the reports that there are, by rank, the lowest first."""
        reports = {}
        for path in self.folder.glob("rank_*.json"):
            with contextlib.suppress(OSError):
                rank = int(path.stem.removeprefix("rank_"))
                reports[rank] = json.loads(path.read_text("utf-8"))
        return dict(sorted(reports.items()))


def blame(reports: dict[int, dict[str, Any]], size: int) -> str:
    """Say which ranks the others wait for, by the reports of the ranks that wrote one."""
    silent = [rank for rank in range(size) if rank not in reports]
    if silent:
        return f"{_named(silent)} gave no sign of life"
    fewest = min(report["collectives"] for report in reports.values())
    behind = [rank for rank, report in reports.items() if report["collectives"] == fewest]
    if len(behind) == size:
        return "all ranks wait within the same collective"
    return f"{_named(behind)} did not enter the collective that the others are waiting in"


def _named(ranks: list[int]) -> str:
    """Return a list of ranks as text, eight at most."""
    text = ", ".join(str(rank) for rank in ranks[:8])
    if len(ranks) > 8:
        text += " ..."
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _count_collectives() -> int:
    """Return how many collectives this rank has begun, in all its process groups."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def _position_of(thread: int) -> str:
    """Return the innermost line of a thread that is not in a library."""
    innermost = sys._current_frames()[thread]
    frame = innermost
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        frame = innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(path: str) -> bool:
    """Whether a source file is of an installed package, or of Python's import system."""
    return "-packages/" in path or "<frozen" in path
