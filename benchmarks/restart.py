"""Seconds that a killed rank costs a job on one machine, and a fresh start that resumes.

python -m benchmarks.restart [--smoke]

The job has two ranks under launch.sh and the tiny preset, so that next to nothing is the model:
rank 1 gets SIGKILL, and the time goes to the first step logged after that. BESIDE=FOLDER, a
checkout of another version of this template, is measured in turns with this one.
"""

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .common import PACKAGE, ROOT, benchmark, beside_own_packages, render, series
from .startup import seconds_of

STEPS = ("--train.log-every", "1", "--checkpoint.every", "5", "--train.validate-every", "0")
TRAIN = ("train", "--preset", "tiny", "--device", "cpu", *STEPS, "--train.steps", "1000000")
SOON = 0.3  # seconds: no rank starts again within them, and what rank 0 had said is read by then
PATIENCE = 120.0


class Run:
    """A command that trains, and when it says that a step is done."""

    def __init__(self, project: Path, *command: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": beside_own_packages(project / "src"),
            "PYTHON": sys.executable,
        }
        self.process = subprocess.Popen(
            command,
            cwd=project,
            env=environment | {"MAX_RESTARTS": "1000"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.steps: queue.SimpleQueue[float] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("step "):
                self.steps.put(time.perf_counter())

    def step_after(self, moment: float) -> float:
        """When the first step was done after that moment."""
        while (done := self.steps.get(timeout=PATIENCE)) <= moment:
            pass
        return done

    def last_rank(self) -> int:
        """The process of the rank that was started last: each leads a session."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return max(pid for pid in map(int, path.read_text().split()) if os.getsid(pid) == pid)


@contextlib.contextmanager
def started(project: Path, *command: str) -> Iterator[Run]:
    """A run that is killed in the end."""
    run = Run(project, *command)
    try:
        yield run
    finally:
        run.process.kill()  # the ranks end with their launcher
        run.process.wait()
        time.sleep(1)


def restarts(project: Path, kills: int) -> list[float]:
    """Seconds from `kill -9` of a rank to the next step, of one job."""
    seconds = []
    shutil.rmtree(project / "runs", ignore_errors=True)
    script = "launch.sh" if (project / "launch.sh").exists() else "scripts/launch.sh"
    with started(project, "bash", script, "-n", "2", *TRAIN) as run:
        for _ in range(kills):
            run.step_after(time.perf_counter() + 2)
            os.kill(run.last_rank(), signal.SIGKILL)
            killed = time.perf_counter()
            seconds.append(run.step_after(killed + SOON) - killed)
    return seconds


def resumed(project: Path) -> float:
    """Seconds from the start of a plain process to its first step, resumed."""
    if not (project / "runs").exists():
        with started(project, sys.executable, "-m", PACKAGE, *TRAIN) as run:
            run.step_after(time.perf_counter() + 2)
    began = time.perf_counter()
    with started(project, sys.executable, "-m", PACKAGE, *TRAIN) as run:
        return run.step_after(began) - began


# Any optimizer's first step imports torch._dynamo, and who reads DCP's index imports DCP.
WITHIN_TORCH = "torch, torch._dynamo, torch.distributed.checkpoint"
IMPORTS = {"import of torch": "torch", "import of torch, dynamo and DCP": WITHIN_TORCH}


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """Job after job, the templates in turns."""
    jobs, kills = (1, 1) if smoke else (3, 3)
    templates = {"": ROOT}
    if beside := os.environ.get("BESIDE"):
        templates[f" ({Path(beside).name})"] = Path(beside)
    found: dict[str, list[float]] = {}
    projects = {}
    for name, template in templates.items():
        for ranks in ("ddp", "single"):
            where = folder / f"{len(projects)}"
            where.mkdir()
            source = render(where, template=template, parallelism=ranks, checkpoint="dcp_async")
            projects[name, ranks] = source.parent
    for _ in range(jobs):
        for name, modules in IMPORTS.items():
            seconds = [seconds_of("-c", f"import {modules}") for _ in range(kills)]
            found.setdefault(name, []).extend(seconds)
        for name in templates:
            times = restarts(projects[name, "ddp"], kills)
            found.setdefault(f"a rank is killed{name}", []).extend(times)
            plain = [resumed(projects[name, "single"]) for _ in range(kills)]
            found.setdefault(f"a plain start resumes{name}", []).extend(plain)
    return {
        "settings": {"jobs": jobs, "kills": kills},
        "series": {name: series(values, "s") for name, values in found.items()},
    }


if __name__ == "__main__":
    benchmark("restart", measure, ("torch", "numpy", "tyro"))
