"""Processes of the stages, forked from one that has imported torch (distributed/fork_server.py)."""

import math
import os
import select
import signal
import subprocess
import sys
import threading
import time

from ..distributed.fork_server import Child, ForkServer, preload

server: ForkServer | None = None


def prepare() -> None:
    """Make `fork` possible; to be called before model.py, data.py and the like are imported."""
    global server
    # A thread that an import has started would be missing in what is forked, its locks held.
    if sys.platform == "linux" and preload() and threading.active_count() == 1:
        server = ForkServer()


def fork(command: list[str], environment: dict[str, str], piped: bool) -> "Forked | None":
    """Start `python -u -m` a module of this package; None where it cannot be forked.

    `piped`: in a session of its own, and what it writes is for `communicate`.
    """
    if server is None:
        return None
    if not piped:
        child = server.start(command, environment, group=os.getpgrp())
        return child and Forked(child.pid, None)
    output, theirs = os.pipe()
    child = server.start(command, environment, theirs)
    os.close(theirs)
    if child is None:
        os.close(output)
    return child and Forked(child.pid, output)


class Forked(Child):
    """A child process, with what the stages use of `subprocess.Popen`."""

    def __init__(self, pid: int, output: int | None) -> None:
        super().__init__(pid)
        self.output, self.written = output, b""

    def communicate(self, timeout: float = math.inf) -> tuple[str, None]:
        """What it has written, once nothing holds its output any more; else TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while self.output is not None:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self.output], [], [], min(left, 3600.0))[0]
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            if ready and (part := os.read(self.output, 2**16)):
                self.written += part
            elif ready:
                os.close(self.output)
                self.output = None
        self.wait(max(0.0, deadline - time.monotonic()))
        return self.written.decode(errors="replace"), None

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


Process = subprocess.Popen[str] | Forked
