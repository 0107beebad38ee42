"""Files of checkpoints on disk: find them, open them."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError
from ..files import fingerprint_files, read_json
from . import PUBLISHED

T = TypeVar("T")
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


def local_copy(path: Path) -> contextlib.AbstractContextManager[Path]:
    """A file as one on disk: itself."""
    return contextlib.nullcontext(path)


def retried(action: Callable[[], T], path: Path) -> Callable[[], T]:
    """What writes to a path, as it is: what a disk refuses, it refuses again."""
    return action
