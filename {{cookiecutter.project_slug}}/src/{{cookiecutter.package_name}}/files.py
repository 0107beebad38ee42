"""Small files, written atomically and synced to disk; fingerprints of data."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError

log = logging.getLogger(__name__)
# How a file system says that it cannot do something at all.
NOT_SUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
# Set to 1, it states that no other job writes to the same place.
WITHOUT_LOCKS = "WITHOUT_LOCKS"
PROBES = 256
PROBE_BYTES = 4096
# Whether it was said that folders cannot be synced.
warned_of_sync = False


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


def expand_home(value: Any) -> Any:
    """Expand "~" in a path, and in all paths of some settings, where no shell has done it.

    UserError if the home directory is not known: a folder named "~" is dangerous to remove.
    """
    if isinstance(value, Path):
        expanded = Path(os.path.expanduser(value))
        if expanded.parts[:1] == ("~",):
            raise UserError(f"{value}: the home directory is not known: give the path without ~")
        return expanded
    if type(value) in (list, tuple):
        return type(value)(map(expand_home, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            before = getattr(value, field.name)
            expanded = expand_home(before)
            if field.init and expanded != before:
                changes[field.name] = expanded
        return dataclasses.replace(value, **changes) if changes else value
    return value


def walk_folders(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk a folder like os.walk, and follow links to folders elsewhere; each folder once.

    Links to folders below `root` are not followed, since these are read under their own names, nor
    are links to a folder that has `root` in it. A warning names what is left out.
    """
    top = root.resolve()
    visited = {_identity(root)}
    left_out: list[Path] = []
    for parent, folders, files in os.walk(root, followlinks=True):
        # The caller may sort the folders, and remove those that it does not want.
        yield Path(parent), folders, files
        for name in list(folders):
            folder = Path(parent, name)
            is_left_out = _identity(folder) in visited
            if folder.is_symlink():
                target = folder.resolve()
                is_left_out |= target.is_relative_to(top) or top.is_relative_to(target)
            if is_left_out:
                folders.remove(name)
                left_out.append(folder)
            else:
                visited.add(_identity(folder))
    warn_left_out(left_out, "links to folders that are read under another name, or are above")


def _identity(folder: Path) -> tuple[int, int]:
    """Return what is the same for all names of a folder."""
    status = folder.stat()
    return status.st_dev, status.st_ino


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


def goes_without_lock(error: OSError, path: Path | str) -> bool:
    """Return whether to continue although a lock was refused; False if another process has it.

    UserError on a file system without locks, unless the user states that no other job writes there.
    """
    if error.errno not in NOT_SUPPORTED | {errno.ENOLCK}:
        return False
    problem = f"{path} is on a file system without locks ({error.strerror})"
    if os.environ.get(WITHOUT_LOCKS) != "1":
        raise UserError(
            f"{problem}, so a second job there would not be noticed: choose another place, or set "
            f"{WITHOUT_LOCKS}=1 if no other job writes there"
        ) from None
    log.warning("%s: take care that no other job writes there (%s=1)", problem, WITHOUT_LOCKS)
    return True


def rename_directory(source: Path, target: Path) -> None:
    """Rename a directory, or copy it where the file system cannot rename it.

    UserError for a mount, which can be neither renamed nor removed.
    """
    try:
        os.rename(source, target)
        return
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise UserError(
                f"{source} cannot be renamed, since it is a mount: mount the folder above it in "
                "its place, or choose another name for the run"
            ) from None
        if error.errno != errno.EXDEV:
            raise
    log.warning(
        "%s is in a lower layer of an overlay, as of a container's image, which cannot rename "
        "folders: it is copied to %s, and removed",
        source,
        target,
    )
    shutil.copytree(source, target, symlinks=True)
    # The copy is on disk before the original goes.
    os.sync()
    shutil.rmtree(source)


def sync_directory(path: Path) -> None:
    """Sync the names in a directory; a synced file whose name is not synced can still be lost."""
    global warned_of_sync
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED | {errno.EINVAL}:
            raise
        if not warned_of_sync:
            log.warning(
                "%s is on a file system that cannot sync folders (%s): after a power loss the "
                "newest checkpoint may be gone",
                path,
                error.strerror,
            )
            warned_of_sync = True
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
