"""Jobs whose world changes: machines fail, leave and join, and the samples stay what they were.

Several launchers on this machine stand for as many machines, with one process each, in an elastic
job of launch.sh (NNODES=1:3, torchrun's rendezvous): one is killed with all it started, one
gets a stop signal, one freezes for seconds, others join. In other runs the launcher is killed, and
started by hand with another number of processes. Some runs have their checkpoints in an object
store (moto's, on loopback), or on disk and there. A recorder in the render (sample_recorder.py)
writes down which samples each rank asks for; all is compared with a run on one process that nobody
disturbs.
"""

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.common import free_ports, render
from tests.project.s3 import s3

from .common import Findings, run_topic
from .forked_jobs import PATIENCE, Plan
from .launched_jobs import Launch
from .storm import CHECKPOINTS, PARALLELISMS, TASKS

EVERY, BATCH = 10, 8
SETTINGS = {
    "train.log_every": 1,
    "train.validate_every": 50,
    "train.global_batch_size": BATCH,
    "train.micro_batch_size": 2,
    "checkpoint.every": EVERY,
    "optim.learning_rate": 1e-3,
    "optim.final_fraction": 1.0,
}
# A dead machine is given up after 10 s, and nobody is waited for longer than needed.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=10,last_call_timeout=1"
# What float32 leaves open: its unit is 6e-8 of a value, other ranks add the same gradients in
# another order, and a run carries each difference on for hundreds of steps. A batch with one other
# sample in it is off by some per cent.
BOUND = 1e-3
SAME = "on any number of ranks, a global batch has the samples of an uninterrupted run"
ONCE = "in the final history of a run, an epoch contains each sample once"
WORLD = "when machines join or leave, the job continues with the machines that are left"
LOST = "a lost machine costs at most one save interval and the upload in progress"
FREE = "a machine that joins or is stopped costs no steps"
LOSSES = (
    f"losses equal those of an uninterrupted run in one process, within {BOUND:.0e} of their size"
)
ORPHANS = "no process outlives the launcher that started it"
FROZEN = "a machine that freezes for seconds costs no steps and no restart"
LOSES, STOPS, JOINS, FREEZES = "is lost", "is stopped", "joins", "freezes"
Changes = tuple[tuple[str, int], ...]
PEACE: Changes = (("", 0),)
MACHINES: Changes = (
    *(("", 1), (JOINS, 2), (FREEZES, 2), (LOSES, 1)),
    *((JOINS, 2), (JOINS, 3), (FREEZES, 3), (STOPS, 2), (FREEZES, 2)),
)
BY_HAND: Changes = (("", 3), (LOSES, 1), (FREEZES, 1), (STOPS, 2), (LOSES, 3))
STORED = {"ddp_dcp_async": {}, "fsdp_dcp": {}, "fsdp_dcp_async": {"checkpoint.local_first": True}}
"""Variants that are run again with a store."""
BOUNDED = {"peace": PEACE, "machines": MACHINES[:4]}


@dataclass
class Start:
    """The processes of one start of the job, up to the next change of its world."""

    size: int
    lines: dict[int, dict[int, list[int]]]
    """By step and rank: the samples."""

    @property
    def first(self) -> int:
        """The first step that any rank finished."""
        return min(self.lines)

    @property
    def last(self) -> int:
        """The last one."""
        return max(self.lines)

    def whole(self, step: int) -> list[int] | None:
        """The samples of a step, over all ranks; None if not all of them finished it."""
        ranks = self.lines.get(step, {})
        parts = (ranks[rank] for rank in sorted(ranks))
        return list(itertools.chain(*parts)) if len(ranks) == self.size else None


def starts(folder: Path) -> list[Start]:
    """What the witnesses wrote, start after start."""
    found: dict[str, tuple[float, Start]] = {}
    for path in folder.glob("*.jsonl"):
        key, rank, _ = path.name.split("-")
        text = path.read_text("utf-8")
        for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines()):
            at, start = found.setdefault(key, (line["at"], Start(line["size"], {})))
            start.lines.setdefault(line["step"], {})[int(rank)] = line["ids"]
            found[key] = (min(at, line["at"]), start)
    return [start for _, start in sorted(found.values(), key=lambda it: it[0])]


@dataclass
class Trial:
    """One run, whose world is changed."""

    name: str
    source: Path
    folder: Path
    steps: int
    elastic: bool = False
    """Whether a launcher stands for a machine of several."""
    more: dict[str, object] = field(default_factory=dict)
    """Further settings."""
    machines: list[Launch] = field(default_factory=list)
    port: int = 0
    launches: int = 0
    changes: list[tuple[str, int, str | None]] = field(default_factory=list)
    """What was done, to which start of the job, and what went wrong with it."""
    outlived: list[str | None] = field(default_factory=list)
    """Of each launcher that was killed: whether something of it lived on."""

    def __post_init__(self) -> None:
        """Nothing has happened yet."""
        self.run_dir, self.records = self.folder / "run", self.folder / "records"
        self.records.mkdir(parents=True)
        self.rng = random.Random(self.folder.name)
        self.pace(0)

    def pace(self, step: int) -> None:
        """Up to this step no time is to be lost."""
        path = self.folder / "pace"
        path.with_suffix(".new").write_text(str(step), "utf-8")
        os.replace(path.with_suffix(".new"), path)

    def launch(self, processes: int) -> None:
        """Start one more launcher, or a plain process (0)."""
        settings: dict[str, object] = {**SETTINGS, "train.steps": self.steps, **self.more}
        text = self.source / "text.txt"
        if text.exists():
            settings["data.path"] = text
        more = {"RECORDS": str(self.records), "PACE": str(self.folder / "pace")}
        more["OMP_NUM_THREADS"] = "1"
        if self.elastic:
            self.port = self.port or free_ports(1)[0]
            more |= {"NNODES": "1:3", "RDZV_ENDPOINT": f"127.0.0.1:{self.port}"}
            more |= {"PET_RDZV_CONF": RENDEZVOUS, "PET_LOCAL_ADDR": "127.0.0.1"}
        self.launches += 1
        log = self.folder / f"log-{self.launches}"
        plan = Plan(self.name, settings, processes)
        self.machines.append(Launch(self.source, plan, self.run_dir, log, more=more))

    def until(self, size: int, after: int, since: int = 0) -> str | None:
        """Let it train on so many ranks for some steps, in a start later than the first `after`.

        The steps count from the start's first, or from `since`.
        """
        deadline, further = time.monotonic() + PATIENCE, self.rng.randrange(EVERY + 2, 3 * EVERY)
        while time.monotonic() < deadline:
            now = starts(self.records)
            if len(now) > after and now[-1].size == size:
                goal = max(now[-1].first, since) + further
                self.pace(goal)
                if now[-1].last >= goal:
                    return None
            for machine in self.machines:
                if (code := machine.process.poll()) is not None:
                    return f"a launcher ended with {code}: {machine.log.read_text('utf-8')[-1500:]}"
            time.sleep(0.1)
        return f"no start on {size} ranks; the last one had {now[-1].size if now else 0}"

    def change(self, what: str, size: int) -> None:
        """Do it, and see the job go on with so many ranks."""
        before = len(starts(self.records))
        if what == FREEZES:
            problem = self.freeze(size)
            self.changes.append((what, before, problem and f"{self.name}: {problem}"))
            return
        if what == JOINS:
            self.launch(1)
        else:
            machine = self.machines.pop()
            machine.process.send_signal(signal.SIGKILL if what == LOSES else signal.SIGTERM)
            if what == LOSES:
                self.outlived.append(None if machine.gone() else f"{self.name}: still there")
            else:
                machine.process.wait(PATIENCE)
                machine.stop()
            if not self.machines:  # then it is for us to start it again
                self.launch(size)
        self.changes.append((what, before, problem := self.until(size, before)))
        if problem:
            raise RuntimeError(f"{self.name}: a machine {what}: {problem}")

    def freeze(self, size: int) -> str | None:
        """Stop all processes of a machine for seconds, and see the job go on as it was."""
        before, processes = starts(self.records), self.machines[-1].processes()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in processes:
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(self.rng.uniform(1, 4))
        problem = self.until(size, len(before) - 1, before[-1].last)
        again = len(starts(self.records)) > len(before)
        return problem or ("it was started again" if again else None)

    def run(self, changes: Changes) -> None:
        """The whole of it, up to the run's end."""
        (_, size), *later = changes
        try:
            self.launch(size)
            if later and (problem := self.until(size, 0)):
                raise RuntimeError(f"{self.name}: {problem}")
            for what, wanted in later:
                self.change(what, wanted)
            self.pace(self.steps)
            for machine in self.machines:
                machine.finish()
        finally:
            for machine in self.machines:
                machine.stop()

    def losses(self) -> dict[int, float]:
        """By step, from the log of the run."""
        lines = (self.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
        return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def judge(findings: Findings, trial: Trial, peace: Trial) -> None:
    """Compare a run with that which nobody disturbed."""
    name, found, (expected,) = trial.folder.name, starts(trial.records), starts(peace.records)
    for number, start in enumerate(found):
        for step in sorted(start.lines):
            if (ids := start.whole(step)) is not None:
                same = ids == expected.whole(step)
                problem = None if same else f"{name}: start {number}, step {step}: {ids}"
                findings.tally(SAME, "steps").count(problem)
    history: list[int] = []
    for step in range(1, trial.steps + 1):
        ids = next((start.whole(step) for start in found[::-1] if step in start.lines), None)
        history += ids or [-1] * BATCH
    manifest = next(peace.run_dir.glob("checkpoints/step_????????/manifest.json"))
    size = json.loads(manifest.read_text("utf-8"))["identity"]["training_samples"]
    for start_at in range(0, len(history) - size + 1, size):
        whole = sorted(history[start_at : start_at + size]) == list(range(size))
        problem = None if whole else f"{name}: epoch {start_at // size} is not whole"
        findings.tally(ONCE, "epochs").count(problem)

    for what, before, problem in trial.changes:
        if what == FREEZES:
            findings.tally(FROZEN, "machines").count(problem)
            continue
        findings.tally(WORLD, "changes").count(problem)
        if not problem:
            lost = found[before - 1].last - found[before].first + 1
            allowed = EVERY * (1 + trial.name.endswith("async")) if what == LOSES else 0
            problem = f"{name}: a machine {what}: {lost} steps"
            tally = findings.tally(LOST if what == LOSES else FREE, "machines")
            tally.count(None if 0 <= lost <= allowed else problem)
            key = f"most steps repeated after a machine {what}"
            findings.figures[key] = max(lost, findings.figures.get(key, 0))
    for problem in trial.outlived:
        findings.tally(ORPHANS, "machines").count(problem)
    ours, theirs = trial.losses(), peace.losses()
    for step in range(1, trial.steps + 1):
        off = abs(ours.get(step, math.inf) / theirs[step] - 1)
        problem = f"{name}: step {step}: {ours.get(step)}, not {theirs[step]}"
        findings.tally(LOSSES, "losses").count(problem if not off <= BOUND else None)
        key = "largest relative difference of a loss"
        findings.figures[key] = max(float(f"{off:.1e}"), findings.figures.get(key, 0.0))


def prepare(folder: Path, name: str, task: str, storage: str = "disk") -> Path:
    """The render of a variant, with a recorder in it."""
    folder = folder / storage
    (folder / name).mkdir(parents=True)
    parallelism, _, checkpoint = name.partition("_")
    answers = {"parallelism": parallelism, "checkpoint": checkpoint, "task": task}
    answers["storage"] = storage
    source = render(folder / name, tracker="none", package_name=name, **answers)
    package = source / name
    shutil.copy(Path(__file__).with_name("sample_recorder.py"), package)
    for file, what in (("data.py", "build_datasets"), ("callbacks.py", "callbacks")):
        at = ".." if "/" in file else "."
        text = (
            f"\n\nfrom {at} import sample_recorder\n\n{what} = sample_recorder.of_{what}({what})\n"
        )
        with open(package / file, "a", encoding="utf-8") as module:
            module.write(text)
    if "vocabulary" in (package / "data.py").read_text("utf-8"):
        rng = random.Random(0)
        words = ["".join(rng.choices("etaoinshrdlu", k=rng.randrange(2, 8))) for _ in range(800)]
        (source / "text.txt").write_text(" ".join(words), "utf-8")
    return source


def variant(
    source: Path, name: str, plans: dict[str, Changes], steps: int, store: dict[str, object]
) -> list[Trial]:
    """Run what is planned for a variant, each plan by itself; `store`: settings if not in peace."""
    trials = []
    for kind, changes in plans.items():
        elastic, more = kind.startswith("machines"), {} if kind == "peace" else store
        trial = Trial(name, source, source / f"{name}, {kind}", steps, elastic, more)
        trial.run(changes)
        trials.append(trial)
    return trials


def attempt(findings: Findings) -> None:
    """All variants that can have more than one rank, some with a store too; in part, one."""
    names, steps = [f"{a}_{b}" for a in PARALLELISMS[1:] for b in CHECKPOINTS], 320
    if findings.bounded:
        names, steps = names[-2:-1], 140
    tasks = (TASKS * len(names))[: len(names)]
    runs = []
    with contextlib.ExitStack() as stack:
        # One after the other: Cookiecutter changes the working directory, which all threads share.
        for name, task in zip(names, tasks, strict=True):
            hand = {"by hand": BY_HAND} if task == TASKS[0] else {}
            plans = BOUNDED if findings.bounded else {"peace": PEACE, "machines": MACHINES, **hand}
            runs.append((prepare(findings.folder, name, task), name, plans, steps, {}))
        if not findings.bounded:
            store = stack.enter_context(s3(stack.enter_context(pytest.MonkeyPatch.context())))
            plans = {"peace": PEACE, "machines, stored": MACHINES}
            for name, more in STORED.items():
                source = prepare(findings.folder, name, TASKS[0], "object_store")
                more = {"checkpoint.url": store.url(name), **more}
                runs.append((source, name, plans, steps, more))
        pool = stack.enter_context(ThreadPoolExecutor(2))  # most of the time is spent waiting
        for peace, *trials in pool.map(variant, *zip(*runs, strict=True)):
            for trial in trials:
                judge(findings, trial, peace)


if __name__ == "__main__":
    run_topic("elastic", attempt)
