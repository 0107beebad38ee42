"""Kill a training run while it saves, and see what its restart makes of what is left."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import PUBLISHED, step_name
from ..checkpoint.publish import RESERVED, published
from ..errors import RankError
from . import processes

Launch = Callable[[], AbstractContextManager[subprocess.Popen[str]]]
MOMENTS = ("as it begins", "half way through", "as it is published")
TRIES = 3  # to meet each of them
PATIENCE = 1800.0  # seconds, for a run to get somewhere


@dataclass
class Kill:
    """A run that was killed in a save, and how it went on."""

    moment: str
    saving: int
    """The step whose save was under way."""
    newest: int
    """The step of the newest published checkpoint that was left."""
    done: int
    """Steps that were completed."""
    at: float
    """Wall-clock time."""
    restart: dict[str, Any] = field(default_factory=dict)
    """What the restart noted: the step it went on from, and when it got how far."""

    @property
    def lost(self) -> int:
        """Steps that had to be done again."""
        return self.done - self.restart["step"]

    @property
    def seconds(self) -> dict[str, float]:
        """From the kill to the end of the next step, and its parts."""
        main, end = self.restart["main"], self.restart["first_step"]
        restored = self.restart["restored"] or main
        parts = {"launch": main - self.at, "restore": restored - main, "first_step": end - restored}
        return {**parts, "total": end - self.at}


@dataclass
class End:
    """How a run that was killed and restarted came to its end."""

    digests: dict[str, str]
    losses: dict[int, float]
    leftovers: list[str]
    """What lies beside the published checkpoints."""


class Killing:
    """Kills and restarts the run FOLDER/name of so many steps, as `launch` starts it."""

    def __init__(self, launch: Launch, folder: Path, name: str, steps: int) -> None:
        self.launch, self.folder, self.run_dir = launch, folder, folder / name
        self.restart_file = folder / f"{name}.restart.json"
        self.last = step_name(steps)
        self.launches = 0
        self.kills: list[Kill] = []
        self.ends: list[End] = []

    def __call__(self) -> "Killing":
        """Kill it at each moment of a save, restart it each time, see it end.

        Where a run has ended before a kill met a save, it starts anew, a few times.
        """
        for moment in MOMENTS:
            for _ in range(TRIES):
                if self._run(moment):
                    break
        if self.run_dir.exists():
            self._run(None)
        return self

    def _run(self, moment: str | None) -> bool:
        """One launch, to its end or to a kill; whether the kill met that moment of a save."""
        self.launches += 1
        self.restart_file.unlink(missing_ok=True)
        with self.launch() as process:
            kill = self._strike(process, moment)
        if self.kills and not self.kills[-1].restart:
            self.kills[-1].restart = json.loads(self.restart_file.read_text("utf-8"))
        if kill:
            self.kills.append(kill)
        elif process.returncode == 0:
            self.ends.append(self._end())
            shutil.rmtree(self.run_dir)
        return kill is not None

    def _strike(self, process: subprocess.Popen[str], moment: str | None) -> Kill | None:
        """Kill it at that moment; None if it came to its end before, or died outside of a save.

        Its processes are stopped before it is judged whether they are still in the save, and go
        on if they are not: on a fast disk a save is over as soon as it is seen.
        """
        directory = self.run_dir / "checkpoints"
        seen = set(_names(directory))
        deadline = time.monotonic() + PATIENCE
        while not _has_ended(process):
            if time.monotonic() > deadline:
                raise RankError(f"a run of a few steps took more than {PATIENCE:.0f} s")
            target = self._target(directory, moment, seen)
            if not target:
                continue
            seen.add(target)
            _signal(process, signal.SIGSTOP)
            if not self._is_under_way(directory, target):
                _signal(process, signal.SIGCONT)
                continue
            at = time.time()
            processes.kill(process)
            process.communicate()  # until the last of them is gone
            if not (directory / target).exists():
                return None
            saving = int(target.removeprefix(RESERVED)[5:].split("-")[0])
            newest = int(published(directory)[-1].name[5:])
            return Kill(moment, saving, newest, max(losses_of(self.run_dir), default=0), at)
        processes.finish(process, "training to be killed", PATIENCE)
        return None

    def _target(self, directory: Path, moment: str | None, seen: set[str]) -> str | None:
        """What is to be met: a reservation, or what was just published, behind a checkpoint."""
        names = _names(directory)
        done = sorted(name for name in names if PUBLISHED.fullmatch(name))
        if moment == MOMENTS[-1]:
            new = [name for name in done[1:] if name not in seen and name != self.last]
            return new[0] if new else None
        if done and moment:
            begun = [name for name in names if name.startswith(RESERVED) and name not in seen]
            met = [name for name in begun if moment == MOMENTS[0] or _names(directory / name)]
            return met[0] if met else None
        return None

    def _is_under_way(self, directory: Path, target: str) -> bool:
        """Whether it is there, and nothing was published since, had we been slow to see it."""
        if PUBLISHED.fullmatch(target):
            return published(directory)[-1].name == target
        return (directory / target).exists()

    def _end(self) -> End:
        digests = json.loads((self.folder / "train.json").read_text("utf-8"))["digests"]
        return End(
            digests=digests[max(digests, key=int)],
            losses=losses_of(self.run_dir),
            leftovers=sorted(
                name
                for name in _names(self.run_dir / "checkpoints")
                if not PUBLISHED.fullmatch(name)
            ),
        )


def losses_of(run_dir: Path) -> dict[int, float]:
    """Loss by step, from the whole lines of metrics.jsonl; NaN where it was not finite."""
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").split("\n")[:-1]
    found = {record["step"]: record["loss"] for record in map(json.loads, lines)}
    return {step: math.nan if loss is None else loss for step, loss in found.items()}


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _has_ended(process: subprocess.Popen[str]) -> bool:
    """Wait a millisecond for it; what it prints is read meanwhile, lest it stop at a full pipe."""
    try:
        process.communicate(timeout=0.001)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal(process: subprocess.Popen[str], number: int) -> None:
    # The ranks before torchrun, which would look after them.
    for pid in reversed([process.pid, *processes.descendants(process.pid)]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
