"""Processes of the stages as copies of one that has imported torch (distributed/fork_server.py)."""

import math
import os
import select
import signal
import subprocess
import sys
import time

from ..distributed.fork_server import Child, ForkServer, preload

server: ForkServer | None = None


def prepare() -> None:
    """Make `copy` possible: as a process begins, before it imports what is yours."""
    global server
    if sys.platform == "linux":
        preload()  # of use in this process, too
        server = ForkServer()


def copy(command: list[str], environment: dict[str, str], piped: bool) -> "Copy | None":
    """Start `python -u -m` a module of this package; None where it cannot be a copy.

    What it writes is to be had by `communicate` if it is `piped`.
    """
    if server is None:
        return None
    output, theirs = os.pipe() if piped else (None, None)
    child = server.start(command, environment, theirs)
    if theirs is not None:
        os.close(theirs)
    if child is None and output is not None:
        os.close(output)
    return child and Copy(child.pid, output)


class Copy(Child):
    """A child process, with what the stages use of `subprocess.Popen`."""

    def __init__(self, pid: int, output: int | None) -> None:
        super().__init__(pid)
        self.output, self.written = output, b""

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it has written, once nothing holds its output any more; else TimeoutExpired."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.output is not None:
            left = None if timeout is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.output], [], [], left)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            if part := os.read(self.output, 2**16):
                self.written += part
            else:
                os.close(self.output)
                self.output = None
        self.wait(max(0.0, deadline - time.monotonic()))
        return self.written.decode(errors="replace"), None

    def wait(self, timeout: float = math.inf) -> int:
        """The exit code; TimeoutExpired after so many seconds."""
        return super().wait(timeout)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


Process = subprocess.Popen[str] | Copy
