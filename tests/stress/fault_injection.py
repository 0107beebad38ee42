"""A file system that refuses what we want it to, at the call that we want, without being root.

A process asks the kernel (seccomp, Linux) to show some of its system calls to whoever holds the
other end, and to wait for the answer: do it, or an error number. It sees every call, also from C++
and of other threads too; only what is read through a memory map shows no call.
"""

import contextlib
import ctypes
import fcntl
import os
import platform
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

# Numbers of the calls; the place of the path or descriptor among the arguments (a path after the
# descriptor of a folder stands for both).
NUMBERS = {
    "x86_64": {
        **{"open": 2, "openat": 257, "write": 1, "writev": 20, "pwrite64": 18, "ftruncate": 77},
        **{"fsync": 74, "fdatasync": 75, "rename": 82, "renameat": 264, "renameat2": 316},
        **{"mkdir": 83, "mkdirat": 258, "unlink": 87, "unlinkat": 263, "rmdir": 84},
        **{"read": 0, "pread64": 17, "getdents64": 217, "seccomp": 317},
    },
    "aarch64": {
        **{"openat": 56, "write": 64, "writev": 66, "pwrite64": 68, "ftruncate": 46, "fsync": 82},
        **{"fdatasync": 83, "renameat": 38, "renameat2": 276, "mkdirat": 34, "unlinkat": 35},
        **{"read": 63, "pread64": 67, "getdents64": 61, "seccomp": 277},
    },
}.get(platform.machine(), {})
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}.get(platform.machine(), 0)
NAMES = {number: name for name, number in NUMBERS.items()}
WRITES = {"write", "writev", "pwrite64", "ftruncate", "fsync", "fdatasync"}
CHANGES = {"rename", "renameat", "renameat2", "mkdir", "mkdirat", "unlink", "unlinkat", "rmdir"}
READS = {"read", "pread64", "getdents64"}
OPENS = {"open", "openat"}
ON_DESCRIPTORS = WRITES | READS
TO_ALLOW, TO_ASK, GO_ON = 0x7FFF0000, 0x7FC00000, 1
RECEIVE, ANSWER = 0xC0502100, 0xC0182101


@dataclass(frozen=True)
class Call:
    """A call that waits for its answer."""

    rank: int
    pid: int
    name: str
    path: str
    flags: int = 0
    """Those with which a file is opened."""

    @property
    def kind(self) -> str:
        """Of opening, what makes a file and what opens a folder are apart."""
        if self.name not in OPENS:
            return self.name
        folder = "opendir" if self.flags & os.O_DIRECTORY else "open"
        return "create" if self.flags & os.O_CREAT else folder


Judge = Callable[[Call], int]
"""Gives the error number for a call, or 0 to let it be done."""


def cannot() -> str | None:
    """Why calls cannot be refused on this machine, if so."""
    if sys.platform != "linux" or not NUMBERS:
        return f"this needs Linux on {' or '.join(('x86_64', 'aarch64'))}"
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(show(()))
            os._exit(0)
        os._exit(1)
    return (
        "the kernel does not let a process watch another's calls" if os.waitpid(pid, 0)[1] else None
    )


def show(names: Iterable[str]) -> int:
    """From here on, wait at these calls for an answer; returns the other end, to be handed on."""
    numbers = [NUMBERS[name] for name in names if name in NUMBERS]
    load, equal, give = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, AUDIT), (give, 0, 0, TO_ALLOW), (load, 0, 0, 0)]
    for place, number in enumerate(numbers):
        program.append((equal, len(numbers) - place, 0, number))
    program += [(give, 0, 0, TO_ALLOW), (give, 0, 0, TO_ASK)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    wanted = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(packed)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges: what lets anybody do this
    end = libc.syscall(NUMBERS["seccomp"], 1, 8, wanted)
    if end < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return end


class Supervisor:
    """Answers the calls of some processes under a folder; all else is let be."""

    def __init__(self, folder: Path, judge: Judge) -> None:
        self.folder, self.judge = f"{folder.resolve()}/", judge
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ends: dict[int, int] = {}  # rank by descriptor
        self.poll = select.poll()
        self.poll.register(self.ours, select.POLLIN)

    def join(self, rank: int, names: Iterable[str]) -> None:
        """In a forked process: let this supervisor judge its calls of these names."""
        end = show(names)
        socket.send_fds(self.theirs, [struct.pack("i", rank)], [end])
        os.close(end)
        self.ours.close()
        self.theirs.close()

    def serve(self, until: int, seconds: float) -> bool:
        """Answer until there is something to read from a descriptor; False when time is up."""
        self.poll.register(until, select.POLLIN)
        while ready := self.poll.poll(seconds * 1000):
            for descriptor, event in ready:
                if descriptor == until:
                    self.poll.unregister(until)
                    return True
                if descriptor == self.ours.fileno():
                    message, ends, _, _ = socket.recv_fds(self.ours, 4, 1)
                    self.ends[ends[0]] = struct.unpack("i", message)[0]
                    self.poll.register(ends[0], select.POLLIN)
                elif event & select.POLLIN:
                    self._answer(descriptor)
                else:  # nobody is left there
                    self.poll.unregister(descriptor)
                    del self.ends[descriptor]
                    os.close(descriptor)
        self.poll.unregister(until)
        return False

    def close(self) -> None:
        """Leave: a caller that still waits gets ENOSYS."""
        for end in self.ends:
            os.close(end)
        self.ours.close()
        self.theirs.close()

    def _answer(self, end: int) -> None:
        asked = bytearray(80)
        try:
            fcntl.ioctl(end, RECEIVE, asked)
        except OSError:
            return  # it was killed meanwhile
        number, pid, _, call = struct.unpack_from("QIIi", asked)
        arguments = struct.unpack_from("6Q", asked, 32)
        error = 0
        with contextlib.suppress(OSError):  # killed meanwhile
            found = understood(self.ends[end], pid, NAMES[call], arguments)
            if found and f"{found.path}/".startswith(self.folder):
                error = self.judge(found)
        with contextlib.suppress(OSError):
            fcntl.ioctl(end, ANSWER, struct.pack("QqiI", number, 0, -error, 0 if error else GO_ON))


def understood(rank: int, pid: int, name: str, arguments: tuple[int, ...]) -> Call | None:
    """What a call is about, if that is a file."""
    if name in ON_DESCRIPTORS:
        return Call(rank, pid, name, os.readlink(f"/proc/{pid}/fd/{arguments[0]}"))
    at = int(name in ("openat", "renameat", "renameat2", "mkdirat", "unlinkat"))
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(arguments[at])
        path = memory.read(4096).partition(b"\0")[0].decode()
    folder = ctypes.c_int32(arguments[0] & 0xFFFFFFFF).value if at else -100
    base = os.readlink(f"/proc/{pid}/{'cwd' if folder == -100 else f'fd/{folder}'}")
    flags = arguments[at + 1] if name in OPENS else 0
    return Call(rank, pid, name, os.path.join(base, path), flags)
