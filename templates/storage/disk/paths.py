"""Find and open the files of checkpoints on disk."""

import contextlib
import errno
import io
import os
import re
import stat
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..errors import UserError
from ..files import read_json
from . import PUBLISHED, LocalFiles, step_name

# The path of a run, a checkpoint or a file. In this project it is always on a disk.
Place = Path
# Names of checkpoints that were renamed because they were damaged: step_00000120.damaged-1.
DAMAGED = re.compile(r"step_\d{8,}\.damaged-\d+")
# Only one slash is required, since pathlib turns s3://bucket into s3:/bucket.
URL = re.compile(r"[a-zA-Z][\w+.-]+:/.*")
NO_STORE = "which this project cannot open: create it with storage=object_store"


def storage_path(where: Path | str) -> Path:
    """Return `where` as a path; raise UserError if it is a URL of an object store."""
    if URL.fullmatch(str(where)):
        raise UserError(f"{where} is a URL of an object store, {NO_STORE}")
    return Path(where)


def checkpoints_of(run: Path) -> Path:
    """Return the folder of a run's checkpoints; UserError if they are only in an object store."""
    directory = run / "checkpoints"
    # The settings may be missing or incomplete. Then assume that there is no store.
    url = None
    with contextlib.suppress(UserError, KeyError, TypeError):
        url = read_json(run / "config.json")["checkpoint"]["url"]
    if url and not directory.exists():
        raise UserError(f"{run} has its checkpoints in {url}, {NO_STORE}")
    return directory


def has_files(folder: Path, suffix: str) -> bool:
    """Return whether a folder itself, not a subfolder, has files with a suffix."""
    return any(folder.glob(f"*{suffix}"))


def published(directory: Path) -> list[Path]:
    """Return the checkpoints with a published name, oldest first; their files may be damaged."""
    names = os.listdir(directory) if directory.is_dir() else []
    # Sort by step, since names of more than 8 digits would sort before shorter ones.
    steps = [int(name.removeprefix("step_")) for name in names if PUBLISHED.fullmatch(name)]
    return [directory / step_name(step) for step in sorted(steps)]


def damaged(directory: Path) -> list[str]:
    """Return the names of checkpoints that were renamed because they were damaged."""
    names = os.listdir(directory) if directory.is_dir() else []
    return sorted(name for name in names if DAMAGED.fullmatch(name))


def open_regular(path: Path) -> io.BufferedIOBase:
    """Open a regular file for reading; OSError for a link, a device or a pipe."""
    # Check before opening, since opening a device may have effects.
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    # If a link replaces the file after the check, O_NOFOLLOW refuses the link. If a pipe replaces
    # the file, O_NONBLOCK keeps the open from waiting until another process writes.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    return open(descriptor, "rb")


def local_copy(path: Path, manifest: dict[str, Any], group: Group | None = None) -> LocalFiles:
    """Return a checkpoint's folder, this rank's index among its readers, and their number.

    All ranks of `group` read the folder; without a group, only this process does. Makes no copy,
    since the files are local already.
    """
    # A checkpoint copied from an object store has its files in a subfolder.
    folder = path / manifest.get("folder", "")
    if group is None:
        return LocalFiles(folder, rank=0, ranks=1)
    return LocalFiles(folder, group.rank, group.size)


def release_copies() -> None:
    """Do nothing, since there are no copies."""
