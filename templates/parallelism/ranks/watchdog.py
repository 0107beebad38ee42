"""End a run that hangs, and name the rank for which the others wait.

When a rank stops working (its process is suspended, its code loops, its machine or GPU is gone),
the other ranks wait for it in their next collective, by default for hours. So a thread on each rank
measures the time since the last step. When this time exceeds the limit, the thread

1. writes the stacks of its rank, then a report with the rank's position in the code and the number
   of collectives that the rank has started. If there is a report, the stacks are complete;
2. waits for the reports of the other ranks, until all are there or the time is up;
3. on the lowest rank with a report, writes a verdict, which names the ranks that hang. If any ranks
   have no report, it names these: they are suspended or gone, or their disk hangs. Otherwise it
   names the ranks that have started the fewest collectives: the others wait in a collective that
   these ranks did not enter;
4. waits for the verdict, then ends the process. When the first process ends, torchrun ends the
   others, so no process may end before there is a verdict.

The ranks communicate through files in the run directory, since a collective would hang, too.

The limit is `--parallel.timeout-minutes`. For the start-up, a save, and each batch of a validation,
the limit is at least PHASE_LIMIT. The start-up includes the first step, which may compile.
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

# The prefix of the files with the last collectives of each rank.
TRACE = "collectives_rank_"
# A rank waits for reports for this many seconds plus twice its longest step, since another rank may
# be a step behind.
REPORTING_SECONDS = 10.0
# If the watchdog's thread did not run for this many seconds, the process was suspended.
SUSPENDED_SECONDS = 5.0


def monitors(state: "State", run_dir: Path, group: Group) -> tuple[list[Any], list[Any]]:
    """Return the callbacks to call before the journal, and those to call after it (none)."""
    before: list[Any] = []
    after: list[Any] = []
    if state.world.distributed:
        before.append(Watchdog(run_dir, group))
    return before, after


class Watchdog:
    """Callback that ends the run with an explanation when a step takes too long on this rank."""

    def __init__(self, run_dir: Path, group: Group) -> None:
        self.run_dir = run_dir
        self.group = group
        self.limit = group.step_limit.total_seconds()
        # The start of the current step (time.monotonic()).
        self.began = time.monotonic()
        # The longest step so far, in seconds.
        self.longest = 0.0
        # Whether the first step is done.
        self.stepping = False
        # Set at the end of the run.
        self.over = threading.Event()
        # The thread that trains, and the process that started this one (torchrun).
        self.watched = threading.get_ident()
        self.parent = os.getppid()

    def __enter__(self) -> "Watchdog":
        """Start the thread."""
        # All ranks report to one folder, so its name comes from rank 0.
        stamp = self.group.broadcast(time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
        self.folder = self.run_dir / f"hang-{stamp}"
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()

    def before_step(self, state: "State") -> None:
        """Note for errors.py that the previous step and its callbacks are done."""
        if self.stepping:
            note_step()

    def after_step(self, state: "State", record: dict[str, Any] | None) -> None:
        """Restart the clock for the next step."""
        previous = self.began
        # The thread reads `phases` before `began`, so write `began` before `end_start_up` changes
        # `phases`. Otherwise the thread could take the whole start-up for a step.
        self.began = time.monotonic()
        if self.stepping:
            # The time since the last step may include a save or a validation, so count at most the
            # limit of a step.
            seconds = min(self.began - previous, self.limit)
            self.longest = max(self.longest, seconds)
        else:
            # The first step belongs to start-up, since it may compile.
            self.stepping = True
            self.group.end_start_up()

    def _watch(self) -> None:
        """End the process when a step takes too long; runs on the watchdog's thread."""
        last_awake = time.monotonic()
        while not self.over.wait(min(1.0, self.limit / 10)):
            now = time.monotonic()
            # The parent changes when torchrun is killed. Then this rank must end, too. On Linux the
            # kernel does that (world.py).
            if sys.platform != "linux" and os.getppid() != self.parent:
                os._exit(1)
            # At the end of a phase, the training thread sets `resumed`, and then changes `phases`.
            # So read `phases` first. If `resumed` were read first, it could be the old time, from
            # before a long phase, while `phases` already asks for the short limit.
            limit = self.limit
            if self.group.phases:
                limit = max(limit, PHASE_LIMIT.total_seconds())
            # Each exchange restarts the clock. There is one before each batch of a validation, so a
            # whole validation may take hours.
            began = max(self.began, self.group.resumed, self.group.exchanged)
            # If this process was suspended, perhaps the whole job was. That is not a hang, so the
            # time of the suspension does not count.
            asleep = now - last_awake
            if asleep > SUSPENDED_SECONDS:
                began += asleep
                # The next rounds of this loop must not count it either.
                self.began = began
            last_awake = now
            waited = now - began
            # If only this rank is inside a phase, it has a longer limit than the others. They wait
            # for this rank, give up first, and create the folder. Then this rank reports as well,
            # to show that it is not suspended.
            others_gave_up = waited > self.limit and self.folder.exists()
            if waited > limit or others_gave_up:
                self._end(waited)

    def _end(self, waited: float) -> None:
        """Report, and end the process even if the report fails."""
        try:
            self._report(waited)
        except Exception as error:
            # For example, the disk may be what hangs.
            reason = f"{type(error).__name__}: {error}"
            self.group.say(f"error: no step finished in time; the report failed: {reason}")
        finally:
            os._exit(1)

    def _report(self, waited: float) -> None:
        """Write this rank's report; on the lowest rank with a report, also the verdict."""
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
        # `_write_trace` calls CUDA, which may hang as well, so it runs in a separate thread.
        trace = threading.Thread(target=self._write_trace, daemon=True)
        trace.start()
        reports = self._wait_for_reports()
        trace.join(REPORTING_SECONDS)
        if rank == min(reports):
            self._blame(reports, waited, verdict)
        # When the first rank exits, torchrun ends the others, so wait for the verdict.
        deadline = time.monotonic() + 2 * REPORTING_SECONDS
        while not verdict.exists() and time.monotonic() < deadline:
            time.sleep(0.2)

    def _wait_for_reports(self) -> dict[int, dict[str, Any]]:
        """Return the reports by rank, once all are there or the time is up."""
        deadline = time.monotonic() + REPORTING_SECONDS + 2 * self.longest
        reports = self._read_reports()
        while len(reports) < self.group.size and time.monotonic() < deadline:
            time.sleep(0.2)
            reports = self._read_reports()
        return reports

    def _blame(self, reports: dict[int, dict[str, Any]], waited: float, verdict: Path) -> None:
        """Name the ranks that hang: on the console, in status.json, and last in `verdict`."""
        reason = f"no step finished for {waited:.0f} s: {blame(reports, self.group.size)}"
        lines = [reason]
        fewest_first = sorted(reports, key=lambda rank: reports[rank]["collectives"])
        for rank in fewest_first[:8]:
            report = reports[rank]
            process = f"process {report['process']} on {report['host']}"
            lines.append(f"rank {rank} ({process}) is at {report['where']}")
        lines.append(f"stacks and last collectives are in {self.folder}")
        if torch.cuda.is_available():
            lines.append(f"show the collectives: `torchfrtrace --prefix {TRACE} {self.folder}`")
        text = "\n  ".join(lines)
        self.group.say(f"error: {text}")
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(self.run_dir / "status.json", {"status": "failed", "at": at, "reason": reason})
        # Write the verdict last, since the other ranks exit when they see it.
        with open_to_write(verdict) as file:
            file.write(text + "\n")

    def _write_trace(self) -> None:
        """Write this rank's last collectives, which torch's flight recorder has kept (world.py)."""
        recorder: Any = torch._C._distributed_c10d  # pyright: ignore
        # Some builds of torch have only the second function.
        dump = getattr(recorder, "_dump_nccl_trace", None) or recorder._dump_fr_trace
        with open_to_write(self.folder / f"{TRACE}{self.group.rank}", "wb") as file:
            file.write(dump())

    def _read_reports(self) -> dict[int, dict[str, Any]]:
        """Return the reports written so far, by rank, in ascending order."""
        reports = {}
        for path in self.folder.glob("rank_*.json"):
            with contextlib.suppress(OSError):
                rank = int(path.stem.removeprefix("rank_"))
                reports[rank] = json.loads(path.read_text("utf-8"))
        return dict(sorted(reports.items()))


def blame(reports: dict[int, dict[str, Any]], size: int) -> str:
    """Describe which ranks the others wait for, according to the reports."""
    silent = [rank for rank in range(size) if rank not in reports]
    if silent:
        return f"{_named(silent)} did not respond"
    fewest = min(report["collectives"] for report in reports.values())
    behind = [rank for rank, report in reports.items() if report["collectives"] == fewest]
    if len(behind) == size:
        return (
            "no rank is behind the others: see where each of them is. If it is no hang, raise "
            "--parallel.timeout-minutes"
        )
    return f"{_named(behind)} did not enter the collective that the others are waiting in"


def _named(ranks: list[int]) -> str:
    """Format a list of ranks, as in "ranks 1, 5"; only the first eight are named."""
    text = ", ".join(str(rank) for rank in ranks[:8])
    if len(ranks) > 8:
        text += " ..."
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _count_collectives() -> int:
    """Return the number of collectives that this rank has started, in all its process groups."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def _position_of(thread: int) -> str:
    """Return the innermost line of a thread's stack outside libraries, if there is one."""
    innermost = sys._current_frames()[thread]
    frame = innermost
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        frame = innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(path: str) -> bool:
    """Return whether a source file is in an installed package or in Python's import system."""
    # Packages are installed in site-packages or dist-packages.
    return "-packages/" in path or "<frozen" in path
