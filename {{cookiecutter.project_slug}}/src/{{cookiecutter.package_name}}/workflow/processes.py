"""Processes that a stage starts: plain or under torchrun, with nothing left over."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ..engine.control import RankError
from .gates import PACKAGE


@contextlib.contextmanager
def started(
    ranks: int,
    *words: str,
    module: str = PACKAGE,
    threads: int | None = None,
    log: Path | None = None,
    **environment: str,
) -> Iterator[subprocess.Popen[str]]:
    """`python -m module words`, as one plain process (`ranks` 0) or as `ranks` under torchrun.

    `threads` are those of each process (default: the cores shared out). The output goes to `log`,
    or into a pipe. Whatever happens, SIGTERM included, nothing of it outlives the block.
    """
    command = [sys.executable, "-m"]
    if ranks:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--max-restarts=0", "-m"]
        threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # Without this the store outlives a restart; see scripts/launch.sh.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with contextlib.ExitStack() as stack:
        stopping = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        stack.callback(signal.signal, signal.SIGTERM, stopping)
        output = subprocess.PIPE
        if log:
            output = stack.enter_context(open(log, "w", encoding="utf-8"))
        process = subprocess.Popen(
            [*command, module, *words],
            env=inherited | environment,
            stdout=output,
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
    """`kill -9` to a process and everything that it started."""
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


def wait_until(condition, process: subprocess.Popen[str], what: str, seconds: float) -> None:
    """Look every few milliseconds; RankError when time is up or the process has ended."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            raise RankError(f"{what}: the process ended first{_end_of(process.communicate()[0])}")
        if time.monotonic() > deadline:
            raise RankError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.002)


def _end_of(output: str | None) -> str:
    """The errors that it names, since torchrun says much after them; else the last lines."""
    lines = (output or "").splitlines()
    shown = [line for line in lines if re.search("[Ee]rror: ", line)][:3] or lines[-15:]
    return "\n  ".join([":", *shown]) if shown else ""
