"""Stops: preemption, hangs, numbers that go wrong, two runs in one directory, who listens.

Usage: python -m tests.stress.stops [--bounded]
"""

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import stops_bad_steps as numbers
from . import stops_hangs as hangs
from . import stops_outside as outside
from .common import Findings, run_topic
from .jobs import LOOPBACK, Job, Render, descendants, started, who_listens

KEPT = "a stopped run has saved its last step, and says so"
ENDED = "a stop ends within the grace period, with its exit code, and leaves no process"
EXACT = "a stopped and restarted run ends with the bits of an uninterrupted one"
REFUSED = "a second run in a directory is refused, and changes nothing"
FREE = "a dead run and its files do not block the next one"
APART = "ranks that do not share the run directory are refused before a step"
SLOWEST = "longest stop, from the first signal to the end of the last process, seconds"
GRACE = 120.0  # seconds in which a stop has to be over: what launch.sh gives
COMPILING = 400.0  # seconds for one that comes while a step is compiled, which is waited for
MOMENTS = ("start-up", "step", "save", "validation")
Number = signal.Signals
HOW = ((Number.SIGTERM, 2), (Number.SIGUSR1, 1), (Number.SIGHUP, 1))
Case = tuple[str, str, signal.Signals, int]  # when, to whom, which signal, how often


def attempt(findings: Findings) -> None:
    """Everything, or with `bounded` one of each that takes no more than one machine's patience."""
    torch.set_num_threads(1)  # as the processes have it, or the bits would not be the same
    single = Render(findings.folder / "single", "stops_single", parallelism="single")
    ddp = Render(findings.folder / "ddp", "stops_ddp", parallelism="ddp")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else the runs would be as under nohup
    units = {KEPT: "stops", ENDED: "stops", EXACT: "runs", hangs.NAMED: "hangs"}
    units |= {LOOPBACK: "sockets", outside.ALONE: "runs", outside.WORKERS: "runs"}
    more = {hangs.PATIENT: "jobs", numbers.TOGETHER: "jobs", APART: "jobs"}
    for promise, unit in (units if findings.bounded else units | more).items():
        findings.tally(promise, unit)
    if findings.bounded:
        numbers.attempt(findings, single)
        two_runs(findings, single)
        preempt(findings, single, 0, [("validation", "everyone", Number.SIGTERM, 2)])
        hangs.hang(findings, ddp, "step", 1, loops=True)
        outside.attempt(findings, single, 0)
        return
    saved = {"parallelism": "fsdp", "checkpoint": "torch_save"}
    fsdp = Render(findings.folder / "fsdp", "stops_fsdp", **saved)
    # Jobs wait most of the time. What runs in this process, in this thread, has it for itself.
    with ThreadPoolExecutor(3) as side_by_side:
        jobs = [side_by_side.submit(job, findings) for job in _jobs(ddp, fsdp)]
        numbers.attempt(findings, single)
        two_runs(findings, single)
        preempt(findings, single, 0, [(m, "everyone", *how) for m in MOMENTS for how in HOW])
        outside.attempt(findings, single, 0)
        for job in jobs:
            job.result()
    compiling(findings, single, 0)
    compiling(findings, ddp, 2)


def _jobs(ddp: Render, fsdp: Render) -> list[Any]:
    targets = ("launcher", "one rank", "everyone")
    pairs = [(moment, target) for moment in MOMENTS for target in targets]
    cases = [(*pair, *HOW[(at + at // 3) % 3]) for at, pair in enumerate(pairs)]
    jobs = [partial(preempt, render=ddp, ranks=2, cases=cases)]
    whole = [(moment, "launcher", Number.SIGTERM, 2) for moment in MOMENTS]
    jobs.append(partial(preempt, render=fsdp, ranks=2, cases=whole))
    kinds = [(ddp, "step", False), (ddp, "step", True), (fsdp, "save", True)]
    kinds += [(ddp, "start-up", True), (ddp, "validation", True)]
    for rank in (0, 1):
        for render, moment, loops in kinds:
            how = {"render": render, "moment": moment, "rank": rank, "loops": loops}
            jobs.append(partial(hangs.hang, **how))
    for moment in MOMENTS:
        jobs.append(partial(hangs.patient, render=ddp, moment=moment))
    jobs.append(partial(hangs.suspend, render=ddp))
    jobs.append(partial(outside.attempt, render=ddp, ranks=2))
    jobs.append(partial(numbers.on_ranks, renders=[ddp, fsdp]))
    return [*jobs, partial(other_machine, render=ddp)]


def preempt(
    findings: Findings, render: Render, ranks: int, cases: list[Case], **sabotage: Any
) -> None:
    """Stop one run again and again, let it go on each time, and compare its end."""
    steps = 20 + 6 * len(cases)
    options = ("--checkpoint.every", "7", "--train.validate-every", "5")
    options += ("--train.validate-samples", "0", "--train.steps", str(steps))
    for at, (moment, *how) in enumerate(cases):
        mark = render.folder / f"mark-{at}"
        before, _, _ = render.checkpoint("stopped")
        first = before + 3 if moment == "step" else 0
        faults = {"at": moment, "mark": str(mark), "step": first} | sabotage
        workers = ("--train.loader-workers", str(at % 2))
        with started(render, ranks, "stopped", *options, *workers, faults=faults) as job:
            job.wait_for(mark.exists)
            _stop(findings, render, job, moment, *how, mark)
            case = f"{how} of {ranks} during {moment}, {render.package}"
            problem = _kept(render, "stopped", before, moment, job.output)
            findings.tally(KEPT, "stops").count(problem and f"{case}: {problem}")
    for run in ("stopped", "undisturbed"):
        if not ranks:
            numbers.run_here(render, run, None, *options)
            continue
        with started(render, ranks, run, *options) as job:
            job.end(200)
    ends = [render.checkpoint(run) for run in ("stopped", "undisturbed")]
    right = ends[0] == ends[1] and ends[0][0] == steps and not ends[0][2]
    problem = None if right else f"{render.package} after {len(cases)} stops: {ends}"
    findings.tally(EXACT, "runs").count(problem)


def compiling(findings: Findings, render: Render, ranks: int) -> None:
    """Stop a run while it compiles its first step, compilers included."""
    cold = render.folder / "inductor"
    place = {"TORCHINDUCTOR_CACHE_DIR": str(cold), "GRACE_SECONDS": f"{COMPILING:.0f}"}
    with started(render, ranks, "compiled", "--compile.mode", "blocks", **place) as job:
        job.wait_for(lambda: any(map(_compiles, descendants(job.process.pid))))
        _stop(findings, render, job, "compile", "everyone", Number.SIGTERM, 2, cold)
        problem = _kept(render, "compiled", 0, "compile", job.output)
        findings.tally(KEPT, "stops").count(problem and f"compiling, {render.package}: {problem}")


def _compiles(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text("utf-8").strip() == "cc1plus"
    return False


def _stop(
    findings: Findings,
    render: Render,
    job: Job,
    moment: str,
    target: str,
    number: Number,
    times: int,
    mark: Path,
) -> None:
    """Signal those that are meant, so many times, and count how it ends."""
    case = f"{number.name} {times}x to {target} of {job.count} during {moment}, {render.package}"
    everyone = job.everyone()
    if job.count:
        who_listens(findings, everyone, case)
    chosen = {"launcher": [job.process.pid], "one rank": job.ranks()[-1:]}
    for again in range(times):
        for pid in chosen.get(target, everyone):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.05 * (again < times - 1))
    if target != "launcher":  # which takes its time to hand it on
        time.sleep(0.3)
        mark.with_suffix(".go").touch()
    grace, kind = (COMPILING, "during a compilation: ") if moment == "compile" else (GRACE, "")
    seconds = job.end(grace)
    problem = _ending(job, seconds, target, number)
    findings.tally(ENDED, "stops").count(problem and f"{case}: {problem}\n{job.output[-3000:]}")
    slowest = float(findings.figures.get(kind + SLOWEST, 0.0))
    findings.figures[kind + SLOWEST] = max(slowest, round(seconds or grace, 1))


def _ending(job: Job, seconds: float | None, target: str, number: Number) -> str | None:
    if seconds is None:
        return "still there"
    wanted = 128 + number if job.count and target != "one rank" else 0
    if job.process.returncode != wanted:
        return f"exit code {job.process.returncode}, not {wanted}"
    left = job.survivors()
    return f"{len(left)} processes live on" if left else None


def _kept(render: Render, run: str, before: int, moment: str, output: str) -> str | None:
    status = render.status(run)
    newest, _, problems = render.checkpoint(run)
    if status["status"] != "preempted":
        return f"status {status}\n{output[-3000:]}"
    if status["step"] != newest or problems:
        return f"stopped at {status['step']}, the newest checkpoint is {newest} {problems}"
    if moment == "start-up" and newest != before:
        return f"it trained on from {before} to {newest}"
    if moment == "step" and not before < newest <= before + 6:
        return f"it was to stop soon after step {before + 3}, but stopped at {newest}"
    if moment == "compile" and not 0 < newest <= 3:
        return f"it was to stop soon after the first step, but stopped at {newest}"
    if moment == "validation" and "validation at step" in output:
        return "the validation was not left half way"
    return None


def two_runs(findings: Findings, render: Render) -> None:
    """A second run is refused, and touches nothing; loaders of a dead one are in nobody's way."""
    refused, free = findings.tally(REFUSED, "runs"), findings.tally(FREE, "kills")
    mark = render.folder / "mark-two"
    faults = {"at": "step", "mark": str(mark), "step": 9, "seconds": 1000}
    options = ("--train.loader-workers", "1", "--no-track")  # whose thread writes when it likes
    options += ("--checkpoint.every", "5")
    with started(render, 0, "two", *options, faults=faults) as job:
        job.wait_for(mark.exists)
        saved = render.run_dir("two") / "checkpoints/step_00000005"
        job.wait_for(saved.exists)  # or what goes on behind training would touch something
        job.everyone()
        for fresh in (False, True):
            before = _tree(render.run_dir("two"))
            told = numbers.run_here(render, "two", None, fresh=fresh)
            same = _tree(render.run_dir("two")) == before
            right = same and f"is in use by process {job.process.pid}" in told
            refused.count(None if right else f"fresh {fresh}: {told}, untouched: {same}")
        job.process.kill()
        job.process.wait()
        loaders = job.alive()
        told = numbers.run_here(render, "two", None)
        good = loaders and told == "finished"
        free.count(None if good else f"{told}, with {len(loaders)} loaders of the dead run alive")


def other_machine(findings: Findings, render: Render) -> None:
    """One rank sees another disk under the run directory's path: told before the first step."""
    for rank in (0, 1):
        disk = render.folder / f"disk-{rank}"
        disk.mkdir()
        (disk / "text.txt").write_bytes((render.folder / "text.txt").read_bytes())
        faults = {"rank": rank, "own_disk": str(disk)}
        run = f"apart-{rank}"
        with started(render, 2, run, faults=faults, MAX_RESTARTS="0") as job:
            job.end(100)
            told = "does not see the files of rank 0" in job.output
            began = any(run in str(path) for path in render.folder.glob("**/metrics.jsonl"))
            right = told and job.process.returncode and not began
            problem = None if right else f"told {told}, began {began}\n{job.output[-3000:]}"
            findings.tally(APART, "jobs").count(problem)


def _tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_ino, p.read_bytes()) for p in files}


if __name__ == "__main__":
    run_topic("stops", attempt)
