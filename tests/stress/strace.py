"""Records the file-system calls of a program with strace, and reads what it has written."""

import re
from pathlib import Path
from typing import NamedTuple

CALLS = (
    "open,openat,openat2,creat,close,write,pwrite64,writev,pwritev,pwritev2,sendfile,splice,"
    "copy_file_range,truncate,ftruncate,fallocate,lseek,dup,dup2,dup3,fsync,fdatasync,sync,syncfs,"
    "sync_file_range,rename,renameat,renameat2,mkdir,mkdirat,rmdir,unlink,unlinkat,link,linkat,"
    "symlink,symlinkat,mknodat"
)
OPTIONS = ["-f", "-y", "-s", str(1 << 22), "-xx", "--seccomp-bpf", "-e", f"trace={CALLS}"]
BEGINNING = re.compile(r"(\d+) +(\w+)\((.*)")
RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)")
ENDING = re.compile(r"(.*)\) += (-?\d+)(?:<(.*)>)?(?: E[A-Z]+ .*)?")
FILE = re.compile(r"(-?\d+|AT_FDCWD)(?:<([^>]*)>)?(?:\(deleted\))?")
BYTES = re.compile(r'"([^"]*)"')


class Call(NamedTuple):
    """A system call that succeeded; it began and ended in these lines of the trace."""

    name: str
    words: list[str]
    result: int
    opened: str
    began: int
    ended: int


def calls(trace: Path, wanted: re.Pattern[str]) -> dict[str, list[Call]]:
    """The calls whose line has what is wanted, by its first group, in the order they returned."""
    found: dict[str, list[Call]] = {}
    begun: dict[str, tuple[str, int]] = {}
    with open(trace, encoding="ascii") as lines:
        for ended, line in enumerate(lines):
            began = ended
            if resumed := RESUMED.fullmatch(line.rstrip()):
                thread, name, rest = resumed.groups()
                start, began = begun.pop(thread)
                rest = start + rest
            elif beginning := BEGINNING.fullmatch(line.rstrip()):
                thread, name, rest = beginning.groups()
                if rest.endswith("<unfinished ...>"):
                    begun[thread] = (rest.removesuffix("<unfinished ...>").rstrip(), began)
                    continue
            else:
                continue  # a signal, an exit
            # What is written, to a socket for example, can be a path as well.
            if place := wanted.search(rest.partition('"')[0] if "write" in name else rest):
                ending = ENDING.fullmatch(rest)
                assert ending and '"...' not in rest, f"not understood: {line[:300]}"
                words, result, opened = ending.groups()
                if int(result) >= 0:
                    call = Call(
                        name, words.split(", "), int(result), text(opened or ""), began, ended
                    )
                    found.setdefault(text(next(filter(None, place.groups()))), []).append(call)
    return found


def escape(path: Path) -> str:
    """A path as strace writes it."""
    return "".join(f"\\x{byte:02x}" for byte in bytes(path))


def text(escaped: str) -> str:
    """The opposite of `escape`."""
    return data(escaped).decode()


def data(escaped: str) -> bytes:
    """Bytes as strace writes them."""
    return bytes.fromhex(escaped.strip('"').replace("\\x", ""))
