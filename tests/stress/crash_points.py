"""Every crash point of a save: after each call, what a crash may leave is restored from.

Real training runs are recorded with strace, on one rank and on two, with a save after each step and
one checkpoint kept, so that every save prunes the one before. After each recorded call that changes
the directory, the trees that a crash there may leave (see replay.py) are built and restored from.
Runs that are killed, restarted, and then lose power are tried as well. And the code that saves is
robbed of one precaution at a time, to see that this would be noticed.
"""

import copy
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import render

from .common import Findings, run_topic
from .kill_storm import side_by_side
from .replay import Disk, Tree
from .restoring import CHECKPOINTS, PROMISES, Contents, Restorer, checkpoints, read_tree, write_tree
from .strace import OPTIONS, Call, calls, escape, text

STEPS = 3  # saves in a recording
ANSWERS = ("torch_save", "dcp", "dcp_async")
CORES = os.cpu_count() or 1
SHARE = 0.05  # of the states amid the writing of a file, when the time is bounded
NOTICED = "code that lacks one of its precautions is detected"
# What is there in checkpoint/publish.py, and what is put in its place.
BREAKAGES = {
    "no_directory_synced": [
        (
            "from ..files import naming, rename_directory, sync_directory\n",
            "from ..files import naming, rename_directory\nsync_directory = lambda path: None\n",
        ),
    ],
    "renamed_before_files_are_synced": [
        ("                os.fsync(written.fileno())\n", ""),
        (
            "os.rename(reservation, target)\n",
            "os.rename(reservation, target)\n"
            '        [os.fsync(os.open(target / n, os.O_RDONLY)) for n in manifest["files"]]\n',
        ),
    ],
    "no_file_synced": [("                os.fsync(written.fileno())\n", "")],
    "manifest_not_synced": [("            os.fsync(file.fileno())\n", "")],
    "name_of_the_run_not_synced": [
        ("                sync_directory(parent)", "                pass")
    ],
    "removed_before_its_new_name_is_synced": [
        ("sync_directory(self.directory)\n            for", "pass\n            for")
    ],
}


class State(NamedTuple):
    """What a crash may leave."""

    tree: Tree
    saved: int
    """The last step whose save was over."""
    after: str
    """The call before the crash."""


@dataclass
class Saves:
    """One recorded run, and what is known of its checkpoints as its calls go by."""

    package: str
    calls: list[Call]
    disk: Disk
    contents: dict[str, Contents] = field(default_factory=dict)
    """What was in each checkpoint when it was given its name."""
    saved: int = 0
    """The last step whose save was over."""
    passed: int = 0
    """Points that `states` has passed."""

    def points(self) -> Iterator[Call]:
        """Go through the calls, and stop after each that makes a difference."""
        for call in self.calls:
            if mark := re.search(r"/marks/.*/step_(\d+)$", made_by(call)):
                self.saved = int(mark[1])
            elif not self.disk.apply(call):
                continue
            elif call.name.startswith("rename"):
                for name, content in checkpoints(self.disk.tree()).items():
                    self.contents.setdefault(name, content)
            yield call

    def states(self) -> Iterator[State]:
        """What a crash may leave at any point."""
        seen = set()
        for call in self.points():
            self.passed += 1
            for tree in self.disk.crashes():
                if (state := (self.saved, hash(tree))) not in seen:
                    seen.add(state)
                    yield State(tree, self.saved, call.name)

    @property
    def run(self) -> str:
        """Its name, also of its directory."""
        return self.disk.root.name

    def killed(self) -> Iterator["Saves"]:
        """As many runs, each killed after another call that changed a name, to be restarted."""
        for i, call in enumerate(self.points()):
            if not made_by(call) and not call.name.startswith(("rename", "unlink", "rmdir")):
                continue
            killed = copy.copy(self)
            killed.passed = 0
            root = self.disk.root.with_name(f"{self.run}-{i}")
            killed.disk, killed.contents = self.disk.inherited(root), dict(self.contents)
            yield killed


def without_writes(states: Iterable[State]) -> Iterator[State]:
    """All but those right after a write: of the latter there are many, much alike."""
    return (state for state in states if "write" not in state.after)


def some_of(states: Iterable[State]) -> Iterator[State]:
    """Those, and some of the others."""
    chance = random.Random(0)
    return (s for s in states if "write" not in s.after or chance.random() < SHARE)


def made_by(call: Call) -> str:
    """The directory that a call makes, "" if it makes none."""
    return text(call.words[-2]) if call.name.startswith("mkdir") else ""


def record(folder: Path, jobs: list[tuple[str, str, int]], ranks: int) -> dict[str, list[Call]]:
    """Train each (package, run, steps), all in one process or by torchrun; the calls of each."""
    trace = folder / f"trace-of-{jobs[0][1]}.txt"
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [
        sys.executable,
        *(torchrun if ranks > 1 else ["-m"]),
        "tests.stress.saving",
        str(folder),
    ]
    sources = [str(Path(__file__).parents[2]), *map(str, folder.glob("renders/*/*/src"))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sources),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    for _, run, _ in jobs:
        (folder / "disk" / run).mkdir(parents=True, exist_ok=True)
    outcome = subprocess.run(
        ["strace", "-o", str(trace), *OPTIONS, *command, json.dumps(jobs)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stdout[-4000:]
    found = calls(trace, wanted(folder))
    trace.unlink()
    return {run: found[run] for _, run, _ in jobs}


def wanted(folder: Path) -> re.Pattern[str]:
    """Finds the run in a call that concerns its checkpoints, a directory above them, or a mark."""
    disk, marks = (re.escape(escape(folder / name)) for name in ("disk", "marks"))
    run, rest = r"\\x2f((?:\\x(?!2f)..)+)", r"\\x2f(?:\\x..)+"
    below = f"(?:{rest})?"
    for part in reversed(Path(CHECKPOINTS).parts):
        below = f"(?:{re.escape(escape(Path('/', part)))}{below})?"
    return re.compile(rf'{disk}{run}{below}[">]|{marks}{run}{rest}"')


def restart(folder: Path, killed: list[Saves]) -> None:
    """Let killed runs go on from where they stand, and record what they do."""
    jobs, expected = [], folder / "expected"
    for saves in killed:
        tree = saves.disk.tree()
        write_tree(saves.disk.root, tree)
        newest = max((int(name[5:]) for name in checkpoints(tree)), default=0)
        jobs.append((saves.package, saves.run, newest + 2))
        shutil.copytree(expected / saves.run.rpartition("-")[0], expected / saves.run)
    recorded = record(folder, jobs, ranks=1)
    for saves in killed:
        saves.calls = recorded[saves.run]


def prepare(folder: Path, answer: str, breakage: str = "") -> str:
    """Render a project with this answer, robbed of a precaution if asked; returns its package."""
    package = f"crash_{answer}" + (f"_{list(BREAKAGES).index(breakage)}" if breakage else "")
    (folder / "renders" / package).mkdir(parents=True)
    source = render(folder / "renders" / package, package_name=package, checkpoint=answer)
    path = source / package / "checkpoint" / "publish.py"
    for there, instead in BREAKAGES[breakage] if breakage else ():
        code = path.read_text("utf-8")
        assert code.count(there) == 1, f"{breakage}: checkpoint/publish.py has changed"
        path.write_text(code.replace(there, instead), "utf-8")
    return package


def cannot() -> str | None:
    """Why nothing can be recorded here, if nothing can."""
    if not shutil.which("strace"):
        return "strace is not installed, and without it no save can be recorded"
    outcome = subprocess.run(["strace", *OPTIONS, "true"], capture_output=True, text=True)
    return f"strace does not work here: {outcome.stderr[-500:]}" if outcome.returncode else None


def attempt(findings: Findings) -> None:
    """Record, build and restore; then the same with code that is known to be wrong."""
    if reason := cannot():
        sys.exit(f"CRASH POINTS NOT TRIED: {reason}")
    folder = findings.folder
    (folder / "text.txt").write_text("Was ever woman in this humour wooed? " * 100)
    answers = ANSWERS[-1:] if findings.bounded else ANSWERS
    right = [prepare(folder, answer) for answer in answers]
    wrong = [prepare(folder, answers[-1], breakage) for breakage in BREAKAGES]
    for package in right:
        sys.path[:0] = map(str, folder.glob(f"renders/{package}/*/src"))
    memory = Path("/dev/shm")
    scratch = memory if os.access(memory, os.W_OK) else folder
    with tempfile.TemporaryDirectory(prefix="stress-", dir=scratch) as place:
        restorers = {it: Restorer(it, Path(place) / "left", folder / "expected") for it in right}
        first = train(folder, [*right, *wrong], ranks=1)
        for saves in first[len(right) :]:
            look_for_trouble(findings, restorers[right[-1]], saves)
        try_all(findings, restorers, first[: len(right)], ranks=1)
        if not findings.bounded:
            try_all(findings, restorers, train(folder, right, ranks=2), ranks=2)


def train(folder: Path, packages: list[str], ranks: int) -> list[Saves]:
    """Record a run of each package."""
    runs = [(package, f"{package}-{ranks}", STEPS) for package in packages]
    recorded = record(folder, runs, ranks)
    return [Saves(package, recorded[run], Disk(folder / "disk" / run)) for package, run, _ in runs]


def try_all(
    findings: Findings, restorers: dict[str, Restorer], runs: list[Saves], ranks: int
) -> None:
    """Restore from what crashes leave of these runs, and of runs killed and restarted."""
    on = "1 rank" if ranks == 1 else f"{ranks} ranks"
    killed = (
        [] if findings.bounded else [k for saves in runs for k in copy.deepcopy(saves).killed()]
    )
    for saves in runs:
        restorer = restorers[saves.package]
        if findings.bounded:
            tried = sum(judge(findings, restorer, saves, it) for it in some_of(saves.states()))
        else:
            tried = shared_out(findings, restorer, saves, saves.states)
            saves.passed = sum(1 for _ in saves.points())
        assert saves.disk.tree() == read_tree(saves.disk.root), "the replay went wrong"
        findings.figures[f"{saves.package.removeprefix('crash_')}, {on}"] = (
            f"{tried:,} states after {saves.passed:,} calls in {STEPS} saves"
        )
    if killed:
        restart(findings.folder, killed)
        tried = sum(
            shared_out(
                findings, restorers[it.package], it, lambda it=it: without_writes(it.states())
            )
            for it in killed
        )
        findings.figures[f"killed on {on}, restarted on one, then crashed"] = (
            f"{tried:,} states after {len(killed)} kills"
        )


def shared_out(
    findings: Findings,
    restorer: Restorer,
    saves: Saves,
    states: Callable[[], Iterable[State]],
) -> int:
    """Judge all states, those of each core in a fork; how many there were."""

    def share(number: int, found: Findings, hits: Counter[str]) -> None:
        restorer.folder = restorer.folder / str(number)
        for state in itertools.islice(states(), number, None, CORES):
            hits["tried"] += judge(found, restorer, saves, state)

    return side_by_side(findings, [partial(share, number) for number in range(CORES)])["tried"]


def judge(findings: Findings, restorer: Restorer, saves: Saves, state: State) -> int:
    """Count one state under each promise, which makes 1."""
    problems = restorer.problems(saves.run, state.tree, saves.contents, state.saved)
    for promise in PROMISES:
        problem = problems.get(promise)
        if problem:
            there = ", ".join(path.removeprefix(CHECKPOINTS) for path, _ in state.tree)
            problem += f" ({saves.run}, after {state.after}: {there})"
        findings.tally(promise, "states").count(problem)
    return 1


def look_for_trouble(findings: Findings, restorer: Restorer, saves: Saves) -> None:
    """Something must be wrong with what this code leaves."""
    states = without_writes(saves.states())
    found = (restorer.problems(saves.run, s.tree, saves.contents, s.saved) for s in states)
    breakage = list(BREAKAGES)[int(saves.package[-1])]
    missed = None if any(found) else f"{breakage}: nothing is wrong after a crash"
    findings.tally(NOTICED, "breakages").count(missed)


if __name__ == "__main__":
    run_topic("crash_points", attempt)
