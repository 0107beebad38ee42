"""Small files, written atomically and synced to disk; fingerprints of data."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError

log = logging.getLogger(__name__)
PROBES = 256
PROBE_BYTES = 4096


@contextlib.contextmanager
def naming(path: Any) -> Iterator[None]:
    """Name the file in an OSError, which after a read, a write or a sync names none."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        if not isinstance(error, OSError | UserError):
            # torch.save replaces the error that its file raised by one of its own.
            cause = error.__context__
        if not isinstance(cause, OSError) or not cause.errno:
            raise
        if cause is error and cause.filename:
            raise
        raise OSError(cause.errno, cause.strerror, str(cause.filename or path)) from error


def check_regular(files: Iterable[Path]) -> None:
    """UserError for a pipe, where a reader would wait, a device, a folder or a broken link."""
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is not a regular file, or is a broken link: remove it")


def warn_left_out(files: Sequence[Path], kind: str) -> None:
    """Say in one line of the log how many files of a kind are not used."""
    if files:
        log.warning("%d files left out: %s, such as %s", len(files), kind, files[0])


def to_json(settings: Any) -> dict[str, Any]:
    """Settings (nested dataclasses) as JSON holds them: paths become strings."""
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names, from nested dictionaries."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """The object in a JSON file, or in another kind to `parse`; UserError for anything else."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is no regular file")  # a reader would wait at a pipe
        # Some editors write a byte order mark.
        content = parse(path.read_text("utf-8").removeprefix("\ufeff"))
        if not isinstance(content, dict):
            raise ValueError("it does not hold settings by name")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        kind = path.suffix[1:].upper() or "JSON"
        raise UserError(f"{path} cannot be read as {kind}: {reason}") from None
    return content


def open_to_write(path: Path | str, mode: str = "w", **options: Any) -> Any:
    """Open a file of a run for writing, which all that write there do; UserError for a link."""

    # Who made a run directory, or an archive of one, may have left a link to any file of the user.
    def regular(name: str, flags: int) -> int:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(name).st_mode):
                raise UserError(f"{name} is a link or no plain file, and is not written: remove it")
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    return open(path, mode, opener=regular, **options)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new name, which takes the place of `path` in one step; a link there is not followed."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)  # of a process that was killed, or somebody's link
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # the error of the write is the one to report
            temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a small file whole and sync it: a reader sees the old one or the new one."""
    if isinstance(content, str):
        content = content.encode(errors="replace")
    with replacing(path) as temporary, naming(path), open_to_write(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: Any) -> None:
    """Replace a small JSON file."""
    replace_file(path, json.dumps(content, indent=2) + "\n")


def sync_directory(path: Path) -> None:
    """Sync the names in a directory; a synced file whose name is not synced can still be lost."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a file system that decides itself when to
            raise
    finally:
        os.close(descriptor)


def fingerprint(*parts: Any) -> str:
    """Identify data in memory, in 16 letters, by every byte of arrays, numbers and text."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, int | str):
            content: bytes | memoryview = repr(part).encode()
        else:
            content = memoryview(part).cast("B")
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()[:16]


def fingerprint_files(root: Path, files: Sequence[Path], *stated: int | str) -> str:
    """Identify files by their names below `root`, their sizes, and probes of their content.

    Reads at most a megabyte, spread evenly, whatever the data's size. It does not notice a change
    that keeps every size and every probed range.
    """
    listing = []
    sizes = []
    for file in files:
        size = file.stat().st_size
        sizes.append(size)
        listing.append(f"{file.relative_to(root).as_posix()} {size}")
    # PROBES in all: several in each of a few files, or one in each of some of many.
    every = max(1, -(-len(files) // PROBES))
    in_each = max(1, PROBES // max(1, len(files)))
    probes = []
    for file, size in list(zip(files, sizes, strict=True))[::every]:
        with open(file, "rb", buffering=0) as opened:
            for probe in range(in_each):
                opened.seek(max(0, size - PROBE_BYTES) * probe // max(1, in_each - 1))
                probes.append(opened.read(PROBE_BYTES))
    return fingerprint("\n".join(listing), b"".join(probes), *stated)
