"""Stops: preemption, hangs, numbers that go wrong, two runs in one directory, who listens.

Usage: python -m torture.stops [--bounded]
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from . import stops_numbers as numbers
from .common import Findings, torture
from .jobs import Job, Render, is_alive, is_loopback, listening, started

GRACE = 60.0  # seconds in which a stop has to be over; the launcher itself gives 120
LIMIT = 3.0  # seconds that a step may take, where a rank is going to hang
REPORTING = 10.0  # seconds in which ranks then report (engine/watch.py)
KILLING = 30.0  # seconds after which torchrun kills what does not react to SIGTERM
MOMENTS = ("start-up", "step", "save", "validation")
Number = signal.Signals
Case = tuple[str, str, signal.Signals, int]  # when, to whom, which signal, how often


def attempt(findings: Findings) -> None:
    """Everything, or with `bounded` one of each."""
    single = Render(findings.folder / "single", "stops_single", parallelism="single")
    ddp = Render(findings.folder / "ddp", "stops_ddp", parallelism="ddp")
    numbers.attempt(findings, single)
    two_runs(findings, single)
    if findings.bounded:
        preempt(findings, single, 0, [("validation", "everyone", Number.SIGTERM, 2)])
        hang(findings, ddp, "step", 1, loops=True)
        return
    moments, targets = MOMENTS, ("launcher", "one rank", "everyone")
    both = ((Number.SIGTERM, 2), (Number.SIGUSR1, 1))
    preempt(findings, single, 0, [(m, "everyone", *how) for m in moments for how in both])
    pairs = [(moment, target) for moment in moments for target in targets]
    preempt(findings, ddp, 2, [(*pair, *both[at % 2]) for at, pair in enumerate(pairs)])
    fsdp = Render(
        findings.folder / "fsdp", "stops_fsdp", parallelism="fsdp", checkpoint="torch_save"
    )
    preempt(findings, fsdp, 2, [(m, "launcher", Number.SIGTERM, 2) for m in moments])
    for rank in (0, 1):
        hang(findings, ddp, "step", rank, loops=False)
        hang(findings, ddp, "step", rank, loops=True)
        hang(findings, fsdp, "save", rank, loops=True)
        hang(findings, ddp, "start-up", rank, loops=True)
        hang(findings, ddp, "validation", rank, loops=True)
    suspend(findings, ddp)
    numbers.on_ranks(findings, [ddp, fsdp])
    other_machine(findings, ddp)


def preempt(findings: Findings, render: Render, ranks: int, cases: list[Case]) -> None:
    """Stop one run again and again, let it go on each time, and compare its end."""
    kept = findings.tally("a stopped run has saved its last step and says so", "stops")
    promise = "a stop is over in its grace, with its exit code, and leaves no process"
    ended = findings.tally(promise, "stops")
    exact = findings.tally("a run that was stopped ends with the bits of one that was not", "runs")
    options = ("--checkpoint.every", "7", "--train.validate-every", "5")
    options += ("--train.validate-samples", "0")
    slowest = 0.0
    for at, (moment, target, number, times) in enumerate(cases):
        case = f"{number.name} {times}x to {target} of {ranks} during {moment}, {render.package}"
        mark = render.folder / f"mark-{at}"
        before, _, _ = render.checkpoint("stopped")
        first = before + 3 if moment == "step" else 0
        drill = {"at": moment, "mark": str(mark), "seconds": 0.3, "step": first}
        workers = ("--train.loader-workers", str(at % 2))
        with started(render, ranks, "stopped", *options, *workers, drill=drill) as job:
            job.wait_for(mark.exists)
            everyone = job.everyone()
            if ranks:
                who_listens(findings, everyone, case)
            chosen = {"launcher": [job.process.pid], "one rank": job.ranks()[-1:]}
            for again in range(times):
                for pid in chosen.get(target, everyone):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(0.05 * (again < times - 1))
            seconds = job.end(GRACE)
            ended.count(_ending(job, case, seconds, ranks, target, number))
            slowest = max(slowest, seconds or GRACE)
            kept.count(_kept(render, case, before, moment, job.output))
    for run in ("stopped", "undisturbed"):
        if not ranks:
            numbers.run_here(render, run, None, *options)
            continue
        with started(render, ranks, run, *options) as job:
            job.end(200)
    ends = [render.checkpoint(run) for run in ("stopped", "undisturbed")]
    right = ends[0] == ends[1] and ends[0][0] == 60 and not ends[0][2]
    exact.count(None if right else f"{render.package} after {len(cases)} stops: {ends}")
    key = "slowest stop, from the first signal to the last process, seconds"
    findings.figures[key] = max(round(slowest, 1), float(findings.figures.get(key, 0.0)))


def _ending(
    job: Job, case: str, seconds: float | None, ranks: int, target: str, number: Number
) -> str | None:
    if seconds is None:
        return f"{case}: not over after {GRACE:.0f} s"
    wanted = 128 + number if ranks and target != "one rank" else 0
    if job.process.returncode != wanted:
        return f"{case}: exit code {job.process.returncode}, not {wanted}\n{job.output[-3000:]}"
    left = job.survivors()
    return f"{case}: {len(left)} processes live on" if left else None


def _kept(render: Render, case: str, before: int, moment: str, output: str) -> str | None:
    status = render.status("stopped")
    newest, _, problems = render.checkpoint("stopped")
    if status["status"] != "preempted":
        return f"{case}: status {status}\n{output[-3000:]}"
    if status["step"] != newest or problems:
        return f"{case}: stopped at {status['step']}, the newest checkpoint is {newest} {problems}"
    if moment == "start-up" and newest != before:
        return f"{case}: it trained on from {before} to {newest}"
    if moment == "step" and not before < newest <= before + 6:
        return f"{case}: it was to stop soon after step {before + 3}, but stopped at {newest}"
    if moment == "validation" and output.rstrip().count("validation at step"):
        return f"{case}: the validation was not left half way"
    return None


def hang(findings: Findings, render: Render, moment: str, rank: int, loops: bool) -> None:
    """A rank that loops in its own code, or is stopped by a signal, is named."""
    tally = findings.tally("a rank that hangs is named, and ends the job in time", "hangs")
    run, how = f"hang-{moment}-{rank}-{loops}", "loops" if loops else "is stopped"
    case = f"rank {rank} {how} during {moment}, {render.package}"
    mark = render.folder / f"mark-{run}"
    drill: dict[str, Any] = {"at": moment, "mark": str(mark), "rank": rank}
    drill |= {"step": 4 if moment == "step" else 0, "seconds": 0 if loops else 0.3}
    # What is not a step has a longer limit, but not so long as to be waited for here.
    drill |= {"patience": 2 * LIMIT if moment != "step" else 1800}
    options = ("--parallel.timeout-minutes", str(LIMIT / 60), "--train.validate-every", "5")
    with started(render, 2, run, *options, drill=drill, MAX_RESTARTS="0") as job:
        job.wait_for(mark.exists)
        everyone, victim = job.everyone(), job.ranks()[rank]
        who_listens(findings, everyone, case)
        if not loops:
            os.kill(victim, signal.SIGSTOP)
        seconds = job.end(3 * LIMIT + 3 * REPORTING + KILLING + 20)
        reason = render.status(run).get("reason", "")
        if seconds is None:
            tally.count(f"{case}: still there\n{job.output[-3000:]}")
        elif f"rank {rank} " not in reason or f"rank {1 - rank} " in reason:
            tally.count(f"{case}: {reason!r}\n{job.output[-3000:]}")
        elif reason not in job.output or not job.process.returncode:
            tally.count(f"{case}: not told, or told as a success\n{job.output[-3000:]}")
        else:
            tally.count(f"{case}: {len(everyone)} live on" if job.survivors() else None)


def who_listens(findings: Findings, processes: list[int], case: str) -> None:
    """Look at every socket of a job that listens."""
    tally = findings.tally("on one machine, only loopback is listened on", "sockets")
    for address in listening(processes):
        tally.count(None if is_loopback(address) else f"{address} in {case}")


def suspend(findings: Findings, render: Render) -> None:
    """A job that is suspended as a whole, for longer than a step may take, is no hang."""
    tally = findings.tally("a job that was suspended as a whole goes on", "jobs")
    mark = render.folder / "mark-suspended"
    drill = {"at": "step", "mark": str(mark), "step": 4, "seconds": 0.05}
    options = ("--parallel.timeout-minutes", str(2 * LIMIT / 60))
    with started(render, 2, "suspended", *options, drill=drill, MAX_RESTARTS="0") as job:
        job.wait_for(mark.exists)
        everyone = job.everyone()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in everyone:
                os.kill(pid, number)
            time.sleep(3 * LIMIT * (number == signal.SIGSTOP))
        job.end(200)
        tally.count(job.output[-3000:] if job.process.returncode else None)


def two_runs(findings: Findings, render: Render) -> None:
    """A second run is refused, and touches nothing; loaders of a dead one are in nobody's way."""
    refused = findings.tally("a second run in a directory is refused and touches nothing", "runs")
    free = findings.tally("a dead run, and what it left behind, holds nobody back", "kills")
    mark = render.folder / "mark-two"
    drill = {"at": "step", "mark": str(mark), "step": 9, "seconds": 1000}
    workers = ("--train.loader-workers", "1")
    with started(render, 0, "two", *workers, drill=drill) as job:
        job.wait_for(mark.exists)
        job.everyone()
        for fresh in (False, True):
            before = _tree(render.run_dir("two"))
            told = numbers.run_here(render, "two", None, fresh=fresh)
            same = _tree(render.run_dir("two")) == before
            right = same and f"is in use by process {job.process.pid}" in told
            refused.count(None if right else f"fresh {fresh}: {told}, untouched: {same}")
        job.process.kill()
        job.process.wait()
        loaders = [pid for pid in job.seen if is_alive(pid)]
        told = numbers.run_here(render, "two", None)
        good = loaders and told == "finished"
        free.count(None if good else f"{told}, with {len(loaders)} loaders of the dead run alive")


def other_machine(findings: Findings, render: Render) -> None:
    """Rank 1 sees another disk under the run directory's path: before the first step."""
    tally = findings.tally(
        "ranks that do not share the run directory are told before a step", "jobs"
    )
    for rank in (0, 1):
        disk = render.folder / f"disk-{rank}"
        disk.mkdir()
        (disk / "text.txt").write_bytes((render.folder / "text.txt").read_bytes())
        drill = {"rank": rank, "own_disk": str(disk)}
        run = f"apart-{rank}"
        with started(render, 2, run, drill=drill, MAX_RESTARTS="0") as job:
            job.end(100)
            told = "does not see what rank 0 writes" in job.output
            steps = [*render.folder.glob("**/metrics.jsonl")]
            began = any(run in str(path) for path in steps)
            right = told and job.process.returncode and not began
            tally.count(None if right else f"told {told}, began {began}\n{job.output[-3000:]}")


def _tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_ino, p.read_bytes()) for p in files}


if __name__ == "__main__":
    torture("stops", attempt)
