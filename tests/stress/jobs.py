"""Runs of a render as processes, to be signalled, stopped and looked into from outside."""

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import render

from .common import Findings

LOOPBACK = "on one machine, all listening sockets are on loopback"
TINY = ("--preset", "tiny", "--device", "cpu", "--data.path", "text.txt", "--train.steps", "60")
TEXT = "Was ever woman in this humour wooed? Was ever woman in this humour won? "


class Render:
    """A render with a text to train on, in which job_faults.py injects faults; and its runs."""

    def __init__(self, folder: Path, package: str, **answers: str) -> None:
        folder.mkdir(parents=True)
        source = render(folder, package_name=package, **answers)
        self.package, self.source, self.folder = package, source, source.parent
        (self.folder / "text.txt").write_text(TEXT * 500)
        shutil.copy(Path(__file__).with_name("job_faults.py"), source / package)
        with open(source / package / "train.py", "a", encoding="utf-8") as file:
            file.write("\n\nimport sys\nfrom . import job_faults as faults\n")
            file.write("\nfaults.arm(sys.modules[__name__])\n")
        sys.path.insert(0, str(source))

    def module(self, name: str) -> Any:
        """A module of the render, in this process."""
        return importlib.import_module(f"{self.package}.{name}")

    def run_dir(self, run: str) -> Path:
        """Where a run lives."""
        return self.folder / "runs" / run

    def status(self, run: str) -> dict[str, Any]:
        """How a run says it stands."""
        path = self.run_dir(run) / "status.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else {"status": None}

    def checkpoint(self, run: str) -> tuple[int, dict[str, str], list[str]]:
        """Of the newest: its step, what its tensors' files hash to, problems."""
        manifests = self.module("checkpoint.manifest")
        found = self.module("checkpoint.publish").published(self.run_dir(run) / "checkpoints")
        if not found:
            return 0, {}, []
        manifest, problems = manifests.verify(found[-1])
        files = manifest["files"] if manifest else {}
        hashes = {n: e["sha256"] for n, e in files.items() if n != ".metadata"}
        return int(found[-1].name[5:]), hashes, problems


class Job:
    """A run under way: its launcher (or its one process), its ranks, and whatever they started."""

    def __init__(self, process: subprocess.Popen[str], ranks: int, log: Path) -> None:
        self.process, self.count, self.log = process, ranks, log
        self.seen: dict[int, str] = {}  # each with when it was started: numbers are given out again

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text("utf-8", errors="replace")

    def ranks(self) -> list[int]:
        """The processes that train, in the order of their ranks."""
        if not self.count:
            return [self.process.pid]
        found = {rank_of(child): child for child in children(self.process.pid)}
        return [found[rank] for rank in sorted(found.keys() - {None})]

    def everyone(self) -> list[int]:
        """The launcher, the ranks, their loaders."""
        found = [self.process.pid, *descendants(self.process.pid)]
        self.seen |= {pid: since for pid in found if (since := alive_since(pid))}
        return found

    def alive(self) -> list[int]:
        """Those of all that were ever seen which are still there."""
        return [pid for pid, since in self.seen.items() if alive_since(pid) == since]

    def wait_for(self, condition: Callable[[], object], seconds: float = 600) -> None:
        """Until it holds; RuntimeError when the job ends before or it takes too long."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"what was waited for did not come:\n{self.output[-3000:]}")
            time.sleep(0.01)

    def end(self, seconds: float) -> float | None:
        """Seconds until it ended by itself, or None."""
        started = time.monotonic()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return time.monotonic() - started

    def survivors(self, seconds: float = 10) -> list[int]:
        """Which of its processes outlive it by so much."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


@contextlib.contextmanager
def started(
    render: Render,
    ranks: int,
    run: str,
    *options: str,
    faults: Any = None,
    console: int | None = None,
    nohup: bool = False,
    **more: str,
) -> Iterator[Job]:
    """Train, with `ranks` processes or in a plain one (0); nothing outlives the block.

    It prints into a file, or into the descriptor `console`.
    """
    command = ["bash", "launch.sh", "-n", str(ranks)]
    if not ranks:
        command = [sys.executable, "-m", render.package]
    command = [*["nohup"] * nohup, *command, "train", *TINY, "--name", run, *options]
    log = render.folder / f"{run}.log"
    environment = {
        **os.environ,
        "PYTHONPATH": str(render.source),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "JOB_FAULTS": json.dumps(faults or {}),
        **more,
    }
    with (
        open(log, "w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            cwd=render.folder,
            env=environment,
            stdout=file if console is None else console,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        job = Job(process, ranks, log)
        try:
            yield job
        finally:
            job.everyone()
            for pid in job.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def rank_of(pid: int | str) -> int | None:
    """The rank that a process is (not one that it has forked); None if it is none."""
    with contextlib.suppress(OSError):
        if os.getsid(int(pid)) == int(pid):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return next((int(word[5:]) for word in variables if word.startswith(b"RANK=")), None)
    return None


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    with contextlib.suppress(OSError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def descendants(pid: int) -> list[int]:
    """Those, and theirs."""
    return [p for child in children(pid) for p in (child, *descendants(child))]


def alive_since(pid: int) -> str | None:
    """When a process was started, in clock ticks; None if it is gone or waits to be buried."""
    try:
        state, *more = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else more[18]


def listening(pids: list[int]) -> list[str]:
    """Addresses (as /proc/net has them, in hexadecimal) that these processes listen on."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(link))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.append(words[1].partition(":")[0])
    return found


def who_listens(findings: Findings, processes: list[int], case: str) -> None:
    """Look at every socket of a job that listens."""
    tally = findings.tally(LOOPBACK, "sockets")
    for address in listening(processes):
        tally.count(None if is_loopback(address) else f"{address} in {case}")


def is_loopback(address: str) -> bool:
    """127.0.0.0/8 or ::1, as /proc/net has them: each 32-bit word with its bytes turned round."""
    return address in ("0" * 24 + "01000000",) or (len(address) == 8 and address.endswith("7F"))
