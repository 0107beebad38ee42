"""What happens to a run that has its checkpoints in a store, and what is then looked at."""

import dataclasses
import importlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from .common import Findings
from .forked_jobs import Job, Plan
from .store_server import Server
from .storm import Contents, Storm, losses

PASSES = ("500", "503", "cut", "lost", "short", "late", "hang")
LIES = ("403", "404", "200")
PASSED = "a request that fails or stalls once costs neither the run nor a save"
ENDED = "whatever the store refuses or misreports, the run or its restart ends with the same bits"
THERE = "after any failure, all files that a manifest in the store lists are complete"
SAID = "a run that ends because of the store says why in one line"
TIDY = "a run that ended normally leaves no unfinished files in the store"
DROPPED = "the next start removes partial uploads of a killed run"
IN_TIME = "if a store does not answer, the run ends in time, and a stop does not wait for it"
ONE = "of two runs with one address, one finishes, and the other says that it was replaced"
STEPS, LIMIT, GRACE = 16, 3.0, 3.0
HANGS = {"a start": "owner.json", "a read": "GET .*/step_", "a save": "PUT .*step_00000012"}


def quick(package: str, limit: float = LIMIT) -> None:
    """Be less patient than a user would be, so that what takes minutes takes seconds."""
    stores = importlib.import_module(f"{package}.checkpoint.object_store")
    stores.REQUEST_TIMEOUT, stores.RETRY_DELAYS, stores.GRACE = limit, (0.01,) * 4, GRACE


@dataclass
class Variant:
    """Runs of one package with one server, disturbed and compared with an undisturbed one."""

    plan: Plan
    folder: Path
    findings: Findings
    server: Server
    reference: Contents = field(default_factory=dict)
    expected: dict[int, tuple[float, float]] = field(default_factory=dict)
    requests: int = 0
    """What a run and its restart half way ask of the store."""
    runs: int = 0
    limit: float = LIMIT
    sabotage: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        """Run it undisturbed."""
        self.folder.mkdir(parents=True)
        run_dir = self.new()
        problems = self.half(run_dir) + self.whole(run_dir)
        if problems:
            raise RuntimeError("; ".join(problems))
        self.requests = self.server("seen")
        self.reference, self.expected = self.server("contents", run_dir.name), losses(run_dir)
        assert self.reference[STEPS]

    def new(self) -> Path:
        """A run directory, whose name is the run's in the store, too."""
        self.runs += 1
        return self.folder / f"{self.folder.name}-{self.runs}"

    def job(self, run_dir: Path, steps: int = STEPS) -> Job:
        """Start it, or start it again."""

        def prepare(package: str) -> None:
            quick(package, self.limit)
            if self.sabotage:
                self.sabotage(package)

        settings = self.plan.settings | {"train.steps": steps}
        plan = dataclasses.replace(self.plan, settings=settings, sabotage=prepare)
        return Job(plan, run_dir, self.folder / f"log-{time.monotonic_ns()}")

    def run(self, run_dir: Path, steps: int = STEPS, seconds: float = 120.0) -> tuple[int, str]:
        """To its end: exit code and what it said; TimeoutError if that takes too long."""
        job = self.job(run_dir, steps)
        if job.gone(seconds) is None:
            raise TimeoutError(f"it hung: {job.log.read_text('utf-8')[-2000:]}")
        return job.code, job.log.read_text("utf-8", "replace")

    def half(self, run_dir: Path) -> list[str]:
        """Run half of it; what is wrong with its end."""
        code, log = self.run(run_dir, STEPS // 2)
        return [f"exit code {code}: {log[-2000:]}"] if code else []

    def whole(self, run_dir: Path, with_log: bool = True) -> list[str]:
        """Run it to the end, with a store that is well; what is wrong then."""
        self.server("arm", None)
        code, log = self.run(run_dir)
        if code:
            return [f"exit code {code}: {log[-2000:]}"]
        if not self.reference:
            return []
        problems = []
        if self.server("contents", run_dir.name).get(STEPS) != self.reference[STEPS]:
            problems.append("other bits at the end")
        if with_log and losses(run_dir) != self.expected:
            problems.append("another log of losses")
        return problems

    def count(self, promise: str, unit: str, case: str, problems: list[str]) -> None:
        """One try of a promise."""
        problem = f"{self.plan.package}, {case}: {'; '.join(problems)}" if problems else None
        self.findings.tally(promise, unit).count(problem)

    def broken(self, run_dir: Path) -> list[str]:
        """Checkpoints in the store that are not whole."""
        found = self.server("contents", run_dir.name)
        return [f"step {step} is not whole" for step, files in found.items() if not files]

    def tidy(self, run_dir: Path, case: str) -> None:
        """Nothing of it may be left over; forget it."""
        left = self.server("left", run_dir.name)
        left += [f"{n} half uploads" for n in [self.server("half_uploads")] if n]
        aside = any(".damaged-" in name for name in left)  # for a person to look at
        self.count(TIDY, "runs", case, [] if aside else left)
        self.server("forget", run_dir.name)


def errors_of(log: str) -> list[str]:
    """The lines of errors; of other ranks than the first they are a launcher's to prevent."""
    return [it for it in log.splitlines() if "error: " in it and not it.startswith("[rank ")]


def strike(variant: Variant, how: str, first: int, times: int = 1, only: str = "") -> bool:
    """Let a request, or some, of a run fail; False if there was none."""
    run_dir, case = variant.new(), f"{how} at request {first}, {times} times"
    variant.server("arm", how, first, times, only)
    costs, logs = [], []
    for steps in (STEPS // 2, STEPS):
        code, log = variant.run(run_dir, steps)
        logs.append((code, log))
        costs += [f"exit code {code}: {log[-1500:]}"] if code or "was not saved" in log else []
        if code:
            break
    struck = variant.server("struck")
    variant.server("arm", None)
    if not struck:
        variant.server("forget", run_dir.name)
        return False
    if how in PASSES and times == 1:
        variant.count(PASSED, "requests", case, costs)
    for code, log in logs:
        told = errors_of(log)
        if code:
            one = len(told) == 1 and "Traceback" not in log
            variant.count(SAID, "runs", case, [] if one else [f"{told}, {log[-2500:]}"])
    variant.count(THERE, "runs", case, variant.broken(run_dir))
    variant.count(ENDED, "runs", case, variant.whole(run_dir))
    variant.tidy(run_dir, case)
    return True


def hang(variant: Variant, moment: str, stops: bool) -> None:
    """A store that does not answer any more at a start, a read or a save."""
    run_dir, case = variant.new(), f"no answer at {moment}, {'stopped' if stops else 'waited for'}"
    problems = variant.half(run_dir)
    variant.server("arm", "hang", 0, 10**6, HANGS[moment])
    variant.limit = 300.0 if stops else 0.5
    job = variant.job(run_dir)
    if not variant.server.until_struck():
        problems.append("it asked for nothing")
    began = time.monotonic()
    for pid in job.victims("all ranks", 0) if stops else ():
        os.kill(pid, signal.SIGTERM)
    # Five attempts, of which each is looked after once in a second; or the grace.
    allowed = GRACE + 12 if stops else 45
    if job.gone(allowed) is None:
        problems.append(f"still there after {time.monotonic() - began:.0f} s")
    log = job.log.read_text("utf-8", "replace")
    if not job.code or "Traceback" in log or len(errors_of(log)) != 1:
        problems.append(f"exit code {job.code}: {log[-2000:]}")
    if stops and "SIGTERM: stopping" not in log:
        problems.append(f"the signal was not heard: {log[-2000:]}")
    variant.limit = LIMIT
    variant.count(IN_TIME, "runs", case, problems)
    variant.count(ENDED, "runs", case, variant.whole(run_dir))
    variant.tidy(run_dir, case)


def kill(variant: Variant, found: Findings, hits: Counter[str], kills: int = 0) -> None:
    """`kill -9` in the middle of uploads in parts, of which half ones are left."""
    server, kills = variant.server, kills or (1 if found.bounded else 6)
    settings = variant.plan.settings | {"model.width": 192, "train.steps": 12}

    def in_parts(package: str) -> None:
        quick(package, 60.0)
        # A file of two parts or more is sent in parts.
        importlib.import_module("s3fs.core").calculate_chunksize = lambda *_, **__: 1 << 20
        if variant.sabotage:
            variant.sabotage(package)

    plan = dataclasses.replace(variant.plan, settings=settings, sabotage=in_parts)
    rng = random.Random(plan.package)
    storm = Storm(plan, variant.folder / "killed", found, rng, hits, contents_of(server))
    storm.linger = lambda run_dir: server.until_struck()
    for number in range(kills):
        run_dir = storm.begin()
        server("arm", "hang", 0, 10**6, f"/{run_dir.name}/step_00000008.*partNumber=2")
        whom = ("one rank", "all ranks", "launcher")[number % 3 if plan.ranks else 0]
        storm.target = whom, rng.randrange(max(1, plan.ranks)), "uploading"
        if storm.kill_once(run_dir):
            server("arm", None)  # what was under way to the store is lost
            left = server("half_uploads")
            hits["partial uploads left by kills"] += left
            storm.end(run_dir)
            now = server("half_uploads")
            problem = [f"{now} of {left}"] if now or not left else []
            variant.count(DROPPED, "kills", f"kill {number}, {whom}", problem)
            variant.tidy(run_dir, f"kill {number}")


def contents_of(server: Server) -> Callable[[Path], Contents]:
    """Looks at the checkpoints of a run in the store."""
    return lambda run_dir: server("contents", run_dir.name)


def two(variant: Variant, found: Findings, hits: Counter[str], times: int = 0) -> None:
    """Two runs with one address, of which one starts somewhat later.

    With `times`, the first one waits in its first half until the second has taken over.
    """
    rng = random.Random(variant.plan.package)
    sabotage = variant.sabotage
    for number in range(times or (1 if found.bounded else 5)):
        first = variant.new()
        second = first.parent / "elsewhere" / first.name
        taken_over = first.with_suffix(".taken_over")
        variant.sabotage = partial(slowly, sabotage, taken_over if times else None)
        jobs = [variant.job(first)]
        deadline = time.monotonic() + 60
        while not variant.server("contents", first.name) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 1))
        jobs.append(variant.job(second))
        log = jobs[1].log
        while time.monotonic() < deadline and not (log.exists() and "\nrun    " in log.read_text()):
            time.sleep(0.05)
        taken_over.touch()
        # The second is the owner now; the first has saves before it, and must notice.
        must_lose = max(losses(first), default=0) < STEPS / 2
        problems = [] if all(job.gone(120) is not None for job in jobs) else ["one hung"]
        logs = [job.log.read_text("utf-8", "replace") for job in jobs]
        lost = [log for job, log in zip(jobs, logs, strict=True) if job.code]
        words = ("another run has taken over", "does not see the objects of rank 0")
        if len(lost) > 1 or any(not any(word in log for word in words) for log in lost):
            problems.append(
                f"{[job.code for job in jobs]}: {' || '.join(it[-1200:] for it in logs)}"
            )
        if must_lose and not jobs[0].code:
            problems.append("the first one went on to the end beside the second")
        problems += variant.broken(first)
        hits["runs that another run replaced"] += len(lost)
        hits["pairs of runs where the first had already finished"] += not lost
        winner = second if jobs[0].code else first
        variant.count(ONE, "pairs", f"pair {number}", problems + variant.whole(winner, False))
        variant.tidy(first, f"pair {number}")
    variant.sabotage = sabotage


def slowly(sabotage: Callable[[str], None] | None, mark: Path | None, package: str) -> None:
    """Take a while for each step, so that two runs meet; wait in the first half for `mark`."""
    training = importlib.import_module(f"{package}.train")
    step = training.train_step

    def take_step(state: Any, *rest: Any) -> Any:
        time.sleep(0.3)
        deadline = time.monotonic() + 60
        while (
            mark is not None
            and state.step == STEPS // 2 - 1
            and not mark.exists()
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return step(state, *rest)

    training.train_step = take_step
    if sabotage:
        sabotage(package)
