"""The part of the kill storm with real starts: launch.sh, torchrun, plain processes."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .forked_jobs import Plan
from .jobs import rank_of

PATIENCE = 600.0  # seconds, for torchrun to start training
ORPHANS_LIVE = 60.0  # seconds at most, after what started them was killed: an import under load


@dataclass
class Launch:
    """A run as a user starts it; what it prints goes to a file."""

    source: Path
    plan: Plan
    run_dir: Path
    log: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    """In the environment of all its processes, by which they are found."""
    more: dict[str, str] = field(default_factory=dict)
    """What else is in it."""

    def __post_init__(self) -> None:
        """Start it."""
        words = ["train", "--preset", "tiny", "--device", "cpu", "--run-dir", str(self.run_dir)]
        for name, value in self.plan.settings.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        command = [sys.executable, "-m", self.plan.package]
        if self.plan.ranks:
            script = self.source.parent / "launch.sh"
            command = ["bash", str(script), "-n", str(self.plan.ranks)]
        own = {"PYTHONPATH": str(self.source), "PYTHON": sys.executable, "MAX_RESTARTS": "9"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, *words],
                env={**os.environ, **own, **self.more, "STRESS_MARK": self.mark},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self) -> None:
        """Wait for its end; RuntimeError when it did not end well."""
        try:
            code = self.process.wait(PATIENCE)
        finally:
            self.stop()
        if code:
            raise RuntimeError(f"exit code {code}: {self.log.read_text('utf-8')[-2000:]}")

    def stop(self) -> None:
        """Leave nothing behind."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def processes(self) -> list[int]:
        """Those that are alive."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                environment = b"\0" + (entry / "environ").read_bytes()
                if f"\0STRESS_MARK={self.mark}\0".encode() in environment:
                    found.append(pid)
        return found

    def ranks(self) -> list[int]:
        """Those that train."""
        if not self.plan.ranks:
            return [self.process.pid]
        return [pid for pid in self.processes() if rank_of(pid) is not None]

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Whether it came about before the run's end."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"no progress: {self.log.read_text('utf-8')[-2000:]}")
            time.sleep(0.005)
        return True

    def progress(self) -> tuple[int, int]:
        """Which attempt is writing the log of losses, and how many lines it has."""
        path = self.run_dir / "metrics.jsonl"
        try:
            return path.stat().st_ino, path.read_bytes().count(b"\n")  # resuming replaces the file
        except FileNotFoundError:
            return 0, 0

    def kill(self, whom: str, attempt: int, rng: random.Random) -> bool:
        """Kill within the next attempt; False if the run was over before.

        `whom`: "one rank", "all ranks", "launcher" or "launcher at the start".
        """
        if whom == "launcher at the start":
            if not self.wait_for(lambda: len(self.ranks()) >= self.plan.ranks):
                return False
            time.sleep(rng.uniform(0, 1))
        else:
            if not self.wait_for(lambda: self.progress()[0] not in (0, attempt)):
                return False
            first, further = self.progress()[1], rng.randrange(1, 30)
            if not self.wait_for(lambda: self.progress()[1] >= first + further):
                return False
        ranks = self.ranks()
        victims = {"one rank": [rng.choice(ranks)], "all ranks": ranks}
        for pid in victims.get(whom, [self.process.pid]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return True

    def gone(self) -> bool:
        """Whether all its processes have ended, once they have had time to."""
        deadline = time.monotonic() + ORPHANS_LIVE
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = self.processes()
        self.stop()
        return not left
