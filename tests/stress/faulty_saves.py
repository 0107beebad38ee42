"""Runs whose saves are disturbed, and what is looked at when the next save begins.

A run saves at every step. Every second save is disturbed from one of its calls on; the one after it
must succeed, and nothing of the trouble be left.
"""

import errno
import importlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import fault_injection
from .common import Findings
from .damage import TEXT
from .fault_injection import CHANGES, READS, WRITES, Call, Supervisor
from .forked_jobs import Job, Plan
from .storm import contents

KEEP = 2
SECONDS = 600.0
MAKES = {"mkdir", "mkdirat"}
SAVING = re.compile(r"\.saving-step_(\d{8})")
ROOM = {"create", "mkdir", "mkdirat", "write", "writev", "pwrite64", "fsync", "fdatasync"}
NAMES = {"create", "mkdir", "mkdirat", "rename", "renameat", "renameat2"}
KINDS = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EROFS: CHANGES | {"create"},
    errno.EACCES: CHANGES | {"create", "open", "opendir"},
    errno.EIO: CHANGES | WRITES | READS | {"create", "open", "opendir"},
    errno.EINTR: WRITES | {"read", "pread64", "create", "open"},  # no folder is that slow
    0: CHANGES | WRITES | READS | {"create", "open", "opendir"},
}
"""Calls by what they may fail with (0: they are only slow)."""
HARMLESS = (0, errno.EINTR)

WHOLE = "a folder with the name of a checkpoint is complete, and the last good one is kept"
SAID = "a failed save is reported in one line with the reason; a good save is not"
TIDY = "the next successful save leaves no unfinished files behind"
COSTLESS = "interrupted and slow system calls do not make a save fail"
GOES_ON = "with on-failure continue, the run ends with the bits of an uninterrupted one"


@dataclass
class Fault:
    """What goes wrong from one call of a save on: refused calls, or what a subclass does."""

    error: int
    once: bool = False
    rank: int | None = None
    """Whose calls are counted and refused (None: all ranks')."""
    threads: bool = False
    """Only calls of threads that the saving thread has started."""
    delay: float = 0.0
    """Seconds that a call takes, refused or not."""

    def __str__(self) -> str:
        when = "one call" if self.once else "all calls from one on"
        of = "" if self.rank is None else f" of rank {self.rank}"
        return f"{when}{of}: {os.strerror(self.error) if self.error else f'{self.delay} s'}"

    @property
    def errors(self) -> tuple[int, ...]:
        """What the run may say."""
        return (self.error,)

    @property
    def names(self) -> set[str]:
        """Calls that have to be shown."""
        return {*MAKES, *fault_injection.OPENS, *KINDS[self.error]} & fault_injection.NUMBERS.keys()

    def prepare(self) -> None:
        """In each rank, before it trains."""

    def begin(self, point: int) -> None:
        """Before a save that shall be disturbed."""
        self.left = point
        self.struck = False

    def strikes(self, call: Call) -> bool:
        """Whether to refuse a call."""
        if call.name in MAKES:
            self.caller = call.pid
        if call.kind not in KINDS[self.error] or self.rank not in (None, call.rank):
            return False
        if self.threads and call.pid == self.caller:
            return False
        self.left -= 1
        if self.left == -1 or (self.left < -1 and not self.once):
            self.struck = True
            time.sleep(self.delay)
            return True
        return False

    def end(self) -> None:
        """After it."""
        self.left = -1


@dataclass
class Saves:
    """Judges the calls of a run that saves at every step, and looks at the directory in between."""

    package: str
    run_dir: Path
    findings: Findings
    trouble: Fault | None = None
    points: dict[int, int] = field(default_factory=dict)
    """By step: how many calls of its save are let pass first."""
    step: int = 0
    before: list[int] = field(default_factory=list)
    """Steps of the checkpoints that were there when the save began."""
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Those of an undisturbed save by rank and kind."""
    failed: set[int] = field(default_factory=set)
    struck: set[int] = field(default_factory=set)
    held: list[tuple[int, int]] = field(default_factory=list)
    """Descriptors and resident bytes of the first rank at the beginning of each save."""

    def __call__(self, call: Call) -> int:
        """The error that a call gets, or 0."""
        saving = SAVING.search(call.path)
        if saving and self.step < int(saving[1]):
            self.over()
            self.step = int(saving[1])
            self.calls.clear()
            pages = int(Path(f"/proc/{call.pid}/statm").read_text().split()[1])
            self.held.append(
                (len(os.listdir(f"/proc/{call.pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE"))
            )
            if self.trouble and self.step in self.points:
                self.trouble.begin(self.points[self.step])
        self.calls[call.rank, call.kind] += 1
        disturbed = self.trouble and self.step in self.points
        return self.trouble.error if disturbed and self.trouble.strikes(call) else 0

    def over(self) -> None:
        """See what a save has left, now that it is over."""
        disturbed = self.trouble is not None and self.step in self.points
        if disturbed:
            self.trouble.end()
            if self.trouble.struck:
                self.struck.add(self.step)
        folder = self.run_dir / "checkpoints"
        if not folder.exists():
            return
        paths = importlib.import_module(f"{self.package}.checkpoint.publish").published(folder)
        steps = [int(path.name[5:]) for path in paths]
        problems = [text for path in paths for text in self.problems(path)]
        saved = self.step in steps
        if self.step and not saved:
            self.failed.add(self.step)
            problems += [f"step {step} is gone" for step in self.before if step not in steps]
        elif self.before and self.before[-1] not in steps:
            problems.append(f"step {self.before[-1]} is gone")
        self.count(WHOLE, "saves", problems)
        if disturbed and self.trouble.struck and self.trouble.error in HARMLESS:
            self.count(COSTLESS, "saves", [] if saved else ["it failed"])
        if self.step and not disturbed:
            left = {path.name for path in folder.iterdir()}
            wanted = {path.name for path in paths[-KEEP:]}
            found = [f"there is {sorted(left)}"] if left != wanted or not saved else []
            self.count(TIDY, "saves", found)
        self.before = steps

    def problems(self, path: Path) -> list[str]:
        """What is wrong with a checkpoint: its bytes, or what they should hold."""
        reading = importlib.import_module(f"{self.package}.checkpoint.transfer")
        try:
            manifest, problems = reading.verify(path)
            return problems or [] if reading.open_tensors(path, manifest).forms else ["it is empty"]
        except RuntimeError as error:
            return [str(error)]

    def count(self, promise: str, unit: str, problems: list[str]) -> None:
        """One try of a promise in this run."""
        place = f"{self.run_dir.name}, {self.trouble}, step {self.step}, points {self.points}"
        problem = f"{place}: {'; '.join(problems)}" if problems else None
        self.findings.tally(promise, unit).count(problem)

    def said(self, log: str) -> None:
        """Whether the log has a line for each save that failed, and for no other."""
        lines = log.splitlines()
        for step in range(1, self.step + 1):
            told = [line for line in lines if f"checkpoint of step {step} was not saved" in line]
            problems = []
            # A disk that fails for good may not even let a name be taken back: it is there, whole.
            stayed = told and step in self.struck - self.failed and not self.trouble.once
            if len(told) != (step in self.failed) and not stayed:
                problems.append(f"save {step} failed: {step in self.failed}, said: {told}")
            elif told and not any(os.strerror(n) in told[0] for n in self.trouble.errors):
                problems.append(f"no reason: {told}")
            if step in self.points:
                self.count(SAID, "saves", problems)
        if "Traceback" in log:
            self.count(SAID, "saves", [f"a traceback: {log[-2000:]}"])


@dataclass
class Variant:
    """One way to save, on one plain process (0 ranks) or two ranks."""

    package: str
    ranks: int
    folder: Path
    findings: Findings
    steps: int = 24
    """Of a run, which saves at each: every second save is disturbed."""
    reference: dict[int, dict[str, str]] = field(default_factory=dict)
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)
    runs: int = 0
    sabotage: Callable[[str], None] | None = None
    """Breaks something in each rank, to see it noticed."""

    def __post_init__(self) -> None:
        """Run it undisturbed: which calls a save makes, and the bits at the end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "text.txt").write_text(TEXT)
        saves = self.run({}, Fault(errno.EIO))
        assert saves.step == self.steps
        self.reference, self.calls = contents(saves.run_dir), saves.calls
        assert self.reference[self.steps]

    @property
    def disturbed(self) -> range:
        """Steps whose saves are disturbed."""
        return range(2, self.steps - 1, 2)

    def settings(self) -> dict[str, Any]:
        """A save at every step."""
        return {
            "data.path": self.folder / "text.txt",
            "train.steps": self.steps,
            "train.log_every": 1,
            "train.validate_every": 0,
            "checkpoint.every": 1,
            "checkpoint.keep": KEEP,
            "checkpoint.on_failure": "continue",
            "optim.final_fraction": 1.0,  # a longer run has a longer schedule: hold it flat
            "parallel.timeout_minutes": 1.0,
        }

    def job(
        self,
        run_dir: Path,
        judge: Callable[[Call], int],
        names: set[str],
        hook: Callable[[], None] = lambda: None,
        **more: Any,
    ) -> tuple[int | None, str]:
        """Run to the end with its calls judged: exit code (None: it hung), what it printed."""
        log = self.folder / f"{run_dir.name}-{time.monotonic_ns()}.log"
        run_dir.mkdir(parents=True, exist_ok=True)
        supervisor = Supervisor(run_dir, judge)

        def prepare(package: str) -> None:
            hook()
            if self.sabotage:
                self.sabotage(package)
            if names:
                supervisor.join(int(os.environ.get("RANK", "0")), names)

        plan = Plan(self.package, self.settings() | more, self.ranks, prepare)
        job = Job(plan, run_dir, log)
        ended = supervisor.serve(job.calls, SECONDS)
        supervisor.close()
        gone = job.gone(SECONDS if ended else 0)
        return None if gone is None else job.code, log.read_text("utf-8", "replace")

    def run(
        self,
        points: dict[int, int],
        trouble: Fault,
        place: Path | None = None,
        settings: dict[str, Any] | None = None,
    ) -> Saves:
        """A run that shall go on whatever happens to its saves; all that is promised of it."""
        run_dir = self.new(place)
        saves = Saves(self.package, run_dir, self.findings, trouble, points)
        code, log = self.job(run_dir, saves, trouble.names, trouble.prepare, **(settings or {}))
        saves.over()
        saves.said(log)
        problems = [] if code == 0 and status(run_dir) == "finished" else [f"{code}: {log[-3000:]}"]
        same = self.reference and not settings  # else the files are others
        if not problems and same and contents(run_dir)[self.steps] != self.reference[self.steps]:
            problems.append("other bits at the end")
        descriptors = [fds for fds, _ in saves.held[1:]]
        if not problems and descriptors[-1] > descriptors[0] + 2:
            problems.append(f"descriptors: {descriptors}")
        saves.count(GOES_ON, "runs", problems)
        return saves

    def new(self, place: Path | None = None) -> Path:
        """A run directory of its own."""
        self.runs += 1
        return (place or self.folder) / f"run-{self.runs}"

    def points(self, trouble: Fault) -> int:
        """How many calls of a save a trouble can strike."""
        ranks = range(max(1, self.ranks)) if trouble.rank is None else [trouble.rank]
        kinds = KINDS[trouble.error]
        return sum(n for (rank, kind), n in self.calls.items() if rank in ranks and kind in kinds)


def status(run_dir: Path) -> str:
    """How a run says that it stands."""
    path = run_dir / "status.json"
    return json.loads(path.read_text("utf-8"))["status"] if path.exists() else "none"
