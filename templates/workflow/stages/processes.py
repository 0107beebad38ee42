"""Start processes for a stage, plain or under torchrun, and end them with the stage."""

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

# Environment variables that torchrun sets. If a stage has some, its child processes must not.
OF_TORCHRUN = re.compile("TORCHELASTIC|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME|MASTER_")


def most_ranks(config: StageConfig, device: torch.device) -> tuple[int, str]:
    """Return the maximum number of processes to measure with and, if it is 1, the reason.

    Raises UserError if --workflow.ranks is larger than the number of devices or of samples in a
    global batch. If the parallel settings refuse the number, the result is 1.
    """
    asked = config.workflow.ranks
    batch = config.train.global_batch_size
    devices = 1
    if device.type == "cpu":
        # A CPU can run any number of processes. Two are enough for the checks, unless the user asks
        # for more.
        devices = max(2, asked)
    elif device.type == "cuda" and ":" not in config.device:
        # The user has not chosen a single device, such as cuda:1.
        devices = torch.cuda.device_count()
    if asked > devices:
        usable = named(devices, "device")
        raise UserError(f"--workflow.ranks {asked} is too many: {usable} can be used")
    if asked > batch:
        reason = f"--train.global-batch-size is {batch}"
        raise UserError(f"--workflow.ranks {asked} is too many: {reason}")
    most = asked or min(batch, devices)
    if most > 1:
        reason = refusal(config, most)
        if reason:
            return 1, reason
        return most, ""
    if asked == 1:
        return 1, "--workflow.ranks is 1"
    if batch == 1:
        return 1, "--train.global-batch-size 1 cannot be divided"
    return 1, "only one device is used; with --device cpu, all but the speed can be checked"


def refusal(config: Any, ranks: int) -> str:
    """Return the reason why the settings do not allow this many processes, or ""."""
    try:
        parallel.check_ranks(config.parallel, ranks)
    except UserError as error:
        return str(error)
    return ""


def free_host_memory() -> int:
    """Return the free bytes of the machine or, if less, of this container (cgroup v2)."""
    free = psutil.virtual_memory().available
    # psutil ignores the limit of a container. If there is no limit, the file is missing (OSError)
    # or contains "max" (ValueError).
    with contextlib.suppress(OSError, ValueError):
        free = min(free, free_in_container())
    return free


def free_in_container() -> int:
    """Return the bytes left of the container's limit; OSError or ValueError if it has no limit."""
    limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    table = Path("/sys/fs/cgroup/memory.stat").read_text()
    sizes = dict(line.split() for line in table.splitlines())
    # The kernel frees cached files when memory is needed.
    return limit - used + int(sizes["inactive_file"])


def named(count: int, what: str) -> str:
    """Return a count with its noun, such as "1 process" or "2 processes"."""
    if count == 1:
        return f"{count} {what}"
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}{plural}"


def leave(number: int, frame: types.FrameType | None) -> None:
    """Handle a stop signal by exiting, so that child processes are ended as well."""
    # Ignore a second signal, which often follows, so that it does not interrupt the exit.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def plain_environment() -> dict[str, str]:
    """Return the environment without torchrun's variables."""
    return {name: value for name, value in os.environ.items() if not OF_TORCHRUN.match(name)}


def run_task(module: str, folder: Path, task: str, **options: Any) -> Any:
    """Run a task of a module beside this one; return the content of FOLDER/TASK.json.

    `options` are `ranks`, `seconds` and environment variables for `run_module`.
    """
    run_module(f"{__package__}.{module}", str(folder), task, **options)
    return json.loads((folder / f"{task}.json").read_text("utf-8"))


def run_module(
    module: str, *words: str, ranks: int = 1, seconds: float, **environment: str
) -> None:
    """Run `python -m module words` as one process, or as several `ranks` under torchrun.

    `environment` has additional environment variables. Raises RankError if the module fails or
    takes longer than `seconds`. At the end, also after SIGTERM or Ctrl-C, any processes of the
    module that still run are killed. If this process itself is killed, torchrun and its ranks end.
    """
    command = [module, *words]
    if ranks > 1:
        torchrun = [f"{PACKAGE}.distributed.launch", f"--nproc-per-node={ranks}"]
        # `python -m` starts launch.py; this -m tells torchrun that `module` is a module, too.
        command = [*torchrun, "-m", *command]
        # From these, launch.py knows that it must end when this process ends.
        environment["LAUNCHER_PID"] = str(os.getpid())
        environment["OF_A_STAGE"] = "1"
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    # The child imports modules from the same paths as this process.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # As in launch.sh: the ranks create their own store instead of using torchrun's.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    earlier_handler = signal.signal(signal.SIGTERM, leave)
    # The child gets its own session. So Ctrl-C reaches only this process, which then kills it.
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *command],
        env=plain_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A process that is killed may have written only a part of a character.
        errors="replace",
        start_new_session=True,
    )
    # `problem` keeps this text if `communicate` below raises TimeoutExpired.
    problem = f"took more than {seconds:.0f} s"
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=seconds)
            problem = ""
            if process.returncode:
                problem = f"ended with exit code {process.returncode}"
    finally:
        # This does not reach the ranks of torchrun, which have sessions of their own. But on Linux
        # each rank has asked the kernel to kill it when torchrun is killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # This waits until all processes that hold the pipe have ended. It returns all output,
        # including the part that the first call has read.
        output, _ = process.communicate()
        signal.signal(signal.SIGTERM, earlier_handler)
    if problem:
        # Leave out the first word, which is a temporary folder.
        name = " ".join([module, *words[1:]])
        raise RankError("\n  ".join([f"{name} {problem}", *lines_to_show(output)]))


def lines_to_show(output: str) -> list[str]:
    """Return the lines of a failed process's output that explain the failure."""
    lines = output.splitlines()
    # Use the first errors, since torchrun prints many lines after them.
    errors = [line for line in lines if re.search("[Ee]rror: ", line)]
    if errors:
        return errors[:3]
    return lines[-15:]
