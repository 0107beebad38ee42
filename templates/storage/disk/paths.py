"""Files of checkpoints on disk: find them, open them."""

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..errors import UserError
from ..files import fingerprint_files, read_json
from . import PUBLISHED

Place = Path
DAMAGED = re.compile(r"step_\d{8,}\.damaged-\d+")
# With one slash too, since pathlib folds two into one.
URL = re.compile(r"[a-zA-Z][\w+.-]+:/{1,3}[^/].*")
NO_STORE = "which this project cannot open: render it with storage=object_store"


def located(where: Path | str) -> Path:
    """A path; UserError for the address of an object store."""
    if URL.fullmatch(str(where)):
        raise UserError(f"{where} is the address of an object store, {NO_STORE}")
    return Path(where)


def checkpoints_of(run: Path) -> Path:
    """Where a run has its checkpoints; UserError if its settings name an object store."""
    directory, url = run / "checkpoints", None
    with contextlib.suppress(UserError, KeyError, TypeError):
        url = read_json(run / "config.json")["checkpoint"]["url"]
    if url and not directory.exists():
        raise UserError(f"{run} has its checkpoints in {url}, {NO_STORE}")
    return directory


def published(directory: Path) -> list[Path]:
    """Published checkpoints, oldest first, good or not."""
    try:
        names = filter(PUBLISHED.fullmatch, os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [directory / name for name in sorted(names, key=lambda name: int(name[5:]))]


def damaged(directory: Path) -> list[str]:
    """The names of damaged checkpoints that were set aside."""
    names = os.listdir(directory) if directory.is_dir() else []
    return sorted(filter(DAMAGED.fullmatch, names))


def listing(folder: Path) -> dict[str, int]:
    """The names in a folder, with their sizes."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}


def fingerprint_of(path: Path) -> str:
    """Fingerprint of a file, or of the plain files in a folder."""
    plain = (file for file in path.glob("*") if file.is_file() and not file.is_symlink())
    return fingerprint_files(path, sorted(plain) or [path])


def open_regular(path: Path) -> Any:
    """Open a regular file for reading; OSError for a link, a device or a pipe."""
    # Nothing else is opened at all: opening a pipe waits for a writer.
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def local_folder(path: Path, group: Group | None = None) -> Path:
    """The folder from which a checkpoint is read: its own."""
    return path


def fetch(path: Path, again: bool = False) -> None:
    """Nothing to fetch: every file is on disk."""


def release_copies() -> None:
    """Nothing to remove: nothing was copied."""


def share_of_files(path: Path, group: Group) -> tuple[int, int]:
    """This rank among those that read the same files, and their number: all ranks."""
    return group.rank, group.size
