"""Processes that a stage starts: how many there can be, plain or torchrun; none outlives it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from ..distributed import parallel
from ..errors import RankError, UserError
from ..run.hardware import usable_cores
from .stage import PACKAGE, StageConfig

# Variables by which torchrun tells a process its rank: the stage may have them, its children not.
OF_TORCHRUN = re.compile("TORCHELASTIC|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME|MASTER_")
Process = subprocess.Popen[str]


def most_ranks(config: StageConfig, device: torch.device) -> tuple[int, str]:
    """The most processes that can share the work here; with 1, why. UserError for too many."""
    asked, batch = config.workflow.ranks, config.train.global_batch_size
    devices = {"cpu": 2, "cuda": torch.cuda.device_count()}.get(device.type, 1)
    if ":" in config.device:  # as in cuda:1
        devices = 1
    most = asked or min(batch, devices)
    if most > devices and device.type != "cpu":
        raise UserError(f"--workflow.ranks {most}: --device {config.device} has only {devices}")
    if most > batch:
        problem = f"is more than --train.global-batch-size {batch}, which they share"
        raise UserError(f"--workflow.ranks {most} {problem}: lower it, or raise the batch")
    # Of those that are 1, the last is named.
    reasons = {
        devices: "there is one device here; --device cpu shows everything except its speed",
        batch: "--train.global-batch-size 1 cannot be divided",
        asked: "one process was asked for",
    }
    reason = reasons[1] if most == 1 else refusal(config, most)
    return (1, reason) if reason else (most, "")


def refusal(config: StageConfig, ranks: int) -> str:
    """Why so many processes cannot share the work; empty if they can."""
    try:
        parallel.check_ranks(config.parallel, ranks)
    except UserError as error:
        return str(error)
    return ""


def named(count: int, what: str) -> str:
    """As in 1 process, 2 processes."""
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}" + ("" if count == 1 else plural)


def leave(number: int, frame: types.FrameType | None) -> None:
    """Handle a stop signal by leaving, so that processes that were started are ended as well."""
    signal.signal(number, signal.SIG_IGN)  # it often comes twice
    sys.exit(128 + number)


def plain_environment() -> dict[str, str]:
    """The environment of a process that is no rank of this one's torchrun."""
    return {name: value for name, value in os.environ.items() if not OF_TORCHRUN.match(name)}


@contextlib.contextmanager
def started(
    ranks: int,
    *arguments: str,
    module: str = PACKAGE,
    threads: int | None = None,
    **environment: str,
) -> Iterator[Process]:
    """`python -m module arguments`, as one plain process, or as several `ranks` under torchrun.

    Each rank has `threads` threads (default: its share of the cores). The output goes to a pipe.
    When the block ends, by SIGTERM or Ctrl-C too, all that it started is killed; torchrun and its
    ranks also when this process is killed.
    """
    words = [module, *arguments]
    if ranks > 1:
        torchrun = [f"{PACKAGE}.distributed.launch", f"--nproc-per-node={ranks}"]
        words = [*torchrun, "-m", *words]
        threads = threads or max(1, usable_cores() // ranks)
        environment |= {"LAUNCHER_PID": str(os.getpid()), "OF_A_STAGE": "1"}  # for launch.py
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as launch.sh sets it
    earlier_handler = signal.signal(signal.SIGTERM, leave)
    try:
        # In a session of its own: Ctrl-C reaches this process only, which then ends all others.
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *words],
            env=plain_environment() | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill(process)
            process.communicate()  # until nobody holds the pipe any more
    finally:
        signal.signal(signal.SIGTERM, earlier_handler)


def run_task(
    module: str, folder: Path, *task: str, ranks: int = 1, seconds: float, **options: Any
) -> Any:
    """What `python -m workflow.<module> FOLDER TASK …` writes to FOLDER/TASK.json within that time.

    RankError when it fails. `options` as of `started`.
    """
    words, module_name = (str(folder), *task), f"{__package__}.{module}"
    with started(ranks, *words, module=module_name, **options) as process:
        finish(process, " ".join([module, *task]), seconds)
    return json.loads((folder / f"{task[0]}.json").read_text("utf-8"))


def finish(process: Process, task: str, seconds: float) -> str:
    """The output of a process that succeeds in time; else RankError with what it says went wrong.

    These are the first errors in its output, since torchrun prints much after them; else the end.
    """
    problem = ""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        problem = f"took more than {seconds:.0f} s"
    if process.returncode:
        problem = problem or f"ended with exit code {process.returncode}"
        lines = output.splitlines()
        shown = [line for line in lines if re.search("[Ee]rror: ", line)][:3] or lines[-15:]
        raise RankError("\n  ".join([f"{task} {problem}", *shown]))
    return output


def kill(process: Process) -> None:
    """Kill a process and everything that it started, unless it has ended."""
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        for each in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
