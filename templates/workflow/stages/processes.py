"""Processes that a stage starts: how many there can be, plain or torchrun; none outlives it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import types
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


def most_ranks(config: StageConfig, device: torch.device) -> tuple[int, str]:
    """The most processes that can share the work here; with 1, why. UserError for too many."""
    asked, batch = config.workflow.ranks, config.train.global_batch_size
    devices = max(2, asked) if device.type == "cpu" else 1
    if device.type == "cuda" and ":" not in config.device:  # cuda:1 is one of many
        devices = torch.cuda.device_count()
    most = asked or min(batch, devices)
    if most > min(batch, devices):
        limits = f"--device {config.device} has {devices}, --train.global-batch-size is {batch}"
        raise UserError(f"--workflow.ranks {most} is too many: {limits}")
    if most > 1:
        reason = refusal(config, most)
        return (1, reason) if reason else (most, "")
    if asked == 1:
        return 1, "one process was asked for"
    if batch == 1:
        return 1, "--train.global-batch-size 1 cannot be divided"
    return 1, "there is one device here; --device cpu shows everything except its speed"


def refusal(config: Any, ranks: int) -> str:
    """Why so many processes cannot share the work; empty if they can."""
    try:
        parallel.check_ranks(config.parallel, ranks)
    except UserError as error:
        return str(error)
    return ""


def free_host_memory() -> int:
    """Bytes that are free on the machine or, if it has a limit (cgroup v2), in this container."""
    free = [psutil.virtual_memory().available]
    # psutil does not know a container's limit. What the kernel caches of files, it gives back.
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
        paths = (f"/sys/fs/cgroup/memory.{name}" for name in ("max", "current", "stat"))
        limit, used, table = (Path(path).read_text() for path in paths)
        caches = dict(line.split() for line in table.splitlines())
        free.append(int(limit) - int(used) + int(caches["inactive_file"]))
    return min(free)


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


def run_task(module: str, folder: Path, task: str, **options: Any) -> Any:
    """What `python -m workflow.<module> FOLDER TASK` writes to FOLDER/TASK.json (`run_module`)."""
    run_module(f"{__package__}.{module}", str(folder), task, **options)
    return json.loads((folder / f"{task}.json").read_text("utf-8"))


def run_module(
    module: str, *words: str, ranks: int = 1, seconds: float, **environment: str
) -> None:
    """Run `python -m module words` as one plain process, or as several `ranks` under torchrun."""
    # RankError if it fails, or takes more than so many seconds. At the end, by SIGTERM or Ctrl-C
    # too, all that it started is killed; torchrun and its ranks also when this process is killed.
    command = [module, *words]
    if ranks > 1:
        torchrun = [f"{PACKAGE}.distributed.launch", f"--nproc-per-node={ranks}"]
        command = [*torchrun, "-m", *command]
        environment |= {"LAUNCHER_PID": str(os.getpid()), "OF_A_STAGE": "1"}  # for launch.py
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as launch.sh sets it
    earlier_handler = signal.signal(signal.SIGTERM, leave)
    # In a session of its own: Ctrl-C reaches this process only, which then ends all others.
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *command],
        env=plain_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    problem = f"took more than {seconds:.0f} s"
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=seconds)
            problem = process.returncode and f"ended with exit code {process.returncode}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the kernel kills torchrun's ranks with it
        output, _ = process.communicate()  # until nobody holds the pipe any more
        signal.signal(signal.SIGTERM, earlier_handler)
    if problem:
        # The first errors, since torchrun prints much after them; else the end.
        lines = output.splitlines()
        shown = [line for line in lines if re.search("[Ee]rror: ", line)][:3] or lines[-15:]
        raise RankError("\n  ".join([f"{' '.join([module, *words[1:]])} {problem}", *shown]))
