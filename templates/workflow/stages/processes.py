"""Processes that a stage starts, plain or under torchrun; none outlives the stage."""

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

from ..errors import RankError
from ..run.hardware import usable_cores
from .stage import PACKAGE

# Variables by which torchrun tells a process its rank: the stage may have them, its children not.
OF_TORCHRUN = re.compile("TORCHELASTIC|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME|MASTER_")


def leave(number: int, frame: types.FrameType | None) -> None:
    """Handle a stop signal by leaving, so that processes that were started are ended as well."""
    signal.signal(number, signal.SIG_IGN)  # it often comes twice
    sys.exit(128 + number)


@contextlib.contextmanager
def started(
    ranks: int,
    *arguments: str,
    module: str = PACKAGE,
    threads: int | None = None,
    **environment: str,
) -> Iterator[subprocess.Popen[str]]:
    """`python -m module arguments`, as one plain process (`ranks` 0) or as `ranks` under torchrun.

    Each rank has `threads` threads (default: its share of the cores). The output goes to a pipe.
    When the block ends, by SIGTERM too, all that it started is killed.
    """
    command = [sys.executable, "-m"]
    if ranks:
        command += [f"{PACKAGE}.distributed.launch", f"--nproc-per-node={ranks}"]
        command += ["--max-restarts=0", "-m"]
        threads = threads or max(1, usable_cores() // ranks)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as launch.sh sets it
    inherited = {name: value for name, value in os.environ.items() if not OF_TORCHRUN.match(name)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words, everything = [*command, module, *arguments], inherited | environment
    earlier_handler = signal.signal(signal.SIGTERM, leave)
    try:
        with subprocess.Popen(words, env=everything, start_new_session=True, **pipes) as process:
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

    One process runs plain, several run under torchrun.
    """
    words, module_name = (str(folder), *task), f"{__package__}.{module}"
    with started(ranks if ranks > 1 else 0, *words, module=module_name, **options) as process:
        finish(process, " ".join([module, *task]), seconds)
    return json.loads((folder / f"{task[0]}.json").read_text("utf-8"))


def finish(process: subprocess.Popen[str], task: str, seconds: float) -> str:
    """The output of a process that succeeds in time; else RankError with the end of its output."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise RankError(f"{task} took more than {seconds:.0f} s{_errors(output)}") from None
    if process.returncode:
        raise RankError(f"{task} ended with exit code {process.returncode}{_errors(output)}")
    return output


def kill(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    """Kill (or signal) a process and everything that it started, unless it has ended."""
    if process.poll() is None:
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """The processes below `pid` (Linux; elsewhere torchrun's workers end with it by themselves)."""
    pids = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pids += [int(child), *descendants(int(child))]
    return pids


def _errors(output: str) -> str:
    """The first errors in an output, since torchrun prints much after them; else its last lines."""
    lines = output.splitlines()
    shown = [line for line in lines if re.search("[Ee]rror: ", line)][:3] or lines[-15:]
    return "\n  ".join([":", *shown]) if shown else ""
