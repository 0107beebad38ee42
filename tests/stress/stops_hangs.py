"""Ranks that hang, and what only looks like it: a part of tests.stress.stops."""

import contextlib
import os
import re
import signal
import time
from typing import Any

from .common import Findings
from .jobs import Render, started, who_listens

NAMED = "a rank that hangs is named, and the job ends within the timeout"
PATIENT = "long operations outside of steps and suspended jobs are not reported as hangs"
LIMIT = 5.0  # seconds that a step may take
REPORTING = 10.0  # seconds in which ranks then report (distributed/watchdog.py)
KILLING = 30.0  # seconds after which torchrun kills what does not react to SIGTERM
SLOWEST = "longest delay beyond the limit until a hanging rank was named, seconds"


def hang(findings: Findings, render: Render, moment: str, rank: int, loops: bool) -> None:
    """A rank that loops in its own code, or is stopped by a signal, is named."""
    run, how = f"hang-{moment}-{rank}-{loops}", "loops" if loops else "is stopped"
    case = f"rank {rank} {how} during {moment}, {render.package}"
    mark = render.folder / f"mark-{run}"
    faults: dict[str, Any] = {"at": moment, "mark": str(mark), "rank": rank}
    faults |= {"step": 4 if moment == "step" else 0, "seconds": 0 if loops else 0.3}
    # What is not a step has a longer limit, but not so long as to be waited for here.
    limit = LIMIT if moment == "step" else 2 * LIMIT
    faults |= {"patience": limit if moment != "step" else 1800}
    options = ("--parallel.timeout-minutes", str(LIMIT / 60), "--train.validate-every", "5")
    with started(render, 2, run, *options, faults=faults, MAX_RESTARTS="0") as job:
        job.wait_for(mark.exists)
        everyone, victim = job.everyone(), job.ranks()[rank]
        who_listens(findings, everyone, case)
        if not loops:
            os.kill(victim, signal.SIGSTOP)
        seconds = job.end(limit + 2 * LIMIT + 3 * REPORTING + KILLING + 20)
        reason = render.status(run).get("reason", "")
        problem = judge(rank, seconds, job.process.returncode, reason, job.output)
        if not problem and job.survivors():
            problem = "some of its processes live on"
    findings.tally(NAMED, "hangs").count(problem and f"{case}: {problem}\n{job.output[-3000:]}")
    if waited := re.search(r"for (\d+) s:", reason):
        over = int(waited[1]) - limit
        findings.figures[SLOWEST] = max(findings.figures.get(SLOWEST, 0.0), over)


def judge(
    rank: int, seconds: float | None, code: int | None, reason: str, output: str
) -> str | None:
    """What is wrong with how a job of two ranks ended of which one hung, if anything."""
    if seconds is None:
        return "still there"
    if f"rank {rank} " not in reason or f"rank {1 - rank} " in reason:
        return f"not named: {reason!r}"
    if reason not in output or not code:
        return f"not told, or told as a success: exit code {code}"
    return None


def patient(findings: Findings, render: Render, moment: str) -> None:
    """A start, a validation or a save that takes longer than a step may is waited for."""
    tally = findings.tally(PATIENT, "jobs")
    run = f"patient-{moment}"
    mark = render.folder / f"mark-{run}"
    faults = {"at": moment, "mark": str(mark), "seconds": 2 * LIMIT, "once": True}
    options = ("--parallel.timeout-minutes", str(LIMIT / 60), "--train.validate-every", "50")
    with started(render, 2, run, *options, faults=faults, MAX_RESTARTS="0") as job:
        job.end(200)
        ended = mark.exists() and job.process.returncode == 0
        tally.count(None if ended else f"{moment} of {render.package}: {job.output[-3000:]}")


def suspend(findings: Findings, render: Render) -> None:
    """A job that is suspended as a whole, for longer than a step may take, goes on."""
    tally = findings.tally(PATIENT, "jobs")
    mark = render.folder / "mark-suspended"
    faults = {"at": "step", "mark": str(mark), "step": 4, "seconds": 0.05}
    options = ("--parallel.timeout-minutes", str(LIMIT / 60))
    with started(render, 2, "suspended", *options, faults=faults, MAX_RESTARTS="0") as job:
        job.wait_for(mark.exists)
        everyone = job.everyone()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in everyone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(2 * LIMIT * (number == signal.SIGSTOP))
        job.end(200)
        tally.count(job.output[-3000:] if job.process.returncode else None)
