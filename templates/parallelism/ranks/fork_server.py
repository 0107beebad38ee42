"""Processes as copies of one that has imported torch: no start waits for that.

They are children of the process that asks for them, as if it had started them itself: it sees how
they end, and they end with it (of Python's own fork server, multiprocessing's, they would be the
children). This package each copy imports by itself: its modules are yours, and may read RANK as
they are imported. Should an import have failed, started a thread or asked for a GPU, a copy is a
new Python after all. Linux only.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import json
import math
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence

import torch

from .world import die_with_the_launcher

PACKAGE = __name__.partition(".")[0]
# What takes long: optimizers import dynamo.
PRELOADED = ("safetensors.torch", "torch._dynamo", "torch.distributed.checkpoint", "tyro")
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36


class ForkServer:
    """Starts processes; to be made before this one has threads, or handles signals."""

    def __init__(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no child has an end
        self.connection, theirs = socket.socketpair()
        launcher = os.getpid()
        if os.fork():
            theirs.close()
        else:
            self.connection.close()
            serve(theirs, launcher)

    def start(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        output: int | None = None,
        group: int | None = None,
    ) -> "Child | None":
        """Start `python -u -m` a module of this package; None if this cannot be done here.

        It writes to `output`, a descriptor (default: where this process writes), and is of this
        process `group` (default: of a session of its own).
        """
        if [*command[:3]] != [sys.executable, "-u", "-m"] or not command[3].startswith(PACKAGE):
            return None
        request = json.dumps([command, environment, group]).encode()
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # the server's grandchild becomes a child of this process
        try:
            given = [] if output is None else [output]
            socket.send_fds(self.connection, [len(request).to_bytes(8, "big")], given)
            self.connection.sendall(request)
            pid = int.from_bytes(self.connection.recv(8), "big")
        except OSError:  # the server was killed
            return None
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)
        return Child(pid) if pid else None


class Child:
    """A child process, with what torchrun uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """What `poll` returns in the end; TimeoutExpired after so many seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code


def serve(connection: socket.socket, launcher: int) -> None:
    """Fork a process for each request: it runs the module, and then ends."""
    die_with_the_launcher()
    # Ctrl-C is sent to the whole group. Blocked, not ignored: a signal that comes right after a
    # fork waits until the copy can take it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    copies = preload() and threading.active_count() == 1 and not torch.cuda.is_initialized()
    gc.collect()
    gc.freeze()  # the collector would write to what the copies share
    sys.stdout.flush()
    while True:
        size, output, *_ = socket.recv_fds(connection, 8, 1)
        if not size:
            os._exit(0)
        text = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        command, environment, group = json.loads(text)
        if (pid := fork_for(launcher, group)) is None:
            connection.close()
            for stream in (1, 2) if output else ():
                os.dup2(output[0], stream)
        for descriptor in output:
            os.close(descriptor)
        if pid is None:
            become(command, environment, mask, copies)
        connection.sendall((pid or 0).to_bytes(8, "big"))


def preload() -> bool:
    """Import what takes long; whether all is there. A process that meets an error reports it."""
    with contextlib.suppress(Exception):
        for module in PRELOADED:
            importlib.import_module(module)
        return True
    return False


def fork_for(launcher: int, group: int | None) -> int | None:
    """Fork a child of the launcher, in a session of its own or in a `group`; returns None in it.

    Its parent ends at once, and the launcher, which asks for it, inherits it.
    """
    ready, told = os.pipe()
    if middle := os.fork():
        os.close(told)
        os.waitpid(middle, 0)
        with open(ready, "rb") as file:
            return int(file.read() or 0)
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    os.close(ready)
    os.setsid() if group is None else os.setpgid(0, group)
    while os.getppid() == parent:
        time.sleep(0.001)
    die_with_the_launcher()
    if os.getppid() != launcher:
        os._exit(1)  # it is gone
    os.write(told, str(os.getpid()).encode())
    os.close(told)
    return None


def become(
    command: list[str], environment: dict[str, str], mask: Iterable[int], copies: bool
) -> None:
    """Run a module as the new process `command` would."""
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # What torch asks, too, before it uses a GPU: even is_available() may spoil a fork.
    if not copies or torch.cuda._is_in_bad_fork():
        os.execve(command[0], command, environment)
    # Its command line stays that of the process that asked; `top` and `ps -o comm` show this.
    name = f"rank {environment['RANK']}" if "RANK" in environment else command[3]
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.rpartition(".")[2].encode())
    if threads := environment.get("OMP_NUM_THREADS"):
        # Its library has read the variable long before: "4", or "4,2" for nested regions.
        torch.set_num_threads(int(threads.partition(",")[0]))
    # As -u has it; and what the server writes to may be a file, with a place, where this is a pipe.
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.argv[1:] = command[4:]
    runpy.run_module(command[3], run_name="__main__", alter_sys=True)
    sys.exit()
