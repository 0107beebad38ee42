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
from ..files import read_json
from . import PUBLISHED, step_name

Place = Path
DAMAGED = re.compile(r"step_\d{8,}\.damaged-\d+")
URL = re.compile(r"[a-zA-Z][\w+.-]+:/.*")  # with one slash too: pathlib folds two into one
NO_STORE = "which this project cannot open: render it with storage=object_store"


def storage_path(where: Path | str) -> Path:
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
    names = os.listdir(directory) if directory.is_dir() else []
    steps = [int(name.removeprefix("step_")) for name in names if PUBLISHED.fullmatch(name)]
    return [directory / step_name(step) for step in sorted(steps)]


def damaged(directory: Path) -> list[str]:
    """The names of damaged checkpoints that were set aside."""
    return sorted(filter(DAMAGED.fullmatch, os.listdir(directory) if directory.is_dir() else ()))


def open_regular(path: Path) -> Any:
    """Open a regular file for reading; OSError for a link, a device or a pipe."""
    # Nothing else is opened at all: opening a pipe waits for a writer.
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def local_copy(
    path: Path, manifest: dict[str, Any], group: Group | None = None
) -> tuple[Path, int, int]:
    """Where the files of a checkpoint are, this rank among those that read them there, and ranks.

    They are not copied: they are on a disk that all ranks see.
    """
    folder = path / manifest.get("folder", "")
    if group is None:
        return folder, 0, 1
    return folder, group.rank, group.size


def release_copies() -> None:
    """Nothing to remove: nothing was copied."""
