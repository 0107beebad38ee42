"""Processes that a stage starts: plain or under torchrun, with nothing left over."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ..commands import leave
from ..errors import RankError
from ..run.hardware import usable_cores
from .gates import PACKAGE

# What torchrun, even with one process, tells those it starts: these are not among them.
OF_TORCHRUN = re.compile("TORCHELASTIC|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME|MASTER_")


@contextlib.contextmanager
def started(
    ranks: int,
    *words: str,
    module: str = PACKAGE,
    threads: int | None = None,
    **environment: str,
) -> Iterator[subprocess.Popen[str]]:
    """`python -m module words`, as one plain process (`ranks` 0) or as `ranks` under torchrun.

    `threads` are those of each process (default: the cores shared out). The output goes into a
    pipe. Whatever happens, SIGTERM included, nothing of it outlives the block.
    """
    command = [sys.executable, "-m"]
    if ranks:
        command += [f"{PACKAGE}.distributed.launch", f"--nproc-per-node={ranks}"]
        command += ["--max-restarts=0", "-m"]
        threads = threads or max(1, usable_cores() // ranks)
    inherited = {name: it for name, it in os.environ.items() if not OF_TORCHRUN.match(name)}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # Without this the store outlives a restart; see scripts/launch.sh.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with contextlib.ExitStack() as stack:
        stopping = signal.signal(signal.SIGTERM, leave)
        stack.callback(signal.signal, signal.SIGTERM, stopping)
        process = subprocess.Popen(
            [*command, module, *words],
            env=inherited | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill(process)
            process.communicate()


def finish(process: subprocess.Popen[str], what: str, seconds: float) -> str:
    """Its output, once it has ended well; RankError with the end of its output otherwise."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise RankError(f"{what} took more than {seconds:.0f} s{_end_of(output)}") from None
    if process.returncode:
        raise RankError(f"{what} ended with exit code {process.returncode}{_end_of(output)}")
    return output or ""


def kill(process: subprocess.Popen[str]) -> None:
    """`kill -9` to a process and everything that it started, if it has not ended."""
    if process.poll() is not None:
        return  # its number may be another's by now
    for pid in [process.pid, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The processes below `pid` (Linux; elsewhere torchrun's workers end with it by themselves)."""
    found = []
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def _end_of(output: str | None) -> str:
    """The errors that it names, since torchrun says much after them; else the last lines."""
    lines = (output or "").splitlines()
    shown = [line for line in lines if re.search("[Ee]rror: ", line)][:3] or lines[-15:]
    return "\n  ".join([":", *shown]) if shown else ""
