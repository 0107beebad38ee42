"""What happens to a run that saves, starts, stops or logs, and what is then looked at."""

import errno
import importlib
import json
import os
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import fault_injection
from .fault_injection import CHANGES, OPENS, READS, WRITES, Call
from .faulty_disks import SmallDisk
from .faulty_saves import HARMLESS, KINDS, MAKES, Fault, Saves, Variant, status
from .storm import contents

STOPS = "with on-failure stop, the run says why, and its restart ends with the same bits"
STARTS = "a start that cannot read or write says why in one line, and changes no checkpoint"
LOGS = "unwritable logs and status files do not stop a run, and leave no partial line"
SLOW = "with a slow rank or slow saves, each save is complete, and none is skipped"
SAID_SLOW = "if a save takes longer than its interval, training waits for it with a warning"
FLAT = "background saves do not leak memory or file descriptors"
LEVEL = "thousands of steps do not leak memory, threads or file descriptors"
FILLED = "a run that fills its disk says so, and resumes bit for bit once there is space"
EVERYTHING = {*OPENS, *READS, *WRITES, *CHANGES} & fault_injection.NUMBERS.keys()


def disturb(variant: Variant, troubles: list[Fault], most: int | None, hits: Counter[str]) -> None:
    """Disturb saves at each of their calls, or at so many of them."""
    rng = random.Random(variant.package)
    for trouble in troubles:
        chosen = list(range(variant.points(trouble)))
        if most is not None:
            chosen = rng.sample(chosen, min(most, len(chosen)))
        for start in range(0, len(chosen), len(variant.disturbed)):
            run = variant.run(dict(zip(variant.disturbed, chosen[start:], strict=False)), trouble)
            what = os.strerror(trouble.error) if trouble.error else "slow calls"
            hits[f"saves disturbed: {what}"] += len(run.struck)


def disturb_threads(variant: Variant, hits: Counter[str]) -> None:
    """Refuse what a checkpointer's own threads write."""
    trouble = Fault(errno.EIO, once=True, threads=True)
    points = dict(zip(variant.disturbed, range(0, 99, 3), strict=False))
    # On a busy machine the saving thread may write all files before the others begin.
    for _ in range(10):
        run = variant.run(points, trouble, None, {"checkpoint.threads": 3})
        hits["saves disturbed in a thread"] += len(run.struck & run.failed)
        if run.struck:
            break


def stop(variant: Variant, trouble: Fault, point: int) -> None:
    """Disturb a save of a run that shall stop then; start it again."""
    run_dir = variant.new()
    saves = Saves(variant.package, run_dir, variant.findings, trouble, {2: point})
    asked = {"checkpoint.on_failure": "stop"}
    code, log = variant.job(run_dir, saves, trouble.names, **asked)
    saves.over()
    told = [line for line in log.splitlines() if line.startswith("error: ")]
    problems = []
    if 2 in saves.failed:
        whole = len(told) == 1 and "checkpoint of step 2 was not saved" in told[0]
        if code != 1 or not whole or os.strerror(trouble.error) not in told[0]:
            problems.append(f"exit code {code}, said {told}: {log[-2000:]}")
        if status(run_dir) not in ("failed", "running" if not trouble.once else ""):
            problems.append(f"status {status(run_dir)}")
    elif code != 0 or told:
        problems.append(f"exit code {code} for nothing, said {told}: {log[-2000:]}")
    problems += ended(variant, run_dir, asked)
    saves.count(STOPS, "runs", problems)


def ended(variant: Variant, run_dir: Path, settings: dict[str, str] | None = None) -> list[str]:
    """Start a run again, now undisturbed; what is not as it should be at its end."""
    code, log = variant.job(run_dir, lambda call: 0, set(), **(settings or {}))
    if code or status(run_dir) != "finished":
        return [f"the restart: exit code {code}, {log[-2000:]}"]
    problems = []
    if contents(run_dir)[variant.steps] != variant.reference[variant.steps]:
        problems.append("other bits at the end")
    left = {path.name for path in run_dir.iterdir()}
    left -= {".lock", "checkpoints", "config.json", "logs"}
    left -= {"metrics.jsonl", "samples", "spec.json", "status.json"}
    left |= {p.name for p in run_dir.glob("checkpoints/*") if not p.name[5:].isdigit()}
    return problems + ([f"left over: {sorted(left)}"] if left else [])


def start(
    variant: Variant,
    base: Path,
    rank: int,
    point: int,
    once: bool,
    error: int = errno.EIO,
    calls: int = 1,
) -> bool:
    """Refuse what a start does in the run directory from one call on; False if it has ended.

    If `once`, so many calls.
    """
    run_dir = variant.new()
    shutil.copytree(base, run_dir)
    before, left, struck, started = contents(run_dir), point, False, False

    def judge(call: Call) -> int:
        nonlocal left, struck, started
        # By its first log line it has started, or tried to; what comes then is a save's trouble.
        started |= call.kind in ("create", "write") and call.path.endswith("/metrics.jsonl")
        if call.rank != rank or started or call.kind not in KINDS[error]:
            return 0
        left -= 1
        refused = -calls <= left < 0 or (left < 0 and not once)
        struck |= refused
        return error if refused else 0

    code, log = variant.job(run_dir, judge, EVERYTHING)
    if not struck:
        return False
    # In a real launch the first rank's error ends the others before they say theirs.
    told = [it for it in log.splitlines() if "error: " in it and not it.startswith("[rank ")]
    reason = os.strerror(error), str(run_dir)
    problems = [] if code is not None else [f"it hung: {log[-2000:]}"]
    if code and error in HARMLESS:
        problems.append(f"it ended for nothing: {told}")
    if code and (len(told) != 1 or not all(words in told[0] for words in reason)):
        problems.append(f"exit code {code}, said {told}: {log[-2000:]}")
    if code and contents(run_dir) != before:
        problems.append(f"checkpoints are {sorted(contents(run_dir))}, were {sorted(before)}")
    if aside := [path.name for path in run_dir.glob("checkpoints/*.damaged-*")]:
        problems.append(f"set aside: {aside}")
    problems += ended(variant, run_dir) if code else []
    place = f"{variant.package}, rank {rank} of {variant.ranks}, call {point}, once {once}, {error}"
    problem = f"{place}: {'; '.join(problems)}" if problems else None
    variant.findings.tally(STARTS, "starts").count(problem)
    return True


def log_lines(variant: Variant, first: int, last: int) -> None:
    """Refuse what goes into the log and the status, from one line to another."""
    run_dir, lines = variant.new(), 0

    def judge(call: Call) -> int:
        nonlocal lines
        if call.name == "write" and call.path.endswith("/metrics.jsonl"):
            lines += 1
            return errno.ENOSPC if first <= lines < last else 0
        return errno.ENOSPC if ".status.json" in call.path and first <= lines < last else 0

    code, log = variant.job(run_dir, judge, {"write", *OPENS})
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    whole = [record["step"] if isinstance(record, dict) else record for record in records]
    wanted = list(range(1, first if last > variant.steps else variant.steps + 1))
    told = [line for line in log.splitlines() if "No space left" in line]
    said = ["WARNING: metrics.jsonl cannot be written"]
    if last > variant.steps:
        said.append("WARNING: status.json cannot be written")
    good = code == 0 and whole == wanted and "Traceback" not in log
    good &= len(told) == len(said) and all(
        t.startswith(s) for t, s in zip(told, said, strict=False)
    )
    problem = None if good else f"{variant.package}, {first}, {last}: {code} {whole} {log[-2000:]}"
    variant.findings.tally(LOGS, "runs").count(problem)


def slow(variant: Variant, seconds: float, hits: Counter[str]) -> None:
    """Make the saves of the last rank slow, and its steps."""
    run_dir = variant.new()
    slowest, waits = max(0, variant.ranks - 1), run_dir.with_suffix(".waits")

    def hook() -> None:
        training = importlib.import_module(f"{variant.package}.train")
        ours = importlib.import_module(f"{variant.package}.checkpoint.publish").Publisher
        step, publish = training.train_step, ours.publish

        def linger(self: Any, number: int, write: Callable[[Path], Any], facts: Any) -> Any:
            return publish(self, number, lambda at: (time.sleep(seconds), write(at))[1], facts)

        state = importlib.import_module(f"{variant.package}.checkpoint.checkpointer")
        settle, save, waited = state.Writer.settle, state.Writer.begin, [0.0]

        def measure(self: Any) -> None:
            started = time.perf_counter()
            settle(self)
            waited[0] = time.perf_counter() - started

        def note(self: Any, *arguments: Any) -> None:
            if os.environ.get("RANK", "0") == "0":  # the save before has been waited for
                with waits.open("a") as file:
                    file.write(f"{waited[0]}\n")
            save(self, *arguments)

        state.Writer.settle, state.Writer.begin = measure, note
        if os.environ.get("RANK", "0") == str(slowest):
            if seconds < 1:
                training.train_step = lambda *a: (time.sleep(0.02), step(*a))[1]
            ours.publish = linger

    every = variant.steps // 2
    settings = {"checkpoint.every": every, "checkpoint.keep": variant.steps}
    code, log = variant.job(run_dir, lambda call: 0, set(), hook, **settings)
    there = contents(run_dir)
    checkpoints = importlib.import_module(f"{variant.package}.checkpoint.publish")
    problems = [f"{code}: {log[-2000:]}"] if code != 0 else []
    problems += [
        t
        for path in checkpoints.published(run_dir / "checkpoints")
        for t in checkpoints.verify(path)[1]
    ]
    if sorted(there) != [every, 2 * every]:
        problems.append(f"saved {sorted(there)}")
    elif there[2 * every] != variant.reference[2 * every]:
        problems.append("other bits at the end")
    place = f"{variant.package}, {variant.ranks} ranks, {seconds} s"
    problem = f"{place}: {'; '.join(problems)}" if problems else None
    variant.findings.tally(SLOW, "runs").count(problem)
    if variant.package.endswith("async"):
        said = log.count("for the previous save: raise --checkpoint.every")
        waited = [float(line) for line in waits.read_text().splitlines()] if waits.exists() else []
        long = max(waited, default=0.0) > 1  # on a busy machine its steps may be longer than that
        problem = f"{place}: said {said} times, waited {waited}: {log[-2000:]}"
        problem = None if said == long else problem
        variant.findings.tally(SAID_SLOW, "runs").count(problem)


def memory(variant: Variant, saves: int, width: int, hits: Counter[str]) -> None:
    """Watch a process over many saves in the background."""
    run_dir = variant.new()
    watch = Saves(variant.package, run_dir, variant.findings)
    settings = {"train.steps": saves, "model.width": width, "train.global_batch_size": 1}
    code, log = variant.job(run_dir, watch, MAKES & fault_injection.NUMBERS.keys(), **settings)
    size = sum(path.stat().st_size for path in max(run_dir.glob("checkpoints/step_*")).iterdir())
    quarter = saves // 4
    first, last = watch.held[quarter : 2 * quarter], watch.held[-quarter:]
    grown = statistics.median(b for _, b in last) - statistics.median(b for _, b in first)
    handles = statistics.median(n for n, _ in last) - statistics.median(n for n, _ in first)
    # The two windows are half of the saves apart: what leaked with each would be many times a
    # checkpoint. The allocator alone may keep a part of one.
    good = code == 0 and len(watch.held) == saves and grown < size and handles <= 0
    text = (
        f"{grown / 1e6:.1f} MB, {handles} descriptors more, {size / 1e6:.0f} MB each, {log[-500:]}"
    )
    variant.findings.tally(FLAT, "saves").tried += saves - 1
    variant.findings.tally(FLAT, "saves").count(None if good else text)
    hits["growth of memory over the second half of the saves, bytes"] = max(0, int(grown))
    hits["size of each of these checkpoints, bytes"] = size


def long(variant: Variant, steps: int, hits: Counter[str]) -> None:
    """Look at the processes of a run again and again over many steps."""
    run_dir, every = variant.new(), steps // 100
    held = run_dir.with_suffix(".held")

    def hook() -> None:
        training = importlib.import_module(f"{variant.package}.train")
        step = training.train_step

        def watched(state: Any, batches: Any) -> None:
            step(state, batches)
            if state.step % every == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                figures = [pages * os.sysconf("SC_PAGE_SIZE"), *map(count, ("task", "fd"))]
                with held.with_suffix(f".{state.world.rank}").open("a") as file:
                    file.write(f"{json.dumps(figures)}\n")

        training.train_step = watched

    count = lambda kind: len(os.listdir(f"/proc/self/{kind}"))  # noqa: E731
    more = {"train.steps": steps, "train.global_batch_size": 4, "model.width": 16}
    more |= {"checkpoint.every": max(every, 50), "train.validate_every": 10 * every}
    code, log = variant.job(run_dir, lambda call: 0, set(), hook, **more)
    problems = [] if code == 0 else [f"{code}: {log[-2000:]}"]
    for rank in range(max(1, variant.ranks)) if code == 0 else ():
        lines = [json.loads(it) for it in held.with_suffix(f".{rank}").read_text().splitlines()]
        parts = lines[25:50], lines[75:]
        for at, (kind, most) in enumerate((("bytes", 4 << 20), ("threads", 0), ("descriptors", 0))):
            before, after = (statistics.median(it[at] for it in part) for part in parts)
            if after - before > most:
                problems.append(f"rank {rank}: {kind} {before} and then {after}")
            name = f"{kind} gained over the second half of the steps"
            hits[name] = max(hits[name], int(after - before))
    place = f"{variant.package}, {variant.ranks} ranks"
    variant.findings.tally(LEVEL, "steps").tried += steps - 1
    problem = f"{place}: {'; '.join(problems)}" if problems else None
    variant.findings.tally(LEVEL, "steps").count(problem)


def fills_up(variant: Variant, megabytes: int, hits: Counter[str]) -> None:
    """Let a run fill a small disk with its checkpoints, and go on once there is more room."""
    disk = SmallDisk(folder=variant.folder / f"small-{variant.runs}", megabytes=megabytes)
    run_dir = variant.new(disk.place)
    asked = {"checkpoint.on_failure": "stop", "checkpoint.keep": 10**6}
    code, log = variant.job(run_dir, lambda call: 0, set(), **asked)
    there = contents(run_dir)
    problems = [] if code == 1 and there else [f"exit code {code}, {sorted(there)}: {log[-2000:]}"]
    told = [line for line in log.splitlines() if line.startswith("error: ")]
    if len(told) != 1 or os.strerror(errno.ENOSPC) not in told[0] or "Traceback" in log:
        problems.append(f"said {told}")
    checkpoints = importlib.import_module(f"{variant.package}.checkpoint.publish")
    for path in checkpoints.published(run_dir / "checkpoints"):
        problems += checkpoints.verify(path)[1]
    disk.end()
    problems += ended(variant, run_dir)
    hits["checkpoints saved on small disks before they were full"] += len(there)
    problem = f"{variant.package}, {megabytes} MB: {'; '.join(problems)}" if problems else None
    variant.findings.tally(FILLED, "disks").count(problem)
