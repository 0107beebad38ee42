"""Processes that a stage starts, plain or under torchrun: how many, and that none outlives it."""

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
    """Return the most processes that can share the work here; with 1 also why it is only one.

    UserError if more processes are asked for than there can be.
    """
    asked = config.workflow.ranks
    batch = config.train.global_batch_size
    devices = 1
    if device.type == "cpu":
        devices = max(2, asked)
    elif device.type == "cuda" and ":" not in config.device:
        # A device like cuda:1 was chosen on purpose and stays the only one.
        devices = torch.cuda.device_count()
    possible = min(batch, devices)
    most = asked or possible
    if most > possible:
        limits = f"--device {config.device} has {devices}, --train.global-batch-size is {batch}"
        raise UserError(f"--workflow.ranks {most} is too many: {limits}")
    if most > 1:
        reason = refusal(config, most)
        if reason:
            return 1, reason
        return most, ""
    if asked == 1:
        return 1, "one process was asked for"
    if batch == 1:
        return 1, "--train.global-batch-size 1 cannot be divided"
    return 1, "there is one device here; --device cpu shows everything except its speed"


def refusal(config: Any, ranks: int) -> str:
    """Return why this many processes cannot share the work; empty if they can."""
    try:
        parallel.check_ranks(config.parallel, ranks)
    except UserError as error:
        return str(error)
    return ""


def free_host_memory() -> int:
    """Return the free bytes of the machine or, if less, of this container (cgroup v2)."""
    free = psutil.virtual_memory().available
    # psutil does not know a container's limit. There may be none: no file, or the word "max".
    with contextlib.suppress(OSError, ValueError):
        free = min(free, free_in_container())
    return free


def free_in_container() -> int:
    """Return the bytes that the container's limit leaves; an error if it has no limit."""
    limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    table = Path("/sys/fs/cgroup/memory.stat").read_text()
    sizes = dict(line.split() for line in table.splitlines())
    # The kernel frees cached files when memory is asked for.
    return limit - used + int(sizes["inactive_file"])


def named(count: int, what: str) -> str:
    """Return a count with its noun, as in 1 process, 2 processes."""
    if count == 1:
        return f"{count} {what}"
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}{plural}"


def leave(number: int, frame: types.FrameType | None) -> None:
    """Handle a stop signal by leaving, so that processes that were started are ended as well."""
    # The signal often comes twice.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def plain_environment() -> dict[str, str]:
    """Return the environment for a process that is not a rank of this process's torchrun."""
    return {name: value for name, value in os.environ.items() if not OF_TORCHRUN.match(name)}


def run_task(module: str, folder: Path, task: str, **options: Any) -> Any:
    """Run `python -m workflow.<module> FOLDER TASK`; return what it writes to FOLDER/TASK.json.

    `options` are those of `run_module`.
    """
    run_module(f"{__package__}.{module}", str(folder), task, **options)
    return json.loads((folder / f"{task}.json").read_text("utf-8"))


def run_module(
    module: str, *words: str, ranks: int = 1, seconds: float, **environment: str
) -> None:
    """Run `python -m module words` as one plain process, or as several `ranks` under torchrun.

    RankError if it fails or takes longer than `seconds`. At the end, also after SIGTERM or Ctrl-C,
    all that it started is killed; torchrun and its ranks also when this process is killed.
    """
    command = [module, *words]
    if ranks > 1:
        torchrun = [f"{PACKAGE}.distributed.launch", f"--nproc-per-node={ranks}"]
        command = [*torchrun, "-m", *command]
        # launch.py reads these to end with this process.
        environment["LAUNCHER_PID"] = str(os.getpid())
        environment["OF_A_STAGE"] = "1"
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # launch.sh sets this, too.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    earlier_handler = signal.signal(signal.SIGTERM, leave)
    # In a new session: Ctrl-C reaches this process only, which then ends all others.
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
            problem = ""
            if process.returncode:
                problem = f"ended with exit code {process.returncode}"
    finally:
        # The kernel kills torchrun's ranks with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Returns when no process holds the pipe any more.
        output, _ = process.communicate()
        signal.signal(signal.SIGTERM, earlier_handler)
    if problem:
        name = " ".join([module, *words[1:]])
        raise RankError("\n  ".join([f"{name} {problem}", *lines_to_show(output)]))


def lines_to_show(output: str) -> list[str]:
    """Return the lines of a failed process's output that say why it failed."""
    lines = output.splitlines()
    # The first errors, since torchrun prints much after them.
    errors = [line for line in lines if re.search("[Ee]rror: ", line)]
    if errors:
        return errors[:3]
    return lines[-15:]
