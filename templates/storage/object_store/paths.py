"""Files of checkpoints, on disk or in an object store: find them, open them, fetch them."""

import atexit
import contextlib
import errno
import fcntl
import io
import os
import re
import shutil
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..errors import UserError
from ..files import read_json
from . import MANIFEST, PUBLISHED, step_name
from .object_store import URL, RemotePath, remote, remote_of

Place = Any  # a Path or a RemotePath, by the settings: either has what a checkpoint needs
DAMAGED = re.compile(r"(step_\d{8,}|manifest\.json)\.damaged-\d+")
TRANSFERS = 4  # files that a rank fetches or sends at a time
scratch: dict[Path, Any] = {}  # folders of this process in TMPDIR, with the locks that it holds
copies: dict[RemotePath, Path] = {}  # what was fetched, and where it is


def storage_path(where: Path | str | RemotePath) -> Place:
    """A path, or the place in a store that a URL names; UserError for a URL that cannot be used."""
    if isinstance(where, RemotePath):
        return where
    return remote(str(where)) if URL.fullmatch(str(where)) else Path(where)


def checkpoints_of(run: Place) -> Place:
    """Where a run has its checkpoints: in the store that its settings name, else in itself.

    A URL is the place itself.
    """
    if isinstance(run, RemotePath):
        return run
    url = None
    with contextlib.suppress(UserError, KeyError, TypeError):
        url = read_json(run / "config.json")["checkpoint"]["url"]
    return remote_of(run, url) if url else run / "checkpoints"


def names_in(folder: Place) -> list[str]:
    """The names in a folder, none if it is not there."""
    if isinstance(folder, RemotePath):
        return [*folder.sizes()]
    return os.listdir(folder) if folder.is_dir() else []


def steps(directory: Place) -> list[Place]:
    """The folders of checkpoints, oldest first, finished or not."""
    names = [name for name in names_in(directory) if PUBLISHED.fullmatch(name)]
    steps = [int(name.removeprefix("step_")) for name in names]
    return [directory / step_name(step) for step in sorted(steps)]


def published(directory: Place) -> list[Place]:
    """Published checkpoints, oldest first, good or not."""
    # On a disk one without a manifest is damaged; in a store it was never finished.
    is_far = isinstance(directory, RemotePath)
    return [path for path in steps(directory) if not is_far or (path / MANIFEST).exists()]


def damaged(directory: Place) -> list[str]:
    """The names of damaged checkpoints that were set aside."""
    names = names_in(directory)
    if isinstance(directory, RemotePath):
        names = [f"{path.name}/{name}" for path in steps(directory) for name in path.sizes()]
    return sorted(name for name in names if DAMAGED.fullmatch(name.rpartition("/")[2]))


def open_regular(path: Place) -> Any:
    """Open an object or a regular file for reading; OSError for a link, a device or a pipe."""
    if isinstance(path, RemotePath):
        return io.BytesIO(path.read())
    # Nothing else is opened at all: opening a pipe waits for a writer.
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def local_copy(
    path: Place, manifest: dict[str, Any], group: Group | None = None
) -> tuple[Path, int, int]:
    """Where the files of a checkpoint are, this rank among those that read them there, and ranks.

    On disk they are where they are, and all ranks read them. Of a store each machine fetches a copy
    into TMPDIR, which its ranks share, and which needs room for it until `release_copies`. With a
    `group` that is a new copy, and this a collective call.
    """
    own = group or Group()
    if not isinstance(path, RemotePath):
        return path / manifest.get("folder", ""), own.rank, own.size
    rank, ranks = 0, 1
    if own.size > 1:
        rank = int(os.environ.get("LOCAL_RANK", 0))
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if group or path not in copies:
        release_copies()
        made = ""
        with own.together():
            if rank == 0:  # of this machine, whose other ranks learn of its folder
                made = str(make_scratch())
        folders = own.broadcast(own.gather(made))
        folder = Path(folders[own.rank - rank])
        copies[path] = folder / path.name if not manifest and path.is_file() else folder
        with own.together():
            fetch(path, manifest, folder, rank, ranks)
    return copies[path], rank, ranks


def fetch(path: RemotePath, manifest: dict[str, Any], folder: Path, rank: int, ranks: int) -> None:
    """Copy this rank's share of a checkpoint's files, or those of a folder, or a file."""
    source = path / manifest["folder"] if manifest.get("folder") else path
    names = manifest.get("files") or path.sizes()
    sources = {name: source / name for name in names} or {path.name: path}

    def copy(name: str) -> None:
        # One that is missing, or not as it was saved, is damage, which verifying finds.
        try:
            sources[name].fetch(folder / name)
        except OSError as error:
            (folder / name).unlink(missing_ok=True)
            if error.errno not in (errno.ENOENT, errno.EBADMSG):
                raise

    with ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(copy, sorted(sources)[rank::ranks]))


@atexit.register
def release_copies() -> None:
    """Remove what was fetched."""
    copies.clear()
    for folder in [*scratch]:
        remove_scratch(folder)


def make_scratch() -> Path:
    """A new folder in TMPDIR; removes those of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob("checkpoint-*/.lock"):
        if path.parent not in scratch:
            with contextlib.suppress(OSError), path.open("r+") as lock:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its process would hold it
                shutil.rmtree(path.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    scratch[folder] = (folder / ".lock").open("w")
    fcntl.lockf(scratch[folder], fcntl.LOCK_EX)
    return folder


def remove_scratch(folder: Path) -> None:
    """Remove a folder that `make_scratch` made."""
    shutil.rmtree(folder, ignore_errors=True)
    scratch.pop(folder).close()
