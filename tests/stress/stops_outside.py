"""What befalls a run beside its loop: its console, hangups, its loader workers.

A part of tests.stress.stops.
"""

import contextlib
import os
import signal
import time

from .common import Findings
from .jobs import Job, Render, started

ALONE = "a run survives a closed terminal (with nohup) or pipe, and its log is complete"
WORKERS = "a loader worker that hangs, dies or cannot send a batch ends its own run, and no other"
KINDS = ("hangs", "dies", "cannot be sent")
STEPS = 12
GRACE = 90.0  # seconds: a batch is waited for 20 after a stop signal
OPTIONS = ("--checkpoint.every", "3", "--train.steps", str(STEPS), "--train.log-every", "1")
OPTIONS += ("--train.validate-every", "0", "--no-track")


def attempt(findings: Findings, render: Render, ranks: int) -> None:
    """Everything, on a plain process (0) or several; with `bounded` one of each."""
    with started(render, ranks, f"whole-{ranks}", *OPTIONS) as job:
        job.end(200)
    for kind in ("console", "nohup")[: 1 if findings.bounded else None]:
        for step in (1,) if findings.bounded else (0, 4, STEPS - 1):
            go_on(findings, render, ranks, kind, step)
    for rank in range(max(1, ranks)):
        for kind in KINDS[: 1 if findings.bounded else None]:
            fail(findings, render, ranks, rank, kind)


def go_on(findings: Findings, render: Render, ranks: int, kind: str, step: int) -> None:
    """Close the console, or send a hangup to all of a run under nohup, after so many steps."""
    run = f"{kind}-{step}-{ranks}"
    lines, (ours, theirs) = render.run_dir(run) / "metrics.jsonl", os.pipe()
    mark = render.folder / f"mark-{run}"
    faults = {"at": "step", "mark": str(mark), "step": step, "seconds": 0.3, "once": True}
    console = theirs if kind == "console" else None
    with started(
        render, ranks, run, *OPTIONS, faults=faults, console=console, nohup=kind == "nohup"
    ) as job:
        os.close(theirs)
        job.wait_for(mark.exists)
        os.close(ours)
        for pid in job.everyone() if kind == "nohup" else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)
        seconds = job.end(200)
        problem = None if seconds else "still there"
        if seconds and job.process.returncode:
            problem = f"exit code {job.process.returncode}"
        log = (render.run_dir(run) / "logs/train.log").read_text("utf-8")
        shown = sum(f" step {step}/{STEPS} " in log for step in range(1, STEPS + 1))
        if not problem and (shown, lines.read_bytes().count(b"\n")) != (STEPS, STEPS):
            problem = f"{shown} steps in its log"
        problem = problem or ended_otherwise(render, run, ranks)
    findings.tally(ALONE, "runs").count(problem and f"{run}: {problem}\n{job.output[-3000:]}")


def fail(findings: Findings, render: Render, ranks: int, rank: int, kind: str) -> None:
    """Let a loader worker of a rank fail, a stop signal reach a run whose worker hangs; restart."""
    run, case = f"{kind.split()[0]}-{rank}-{ranks}", f"worker of rank {rank} of {ranks} {kind}"
    mark = render.folder / f"mark-{run}"
    faults = {"worker": kind, "rank": rank, "mark": str(mark), "step": 7}
    options = (*OPTIONS, "--train.loader-workers", "1")
    with started(render, ranks, run, *options, faults=faults, MAX_RESTARTS="0") as job:
        job.wait_for(mark.exists)
        if kind == "hangs":
            time.sleep(1.0)  # the batches before it are trained on
            for pid in job.everyone():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        job.everyone()
        seconds = job.end(GRACE)
        problem = judged(job, seconds, kind, render.status(run)["status"])
    if not problem:
        with started(render, ranks, run, *options) as again:
            again.end(200)
        problem = ended_otherwise(render, run, ranks)
    findings.tally(WORKERS, "runs").count(problem and f"{case}: {problem}\n{job.output[-3000:]}")


def judged(job: Job, seconds: float | None, kind: str, status: str | None) -> str | None:
    """What is wrong with the end of a run whose worker failed."""
    if seconds is None:
        return "still there"
    if left := job.survivors():
        return f"{len(left)} processes live on"
    if not job.process.returncode:
        return "told as a success"
    if kind == "hangs":
        return None if status == "preempted" or job.count else f"status {status}"
    told = {"dies": "killed by signal: Killed", "cannot be sent": "error: a loader worker cannot"}
    return None if told[kind] in job.output else "not told"


def ended_otherwise(render: Render, run: str, ranks: int) -> str | None:
    """How a run's end differs from an undisturbed one's."""
    found, wanted = (render.checkpoint(name) for name in (run, f"whole-{ranks}"))
    right = found == wanted and found[0] == STEPS and not found[2]
    return None if right else f"it ended at {found}, wanted {wanted}"
