"""A storm of kills over the forked runs of one plan, and what is compared with a run in peace."""

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import TASKS, render
from tests.forked import settle

from .common import Findings, Tally
from .forked_jobs import DONE, PATIENCE, PHASES, PID, RESTORED, SAVING, Job, Plan

PARALLELISMS = ("single", "ddp", "fsdp")
CHECKPOINTS = ("torch_save", "dcp", "dcp_async")
WHOM = ("one rank", "all ranks", "launcher")
EVERY, STEPS = 4, 16
GRACE = 120.0  # seconds, of launch.sh, after which torchrun kills
# Chains in a row without a kill. If a phase is never entered, no number of chains is enough.
MOST_IN_VAIN = 20
SETTINGS = {
    "train.steps": STEPS,
    "train.log_every": 1,
    "train.validate_every": 6,
    "checkpoint.every": EVERY,
    "checkpoint.keep": 2,
}
COMMON_PHASES = (
    *("starting", "setting up", "restoring", "training", "validating"),
    *("uploading", "hashing", "renaming", "pruning"),
)
ENDS = "a killed and restarted run ends with the bits of an uninterrupted one"
WHOLE = "after a kill, each checkpoint equals that of an uninterrupted run, bit for bit"
ORPHANS = "no process of a killed job survives, including DataLoader workers"
LOST = "a kill costs at most one save interval and the upload in progress"
STOPPED = "a run that is stopped between saves saves its last step, bit for bit"
NEWEST = "a restart resumes from the newest published checkpoint"
Contents = dict[int, dict[str, str]]


def renders(folder: Path) -> dict[str, Path]:
    """All nine variants by name, rendered and on the path; tasks alternate."""
    sources = {}
    for i, (parallelism, checkpoint) in enumerate(
        (p, c) for p in PARALLELISMS for c in CHECKPOINTS
    ):
        name = f"{parallelism}_{checkpoint}"
        (folder / name).mkdir(parents=True)
        answers = {
            "parallelism": parallelism,
            "checkpoint": checkpoint,
            "task": TASKS[i % len(TASKS)],
        }
        sources[name] = render(folder / name, package_name=name, tracker="none", **answers)
        sys.path.insert(0, str(sources[name]))
    return sources


def plan_of(name: str, source: Path, ranks: int = 2, **more: Any) -> Plan:
    """The run of a variant: on so many ranks, or one plain process."""
    settings = SETTINGS | ({"train.precision": "bf16"} if name.startswith("fsdp") else {})
    if name.split("_")[0] != "single":
        settings |= {"parallel.timeout_minutes": 1.0}
    if "vocabulary" in (source / name / "data.py").read_text("utf-8"):
        text = source / "text.txt"
        text.write_text("Was ever woman in this humour wooed? " * 100, "utf-8")
        settings |= {"data.path": text}
    return Plan(name, settings | more, 0 if name.startswith("single") else ranks)


def contents(run_dir: Path) -> Contents:
    """Digests of the files of each published checkpoint, by step; {} of one that is not whole."""
    found = {}
    for path in run_dir.glob("checkpoints/step_????????"):
        try:
            files = json.loads((path / "manifest.json").read_text("utf-8"))["files"]
            whole = all((path / n).stat().st_size == entry["size"] for n, entry in files.items())
        except FileNotFoundError:
            if not path.exists():  # it was pruned just now
                continue
            files, whole = {}, False
        found[int(path.name[5:])] = digests(files) if whole else {}
    return found


def digests(files: dict[str, Any]) -> dict[str, str]:
    """Of what a manifest names, all that has the same bits in each run.

    DCP's index has a random name of the save in it; all tensors are in the other files.
    """
    return {name: entry["sha256"] for name, entry in files.items() if name != ".metadata"}


def losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step, from the whole lines of the log."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in map(json.loads, lines)}


@dataclass
class Storm:
    """Kills the runs of one plan, chain after chain, and compares them with an undisturbed one."""

    plan: Plan
    folder: Path
    findings: Findings
    rng: random.Random
    hits: Counter[str]
    """Kills by phase and by whom they went to, over all storms."""
    contents: Callable[[Path], Contents] = contents
    """The checkpoints of a run."""
    undisturbed: Contents = field(default_factory=dict)
    expected: dict[int, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0
    chains: int = 0
    target: tuple[str, int, str | None] | None = None
    """Whom to kill, in which rank's which phase, if that shall not be drawn."""
    template: Path | None = None
    """What a chain begins with, if not with nothing."""
    stops: bool = False
    """Whether every second time there is a stop between saves, not a kill."""
    linger: Callable[[Path], object] | None = None
    """Waits within a phase of a run for the moment to kill, if not some milliseconds at most."""

    def __post_init__(self) -> None:
        """Run it undisturbed."""
        self.steps, self.every = (
            self.plan.settings[name] for name in ("train.steps", "checkpoint.every")
        )
        self.folder.mkdir(parents=True)
        started = time.monotonic()
        run_dir = self.folder / "undisturbed"
        every = 1 if self.stops else self.every
        settings = self.plan.settings | {"checkpoint.keep_every": 1, "checkpoint.every": every}
        plan = dataclasses.replace(self.plan, settings=settings)
        job = Job(plan, run_dir, self.folder / "undisturbed.log")
        if job.gone(3600) is None or job.code:  # thousands of steps take long on a busy machine
            raise RuntimeError(f"{plan.package}: {job.log.read_text('utf-8')[-3000:]}")
        self.seconds = time.monotonic() - started
        self.undisturbed, self.expected = self.contents(run_dir), losses(run_dir)
        assert len(self.expected) == self.steps
        assert sorted(self.undisturbed) == list(range(every, self.steps + 1, every))

    def kill(self, times: int) -> None:
        """Chains of kills, until there were so many."""
        done = in_vain = 0
        while done < times:
            if in_vain == MOST_IN_VAIN:
                raise RuntimeError(
                    f"{in_vain} runs ended before they could be killed: see {self.folder}"
                )
            run_dir = self.begin()
            in_vain += 1
            for _ in range(min(6, times - done)):
                stop = self.stops and done % 2 == 0
                if self.stop_once(run_dir) if stop else self.kill_once(run_dir):
                    done += 1
                    in_vain = 0
                else:
                    break
            self.end(run_dir)

    def begin(self) -> Path:
        """Where a chain of kills is to run."""
        self.chains += 1
        run_dir = self.folder / f"chain-{self.chains}"
        if self.template:
            copy_run(self.template, run_dir)
        return run_dir

    def tally(self, promise: str, unit: str = "kills") -> Tally:
        """Of all storms together."""
        return self.findings.tally(promise, unit)

    def _draw(self) -> tuple[str, int, str | None]:
        """Whom to kill, of which rank it depends, and in which phase (None: whenever)."""
        if self.target:
            return self.target
        rank = self.rng.randrange(max(1, self.plan.ranks))
        kinds = WHOM if self.plan.ranks else WHOM[:1]
        whom = min(kinds, key=lambda it: (self.hits[it], self.rng.random()))
        phases = list(COMMON_PHASES)
        phases += ["staging"] * self.plan.package.endswith("async")
        phases += ["compiling"] * ("compile.mode" in self.plan.settings)
        if rank:  # what only rank 0 does, or others have nothing to do with
            only_first = {"renaming", "pruning"}
            only_first |= {"hashing"} if self.plan.package.endswith("torch_save") else set()
            phases = [phase for phase in phases if phase not in only_first]
        rare = sorted(phases, key=lambda it: (self.hits[it], self.rng.random()))
        return whom, rank, self.rng.choice(rare[:3]) if self.rng.random() < 0.6 else None

    def kill_once(self, run_dir: Path) -> bool:
        """One run up to a kill; False if it ended before."""
        whom, rank, phase = self._draw()
        before = max(self.contents(run_dir), default=0)
        armed = (-1, 0, 0)
        if phase:
            first = self.linger or phase in ("starting", "setting up", "restoring")
            skip = 0 if first else self.rng.randrange(3)
            armed = (PHASES.index(phase), skip, rank)
        log = self.folder / f"chain-{self.chains}.log"
        job = Job(self.plan, run_dir, log, armed)
        place = f"{self.plan.package}, {whom} killed, rank {rank}, phase {phase}"
        moment = PATIENCE if phase else self.rng.uniform(0, self.seconds)
        if (call := job.wait(moment)) is None and phase:
            job.gone(0)
            self.tally(ENDS, "runs").count(f"{place}: it hung, {_end_of(log)}")
            return False
        if call == b"!" and self.linger:
            self.linger(run_dir)
        elif call == b"!":
            time.sleep(10 ** self.rng.uniform(-5, -2.3))
        deadline = time.monotonic() + 20  # on a busy machine a rank takes seconds to be there
        while not job.board.of(rank)[PID] and time.monotonic() < deadline:
            time.sleep(0.001)
        at = job.board.most(DONE)
        for pid in job.victims(whom, rank) if call != b"" else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A rank that compiles takes a stop signal afterwards, which on busy cores is a while.
        patience = GRACE if "compile.mode" in self.plan.settings else 20.0
        left = job.gone(patience)
        done, saving = job.board.most(DONE), job.board.of(0)[SAVING]
        if job.code == 0:
            return False  # it was over
        if call == b"":
            self.tally(ENDS, "runs").count(f"{place}: it failed unkilled, {_end_of(log)}")
            return False
        kinds = {whom, "kills", f"{self.plan.ranks} ranks"}
        kinds |= {"compiled"} if "compile.mode" in self.plan.settings else set()
        self.hits.update(job.phases(whom, rank) | kinds)
        problem = f"{place}: still there after {patience:.0f} s" if left is None else None
        # The kernel ends a rank when its launcher has ended: some short steps later. One that is
        # not ended at all trains on to the last step.
        if at <= self.steps // 2 and done == self.steps:
            problem = f"{place}: trained on from step {at} to the end"
        self.tally(ORPHANS).count(problem)
        there = self.contents(run_dir)
        wrong = self.wrong(run_dir)
        self.tally(WHOLE).count(f"{place}: steps {wrong}" if wrong else None)
        self._resumed(job, before, place)
        newest = max(there, default=0)
        allowed = self.every + (done - saving if saving else 0)
        lost = done - newest if done else 0
        self.hits["lost"] += max(0, lost)
        self.hits["most lost"] = max(self.hits["most lost"], lost)
        problem = f"{place}: {lost} steps, {allowed} allowed" if lost > allowed else None
        self.tally(LOST).count(problem)
        return True

    def stop_once(self, run_dir: Path) -> bool:
        """One run up to a stop between two saves; False if it ended before."""
        whom, rank = self.rng.choice(WHOM[:2]), self.rng.randrange(max(1, self.plan.ranks))
        before = max(self.contents(run_dir), default=0)
        most = min(before + 2 * self.every, self.steps - 1)
        between = [step for step in range(before + 1, most) if step % self.every]
        if not between:
            return False
        at, log = self.rng.choice(between), self.folder / f"chain-{self.chains}.log"
        job = Job(self.plan, run_dir, log)
        deadline = time.monotonic() + PATIENCE
        while job.board.most(DONE) < at and time.monotonic() < deadline:
            if job.wait(0.001) == b"":
                break
        for pid in job.victims(whom, rank):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        left = job.gone(GRACE)
        status = json.loads((run_dir / "status.json").read_text("utf-8"))
        if status["status"] == "finished":
            return False
        newest, wrong = max(self.contents(run_dir), default=0), self.wrong(run_dir)
        good = left is not None and job.code == 0 and status["status"] == "preempted"
        problem = f"{self.plan.package}, {whom} told to stop at {at}: "
        if not good or status["step"] != newest or newest < at:
            problem += f"code {job.code}, newest {newest}, {status}, {_end_of(log)}"
        elif wrong:
            problem += f"other bits at {wrong}"
        else:
            problem = None
        self.tally(STOPPED, "stops").count(problem)
        self._resumed(job, before, f"{self.plan.package}, stopped at {at}")
        self.hits["stops between saves"] += 1
        return True

    def _resumed(self, job: Job, newest: int, place: str) -> None:
        if newest and (restored := job.board.most(RESTORED)):
            problem = None if restored - 1 == newest else f"{place}: {restored - 1} not {newest}"
            self.tally(NEWEST, "restarts").count(problem)

    def end(self, run_dir: Path) -> None:
        """Let a chain come to its end, and compare that."""
        log = self.folder / f"chain-{self.chains}-end.log"
        before = max(self.contents(run_dir), default=0)
        job = Job(self.plan, run_dir, log)
        if job.gone() is None or job.code:
            problem = f"the restart did not end well, {_end_of(log)}"
        else:
            problem = self.differences(run_dir)
        place = f"{self.plan.package}, chain {self.chains}"
        self._resumed(job, before, place)
        self.tally(ENDS, "runs").count(f"{place}: {problem}" if problem else None)

    def wrong(self, run_dir: Path) -> list[int]:
        """Steps whose published checkpoints differ from the undisturbed run's."""
        there = self.contents(run_dir)
        return [step for step, files in there.items() if files != self.undisturbed.get(step)]

    def differences(self, run_dir: Path) -> str | None:
        """What is not as in the undisturbed run, if anything."""
        there = self.contents(run_dir)
        if there.get(self.steps) != self.undisturbed[self.steps]:
            return "other bits in the last checkpoint"
        if losses(run_dir) != self.expected:
            return "another log of losses"
        left = [p.name for p in run_dir.glob("checkpoints/*") if not p.name.startswith("step_")]
        left += [p.name for p in run_dir.glob("checkpoints/*damaged*")]
        return f"left over: {left}" if left else None


def copy_run(run_dir: Path, to: Path) -> None:
    """Copy a run directory; what is in checkpoints, which nobody changes, is linked."""
    linked = lambda a, b: (os.link if "/checkpoints/" in a else shutil.copy)(a, b)  # noqa: E731
    shutil.copytree(run_dir, to, copy_function=linked)


def import_all(names: Iterable[str]) -> None:
    """Import what a rank needs, so that a fork has it; nothing here may compute."""
    # A process with threads cannot be forked, and another number of threads gives other bits. torch
    # reads the variable only when it is imported: it is for processes that start anew.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for name in names:
        for part in ("__main__", "train"):
            importlib.import_module(f"{name}.{part}")
        of_task = importlib.import_module(f"{name}.callbacks")
        if hasattr(of_task, "Sample"):
            of_task.Sample.length = 2  # tokens; more take longer than all that is tried
    for part in ("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor"):
        importlib.import_module(part)
    settle()
    gc.freeze = gc.unfreeze = lambda: None  # by which a run would undo it


def _end_of(log: Path) -> str:
    return " | ".join(log.read_text("utf-8", "replace").splitlines()[-4:])
