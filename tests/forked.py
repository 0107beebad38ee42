"""Commands of renders as forks of a process that has imported torch: 0.1 s for a start, not 3 s.

In the tests `subprocess.Popen` is the class below. It starts `python -m` of a render's package, and
scripts of project/drills, from a fork server; whatever else is to be started, and what could tell
the difference, starts as always.
The real starts are tested by launch.sh and by the commands of the READMEs, which a shell starts.

The server is a child of the process that asks: what it starts through an intermediate process that
ends at once becomes that one's child, too, as if it had started it itself. A forked command that
starts processes, as torchrun and the stages do, gets a server of its own: they are forks, too.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.run"),
    *("safetensors.torch", "sklearn.datasets", "tyro", "tqdm"),
)
# Variables that are read before a command's own code: where they differ, it is started anew.
READ_EARLY = re.compile(
    "(TORCH(?!ELASTIC|_DISABLE_SHARE|_NCCL|INDUCTOR_CACHE)|ATEN|MKL|KMP|GOMP|OMP_(?!NUM_THREADS$)|LD_"
    "|ONEDNN|DNNL|MALLOC|CUDA"
    "|TMPDIR|LANG|LC_|PYTHON(?!PATH$|FAULTHANDLER$|UNBUFFERED$))"
)
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
MADV_COLLAPSE, HUGE = 25, 1 << 21  # Linux 6.1; the bytes of a huge page
DRILLS = Path(__file__).parent / "project/drills"
HEADER = 8  # bytes: the length of a request, the process id of a reply
STARTS_OTHERS = re.compile(
    r"-m (pytest|\S+\.distributed\.launch"
    r"|\S+ (workflow|baseline|compile|profile|scale|checkpoint))( |$)"
)
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
owner = os.getpid()  # the server is of this process: no child of it may ask for one
started_anew = subprocess.Popen
lock = threading.Lock()
server: socket.socket | None = None


class Popen(started_anew):
    """`subprocess.Popen`, which forks what can be forked."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        (executable, preexec, _, pass_fds, cwd, env, _, _, shell, *pipes) = rest
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, *user, new_session, group = (
            pipes
        )
        environment = dict(os.environ if env is None else env)
        folder = os.path.abspath(cwd or ".")
        pid = None
        plain = not (executable or preexec or pass_fds or shell)
        plain = plain and group == -1 and user == [None, None, None, -1]
        if plain and forkable(args, environment, folder):
            request = {
                "words": [os.fspath(word) for word in args],
                "environment": environment,
                "folder": folder,
                "group": None if new_session else os.getpgrp(),
            }
            streams = (p2cread, c2pwrite, errwrite)
            fds = [own if given == -1 else given for own, given in enumerate(streams)]
            pid = fork(request, fds)
        if pid is None:
            super()._execute_child(args, *rest)
        else:
            self.pid, self._child_created = pid, True
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def read_early(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that count before a command's own code runs."""
    return {name: value for name, value in environment.items() if READ_EARLY.match(name)}


@functools.cache
def early_here() -> dict[str, str]:
    """Those of this process, when it starts the first command: the server has the same."""
    return read_early(os.environ)


def forkable(args: Any, environment: dict[str, str], folder: str) -> bool:
    """Whether it is a command of a render or a drill, in an environment like this one."""
    if isinstance(args, str | bytes | os.PathLike) or "OMP_NUM_THREADS" not in environment:
        return False
    words = [word for word in map(os.fspath, args) if word != "-u"]
    if len(words) < 2 or words[0] != sys.executable:
        return False
    is_drill = Path(words[1]).parent == DRILLS
    if not is_drill and (len(words) < 3 or words[1] != "-m"):
        return False
    entries = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    package = "" if is_drill else words[2].partition(".")[0]
    if package == "pytest":  # a project's own tests
        package = "*"
    return (
        read_early(environment) == early_here()
        and os.getpid() == owner
        and (is_drill or any(any(Path(it).glob(f"{package}/train.py")) for it in entries))
        and not any(Path(entry, "sitecustomize.py").exists() for entry in entries)
    )


def fork(request: dict[str, Any], fds: list[int]) -> int | None:
    """Process id of what the server has started; None if there is no server any more."""
    global server
    prctl = ctypes.CDLL(None).prctl
    text = json.dumps(request).encode()
    with lock:
        if server is None:
            server, theirs = socket.socketpair()
            with theirs:
                plain = {name: it for name, it in os.environ.items() if name != "PYTHONPATH"}
                started_anew([sys.executable, __file__], stdin=theirs, env=plain)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(server, [len(text).to_bytes(HEADER, "big")], fds)
            server.sendall(text)
            if pid := int.from_bytes(server.recv(HEADER), "big"):
                return pid
            server = None  # it is gone: the next start makes another
        except OSError:
            server = None
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)
    return None


def serve(connection: socket.socket) -> None:
    """Fork a process for each request; it returns from here and runs its command."""
    while True:
        header, fds, *_ = socket.recv_fds(connection, HEADER, 3)
        if not header:
            os._exit(0)
        text = connection.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
        if (pid := fork_for(os.getppid())) is None:
            connection.close()
            for own, given in enumerate(fds):
                os.dup2(given, own)
            os.closerange(3, max(fds) + 1)
            become(**json.loads(text))
            return
        for given in fds:
            os.close(given)
        connection.sendall(pid.to_bytes(HEADER, "big"))


def fork_its_processes() -> None:
    """Give a command a server of its own; returns in it, and in each process that it starts."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    global server, owner
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        server, owner = ours, os.getpid()
        subprocess.Popen = subprocess_handler.Popen = Popen
        return
    ours.close()
    # It ends with the command, not with the signals that stop a group of processes.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    serve(theirs)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def fork_for(requester: int) -> int | None:
    """Fork a child of the process that asked; returns None in it, else its process id."""
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
    while os.getppid() == parent:
        time.sleep(0.0005)
    if os.getppid() != requester:
        os._exit(1)  # it is gone
    os.write(told, str(os.getpid()).encode())
    os.close(told)
    return None


def become(words: list[str], environment: dict[str, str], folder: str, group: int | None) -> None:
    """Be as new a process as `words` would be, up to its first line."""
    import torch

    os.setsid() if group is None else os.setpgid(0, group)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv = words
    words = [word for word in words[1:] if word != "-u"]
    sys.argv[:] = words[1:] if words[0] == "-m" else words
    first = folder if words[0] == "-m" else str(DRILLS)
    sys.path[:0] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    unbuffered = "-u" in sys.orig_argv or "PYTHONUNBUFFERED" in environment
    for name, own in (("stdout", 1), ("stderr", 2)):  # the server's may be files, not pipes
        raw: Any = open(own, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        lines = own == 2 or os.isatty(1)
        stream = io.TextIOWrapper(raw, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, stream)
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


def settle() -> None:
    """Make forks cheap: the collector writes to nothing that is there, and huge pages hold it.

    A fork and its end take time for each page, 25 ms for the 300 MB of torch; for one in huge pages
    10 ms. Where the kernel cannot, nothing changes.
    """
    gc.collect()
    gc.freeze()
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        area, rights, _, _, _, *name = line.split()
        start, end = (int(address, 16) for address in area.split("-"))
        start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if rights == "rw-p" and name in ([], ["[heap]"]) and start < end:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def main() -> None:
    """Import what takes long, and be the server."""
    del sys.path[0]  # this folder
    for name in PRELOADED:
        importlib.import_module(name)
    assert threading.active_count() == 1, "what has threads cannot be forked"
    settle()
    serve(socket.socket(fileno=os.dup(0)))
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"python")
    if STARTS_OTHERS.search(" ".join(sys.orig_argv)):
        fork_its_processes()
    code: Any = 0
    try:
        if Path(sys.argv[0]).parent == DRILLS:
            # What is here is set aside already, and need not be taken back and set aside again.
            gc.freeze = gc.unfreeze = lambda: None
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = 1
        traceback.print_exc()
    # As Python ends, except that it would go through all objects and free them: for half a second.
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
