"""What torch.compile made, carried in the run directory: a restart is warm on any such machine.

Beside torch's own cache artifacts it holds the machine code that they refer to on a CPU: without
it the C++ compiler, which takes most of the time, would run again.

Whoever can write such a cache can run code in the training process: it holds pickles and
libraries. So it is loaded only if it is this run's own: it and its directory belong to this user
and nobody else may write to them, its bytes have the sha256 that the note beside it gives, and it
lies where it was written (a copy, or an unpacked download, has another inode number). It must
also be of this torch and this kind of machine. Anything else is left alone, with a warning.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import platform
import re
import stat
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .compile import CompileConfig, compile_seconds, compile_summary, graphs
from .distributed import World
from .run.hardware import cpu_name

log = logging.getLogger(__name__)
ARTIFACTS, LIBRARY = "artifacts-", re.compile(r"(?:\w+/)+[\w.-]+\.so")
MOST_OF_A_NOTE = 1 << 20  # bytes


class UntrustedError(Exception):
    """Not a cache of this run, this torch and this machine."""


class CompileCache:
    """Loads a run's compile cache before its first step and saves it after new graphs.

    One process writes for each device of the first machine, since what is compiled names its
    device; on CPUs that is rank 0. A cache never stops training.
    """

    def __init__(self, directory: Path, config: CompileConfig, world: World) -> None:
        self.directory, self.world = directory, world
        index = world.device.index or 0
        self.name = f"{world.device.type}_{index}"
        self.enabled = config.cache and config.backend == "inductor"
        self.writes = world.size == 1 or world.rank == index
        self.loaded: dict[str, Any] = {}  # the note of the cache that was loaded
        self.saved: list[bytes] = []
        self.pending = False
        self.graphs = self.hits_before = self.misses_before = 0
        self.seconds_before = 0.0

    def __enter__(self) -> "CompileCache":
        """Load, if there is something to load."""
        self.graphs, self.seconds_before = graphs(), compile_seconds()
        self.hits_before, self.misses_before = lookups()
        if self.enabled:
            try:
                self.loaded = load(self.directory, self.name, machine_of(self.world.device))
                log.info("compile cache of this run taken over: the first step will be quicker")
            except FileNotFoundError:
                pass  # the first start of this run
            except Exception as error:
                level = logging.WARNING if self.writes else logging.INFO
                problem = ascii(str(error) or type(error).__name__)[1:-1]  # parts are the note's
                log.log(level, "compile cache %s left alone: %.300s", self.directory, problem)
        return self

    def __call__(self, state: Any = None, record: dict[str, Any] | None = None) -> None:
        """Save once the graphs that some steps in a row have compiled are complete."""
        if (known := graphs()) != self.graphs:
            self.graphs, self.pending = known, True
        elif self.pending:
            self._save()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Say what compiling took, and what the cache saved."""
        if kind is None:
            if self.pending:
                self._save()
            saved = self.seconds_saved()
            warm = f"; started warm: {saved:.1f} s saved" if saved is not None else ""
            log.info("%s%s", compile_summary(), warm)

    def seconds_saved(self) -> float | None:
        """Against the start that had nothing; None if this one had nothing, or none is known."""
        cold = self.loaded.get("cold_seconds")
        if cold is None or lookups()[0] == self.hits_before:
            return None
        return max(0.0, cold - self._spent())

    def _spent(self) -> float:
        return compile_seconds() - self.seconds_before

    def _save(self) -> None:
        self.pending = False
        hits, misses = lookups()
        if not (self.enabled and self.writes) or (self.loaded and misses == self.misses_before):
            return  # all that was needed came from there
        cold = self._spent()
        if hits > self.hits_before:  # which have spared nobody knows what, unless it was noted
            noted = self.loaded.get("cold_seconds")
            cold = None if noted is None else max(noted, cold)
        try:
            if found := torch.compiler.save_cache_artifacts():
                self.saved.append(found[0])
                facts = {"machine": machine_of(self.world.device), "cold_seconds": cold}
                save(self.directory, self.name, pack(self.saved), facts)
        except Exception as error:
            self.enabled = False
            log.warning("no compile cache is kept in %s: %s", self.directory, error)


def load(directory: Path, name: str, machine: dict[str, str]) -> dict[str, Any]:
    """Give torch the cache of that name, and return its note.

    FileNotFoundError when there is none; UntrustedError when it is not to be loaded.
    """
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise UntrustedError("it is not a directory")
    _require_private(found, "it")
    try:
        with _opened(directory / f"{name}.json") as (opened, _):
            note = json.loads(opened.read(MOST_OF_A_NOTE))
        file, digest, inode = (note[key] for key in ("file", "sha256", "inode"))
        of = dict(note["machine"])
    except (ValueError, KeyError, TypeError):
        raise UntrustedError(f"{name}.json is not whole") from None
    if other := [key for key in machine if of.get(key) != machine[key]]:
        theirs, ours = of.get(other[0]), machine[other[0]]
        raise UntrustedError(f"it was made for another {other[0]}: {theirs}, here {ours}")
    if file != Path(file).name:
        raise UntrustedError(f"{name}.json names a file elsewhere")
    try:
        with _opened(directory / file) as (opened, found):
            if found.st_ino != inode:
                raise UntrustedError("it was copied here, and a compile cache is code")
            if found.st_size != note.get("bytes"):
                raise UntrustedError(f"{file} is not what was written (size)")
            content = opened.read()
    except FileNotFoundError:
        raise UntrustedError(f"{file} is missing") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise UntrustedError(f"{file} is not what was written (sha256)")
    unpack(content)
    return note


def save(directory: Path, name: str, content: bytes, facts: dict[str, Any]) -> None:
    """Write a cache and its note; at any instant the note is of a whole file."""
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)
    digest = hashlib.sha256(content).hexdigest()
    file = f"{name}-{digest[:12]}.zip"
    inode = _write(directory / file, content)
    note = {"file": file, "bytes": len(content), "sha256": digest, "inode": inode, **facts}
    _write(directory / f"{name}.json", json.dumps(note, indent=2).encode())
    for old in directory.glob(f"{name}-*.zip"):
        if old.name != file:
            old.unlink(missing_ok=True)


def pack(saved: list[bytes]) -> bytes:
    """All that was saved, and the libraries that were built with it, as one file."""
    root, out = _inductor_directory(), io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        # Each holds all before it, but torch 2.13 reads only what is new in it.
        for number, artifacts in enumerate(saved):
            archive.writestr(f"{ARTIFACTS}{number}", artifacts)
        for path in sorted(set(_libraries(root))):
            archive.write(path, path.relative_to(root).as_posix())
    return out.getvalue()


def unpack(content: bytes) -> None:
    """Put everything where torch looks for it, so that ranks may do so at the same time."""
    root = _inductor_directory()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            if name.startswith(ARTIFACTS):
                if torch.compiler.load_cache_artifacts(archive.read(name)) is None:
                    raise UntrustedError("torch cannot read it")
            elif LIBRARY.fullmatch(name) and not (root / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                _write(root / name, archive.read(name), mode=0o700)


def lookups() -> tuple[int, int]:
    """How often torch found something compiled in its caches, and how often it did not."""
    counters = torch._dynamo.utils.counters
    names = (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache"))
    hits, misses = (
        sum(counters[part][f"{name}_{end}"] for part, name in names) for end in ("hit", "miss")
    )
    return hits, misses


def machine_of(device: torch.device) -> dict[str, str]:
    """What compiled code depends on."""
    facts = {"torch": str(torch.__version__), "python": platform.python_version()}
    facts["CPU"] = f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        facts["CUDA"] = str(torch.version.cuda)
        facts["GPU"] = f"{torch.cuda.get_device_name(device)} ({major}.{minor})"
    return facts


def _libraries(root: Path) -> Iterator[Path]:
    """Libraries below `root` that this process uses, and those that only tell what the CPU can."""
    # A kernel is called *.main.so; the rest are checks, the same few for every project.
    yield from (path for path in root.glob("??/*.so") if not path.name.endswith(".main.so"))
    with contextlib.suppress(OSError):  # no such file but on Linux
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.suffix == ".so" and path.is_relative_to(root) and path.is_file():
                yield path


def _inductor_directory() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()).resolve()


def _require_private(found: os.stat_result, what: str) -> None:
    if found.st_uid != os.geteuid():
        raise UntrustedError(f"{what} belongs to another user")
    if found.st_mode & 0o022:
        raise UntrustedError(f"others can write to {what}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """A private file, and what the system says of just this one."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedError(f"{path.name} is not a file")
        _require_private(found, path.name)
        yield file, found


def _write(path: Path, content: bytes, mode: int = 0o600) -> int:
    """Write a private file that is whole or not there; its inode number."""
    temporary = path.with_name(f".{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
            inode = os.fstat(descriptor).st_ino
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return inode
