"""Read and write small files, atomically and synced to disk; compute fingerprints of data."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError

log = logging.getLogger(__name__)
# Error codes of a file system that does not support an operation.
NOT_SUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
# Environment variable. The user sets it to 1 to state that no other job writes to the same path.
WITHOUT_LOCKS = "WITHOUT_LOCKS"
# How much `fingerprint_files` reads: at most this many probes, each of this many bytes.
PROBES = 256
PROBE_BYTES = 4096
# Whether this process has logged the warning that folders cannot be synced.
warned_of_sync = False


@contextlib.contextmanager
def naming(path: Any) -> Iterator[None]:
    """Name `path` in an OSError of the block if it names no file, as after a failed write."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        if not isinstance(error, OSError | UserError):
            # torch.save raises its own error while it handles the file's OSError, which is then the
            # context of its error. (A UserError may have an OSError as context, too, but already
            # says what to do.)
            cause = error.__context__
        if not isinstance(cause, OSError) or not cause.errno:
            raise
        if cause is error and cause.filename:
            raise
        raise OSError(cause.errno, cause.strerror, str(cause.filename or path)) from error


def expand_home(value: Any) -> Any:
    """Expand "~" in a path, or in all paths of a dataclass of settings.

    Raises UserError if the home directory is unknown. Otherwise, a command would create a folder
    named "~", which is dangerous to remove: in a shell, ~ is the home directory.
    """
    if isinstance(value, Path):
        expanded = Path(os.path.expanduser(value))
        # If the home directory is unknown, expanduser keeps the "~".
        if expanded.parts[:1] == ("~",):
            raise UserError(f"{value}: the home directory is unknown; give the path without ~")
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
    """Walk a folder like os.walk; follow links to folders elsewhere, and visit each folder once.

    This does not follow links to folders below `root`, which it visits under their own names. Nor
    does it follow links to `root` and the folders above. A warning counts the links left out.
    """
    top = root.resolve()
    visited = {_identity(root)}
    left_out: list[Path] = []
    for parent, folders, files in os.walk(root, followlinks=True):
        # The caller may sort the list `folders`, and remove folders to skip.
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
    warn_left_out(left_out, "links to folders above this one, or read under another name")


def _identity(folder: Path) -> tuple[int, int]:
    """Return the device and inode numbers, which are the same for all names of a folder."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def check_regular(files: Iterable[Path]) -> None:
    """Raise UserError if one of the files is not a regular file. Reading a pipe would hang."""
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is not a regular file, or is a broken link: remove it")


def warn_left_out(files: Sequence[Path], kind: str) -> None:
    """Log one warning with the number of files of a kind that are not used."""
    if files:
        log.warning("%d files left out: %s, such as %s", len(files), kind, files[0])


def to_json(settings: Any) -> dict[str, Any]:
    """Convert settings (nested dataclasses) to JSON values; paths become strings."""
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and value of each setting in nested dictionaries."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """Read an object from a JSON file, or from another format with `parse`.

    Raises UserError if the file cannot be read or does not contain an object.
    """
    try:
        # Reading a pipe would hang.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is not a regular file")
        # Some editors write a byte order mark.
        content = parse(path.read_text("utf-8").removeprefix("\ufeff"))
        if not isinstance(content, dict):
            raise ValueError("it does not contain names with values")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        kind = path.suffix[1:].upper() or "JSON"
        raise UserError(f"{path} cannot be read as {kind}: {reason}") from None
    return content


def open_to_write(path: Path | str, mode: str = "w", **options: Any) -> Any:
    """Open a file of a run for writing; UserError for a link, or anything but a regular file."""

    # A run directory from elsewhere, such as an archive, may have links to any of the user's files.
    # Writing through a link would overwrite that file.
    def regular(name: str, flags: int) -> int:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(name).st_mode):
                raise UserError(f"{name} is a link or not a regular file: remove it")
        # The file may be replaced after this check. Then O_NOFOLLOW refuses a link, and O_NONBLOCK
        # does not wait for the reader of a pipe.
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    return open(path, mode, opener=regular, **options)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; if the block succeeds, that file atomically replaces `path`.

    If `path` is a link, the link itself is replaced.
    """
    temporary = path.with_name(f".{path.name}")
    # A killed process may have left the temporary file, or somebody may have put a link there.
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        # An error here must not hide the error of the write.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write and sync a small file atomically: a reader sees the old content or the new one."""
    if isinstance(content, str):
        # Lone surrogates, as in file names that are not UTF-8, become "?".
        content = content.encode(errors="replace")
    with replacing(path) as temporary, naming(path), open_to_write(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: Any) -> None:
    """Write a small JSON file atomically."""
    replace_file(path, json.dumps(content, indent=2) + "\n")


def goes_without_lock(error: OSError, path: Path | str) -> bool:
    """Return whether to continue although locking failed; False if another process has the lock.

    Raises UserError on a file system without locks, unless the user sets WITHOUT_LOCKS=1.
    """
    if error.errno not in NOT_SUPPORTED | {errno.ENOLCK}:
        return False
    problem = f"{path} is on a file system without locks ({error.strerror})"
    if os.environ.get(WITHOUT_LOCKS) != "1":
        raise UserError(
            f"{problem}, so a second job could write there unnoticed: choose another path, or set "
            f"{WITHOUT_LOCKS}=1 if no other job writes there"
        ) from None
    log.warning("%s: take care that no other job writes there (%s=1)", problem, WITHOUT_LOCKS)
    return True


def rename_directory(source: Path, target: Path) -> None:
    """Rename a directory, or copy it if the file system cannot rename it.

    Raises UserError for a mount point, which can be neither renamed nor removed.
    """
    try:
        os.rename(source, target)
        return
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise UserError(
                f"{source} cannot be renamed, since it is a mount point: mount its parent folder "
                "instead, or choose another name for the run"
            ) from None
        if error.errno != errno.EXDEV:
            raise
    log.warning(
        "%s cannot be renamed, since it is in a lower layer of an overlay file system, such as a "
        "container image: copying it to %s, then removing it",
        source,
        target,
    )
    shutil.copytree(source, target, symlinks=True)
    # The copy must be on disk before the original is removed.
    os.sync()
    shutil.rmtree(source)


def sync_directory(path: Path) -> None:
    """Sync the names in a directory: a synced file can be lost until its name is synced, too."""
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
    """Return a fingerprint (16 hex digits) of every byte of arrays, numbers and text."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, int | str):
            content: bytes | memoryview = repr(part).encode()
        else:
            content = memoryview(part).cast("B")
        # Without the lengths, (b"ab", b"c") and (b"a", b"bc") would have the same fingerprint.
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()[:16]


def fingerprint_files(root: Path, files: Sequence[Path], *stated: int | str) -> str:
    """Return a fingerprint of files: of their names below `root`, sizes and probes of content.

    The probes are spread evenly over the data, and together have at most a megabyte. A change of
    content between the probes is not noticed if all sizes stay the same. The fingerprint also
    depends on the values `stated`, such as settings that determine how the files are read.
    """
    listing = []
    sizes = []
    for file in files:
        size = file.stat().st_size
        sizes.append(size)
        # Python decodes a name by the locale, but its bytes are the same in all locales.
        name = os.fsencode(file.relative_to(root).as_posix())
        listing.append(f"{name.decode('utf-8', 'surrogateescape')} {size}")
    # If there are few files, each has several probes. If there are more than PROBES files, only
    # every n-th file has a probe.
    probes_per_file = max(1, PROBES // max(1, len(files)))
    every_nth = max(1, math.ceil(len(files) / PROBES))
    files_and_sizes = list(zip(files, sizes, strict=True))
    probes = []
    for file, size in files_and_sizes[::every_nth]:
        # The probes begin at equal distances. The first is at the start of the file, and the last,
        # which begins at `last_start`, is at its end.
        last_start = max(0, size - PROBE_BYTES)
        with open(file, "rb", buffering=0) as opened:
            for probe in range(probes_per_file):
                opened.seek(last_start * probe // max(1, probes_per_file - 1))
                probes.append(opened.read(PROBE_BYTES))
    return fingerprint("\n".join(listing), b"".join(probes), *stated)
