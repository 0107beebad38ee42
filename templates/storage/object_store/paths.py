"""Find, open and download the files of checkpoints, on disk or in an object store."""

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
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from ..distributed import Group
from ..errors import UserError
from ..files import goes_without_lock, read_json
from . import MANIFEST, PUBLISHED, LocalFiles, step_name
from .object_store import FULL, URL, RemotePath, remote, remote_of

# A Path or a RemotePath; both have the methods that are used here.
Place = Any
# Names that mark damaged checkpoints. On disk the folder of the checkpoint gets such a name, as
# step_00000120.damaged-1; in a store its manifest does, as manifest.json.damaged-1.
DAMAGED = re.compile(r"(step_\d{8,}|manifest\.json)\.damaged-\d+")
# The number of files that a rank downloads or uploads at once.
TRANSFERS = 4
# The prefix of the names of temporary folders, and of the lock files beside them.
TEMPORARY = "copy-of-a-checkpoint-"
# The temporary folders of this process, each with its lock file, which stays open and locked.
temporary_folders: dict[Path, TextIO] = {}
# The paths on this machine of downloaded checkpoints.
copies: dict[RemotePath, Path] = {}


def storage_path(where: Path | str | RemotePath) -> Place:
    """Return a path on disk or in an object store; UserError for a URL that cannot be opened."""
    if isinstance(where, RemotePath):
        return where
    if URL.fullmatch(str(where)):
        return remote(str(where))
    return Path(where)


def checkpoints_of(run: Place) -> Place:
    """Return the folder of a run's checkpoints: at the URL in its settings, or on disk.

    A `run` in a store is already the folder of its checkpoints. A run with `local_first` has its
    newest checkpoints on disk. Only if this disk has none, as on another machine, return the folder
    in the store.
    """
    if isinstance(run, RemotePath):
        return run
    settings = settings_of_storage(run)
    url = settings.get("url")
    on_disk = run / "checkpoints"
    if not url or (settings.get("local_first") and published(on_disk)):
        return on_disk
    return remote_of(run, url)


def settings_of_storage(run: Path) -> dict[str, Any]:
    """Return the checkpoint settings in a run's config.json; {} if they cannot be read."""
    with contextlib.suppress(UserError, KeyError, TypeError, ValueError):
        return dict(read_json(run / "config.json")["checkpoint"])
    return {}


def names_in(folder: Place) -> list[str]:
    """Return the names in a folder; [] if it does not exist."""
    if isinstance(folder, RemotePath):
        return list(folder.sizes())
    return os.listdir(folder) if folder.is_dir() else []


def has_files(folder: Place, suffix: str) -> bool:
    """Return whether a folder itself, not a subfolder, has files with a suffix."""
    return any(name.endswith(suffix) for name in names_in(folder))


def step_folders(directory: Place) -> list[Place]:
    """Return the folders of checkpoints, oldest first: in a store, also those not yet published."""
    names = [name for name in names_in(directory) if PUBLISHED.fullmatch(name)]
    steps = [int(name.removeprefix("step_")) for name in names]
    return [directory / step_name(step) for step in sorted(steps)]


def published(directory: Place) -> list[Place]:
    """Return the published checkpoints, oldest first; their files may be damaged."""
    folders = step_folders(directory)
    if not isinstance(directory, RemotePath):
        # On disk a checkpoint is published when its folder gets its final name. So all of these are
        # published, and a folder without a manifest is a damaged checkpoint.
        return folders
    # In a store the manifest publishes a checkpoint.
    return [folder for folder in folders if (folder / MANIFEST).exists()]


def damaged(directory: Place) -> list[str]:
    """Return the names of checkpoints (on disk) or manifests (in a store) that were set aside.

    They were renamed because they were damaged or replaced.
    """
    if not isinstance(directory, RemotePath):
        return sorted(name for name in names_in(directory) if DAMAGED.fullmatch(name))
    manifests: list[str] = []
    for folder in step_folders(directory):
        for name in folder.sizes():
            if DAMAGED.fullmatch(name):
                manifests.append(f"{folder.name}/{name}")
    return sorted(manifests)


def open_regular(path: Place) -> io.BufferedIOBase:
    """Open an object or a regular file for reading; OSError for a link, a device or a pipe."""
    if isinstance(path, RemotePath):
        return io.BytesIO(path.read())
    # Check before opening, since opening a pipe waits for a writer.
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    # If a link replaces the file after the check, O_NOFOLLOW refuses the link. If a pipe replaces
    # the file, O_NONBLOCK keeps the open from waiting for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    return open(descriptor, "rb")


def local_copy(path: Place, manifest: dict[str, Any], group: Group | None = None) -> LocalFiles:
    """Return a folder on this machine with the files of a checkpoint.

    A checkpoint on disk is read in place. A checkpoint in a store is downloaded into TMPDIR; the
    copy stays there until `release_copies`. With a `group`, the call is collective and always
    downloads: the ranks of a machine share the download and the copy, and an error on any rank is
    raised on all of them. Without a group, the call returns the copy of an earlier call if there is
    one; otherwise this process downloads.
    """
    # A new Group() has only this process.
    readers = group or Group()
    if not isinstance(path, RemotePath):
        # A checkpoint copied from an object store has its files in a subfolder.
        return LocalFiles(path / manifest.get("folder", ""), readers.rank, readers.size)
    local_rank = 0
    local_ranks = 1
    if readers.size > 1:
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if group is not None or path not in copies:
        # Keep only one copy, since TMPDIR may have no room for more.
        release_copies()
        # Only the first rank of each machine makes a folder.
        new_folder = ""
        with readers.together():
            if local_rank == 0:
                new_folder = str(make_temporary_folder())
        # Rank 0 gathers the name of each rank's folder, and sends the list to all ranks.
        folder_of_rank = readers.broadcast(readers.gather(new_folder))
        # The ranks of a machine have consecutive numbers.
        first_rank_here = readers.rank - local_rank
        folder = Path(folder_of_rank[first_rank_here])
        with readers.together():
            copies[path] = download(path, manifest, folder, local_rank, local_ranks)
    return LocalFiles(copies[path], local_rank, local_ranks)


def download(
    path: RemotePath, manifest: dict[str, Any], folder: Path, local_rank: int, local_ranks: int
) -> Path:
    """Download a checkpoint, a folder or one object into `folder`; return the path of the copy.

    The `manifest` is {} for a folder or an object without one. The ranks of a machine divide the
    files of a folder among them; the first rank downloads a single object.
    """
    if not manifest and path.is_file():
        if local_rank == 0:
            download_file(path, folder / path.name)
        return folder / path.name
    source = path
    if manifest.get("folder"):
        source = path / manifest["folder"]
    names = sorted(manifest.get("files") or path.sizes())
    mine = names[local_rank::local_ranks]
    sources = [source / name for name in mine]
    targets = [folder / name for name in mine]
    with ThreadPoolExecutor(TRANSFERS) as pool:
        # list() waits for all downloads, and raises the first error.
        list(pool.map(download_file, sources, targets))
    return folder


def download_file(source: RemotePath, target: Path) -> None:
    """Download one object; leave no file if the object is missing or damaged."""
    try:
        source.fetch(target)
    except OSError as error:
        target.unlink(missing_ok=True)
        if error.errno in FULL:
            text = "there is no room for a copy of the checkpoint in TMPDIR"
            raise OSError(error.errno, text, str(target.parent)) from error
        # Raise no error for a missing or damaged object: the verification after the download finds
        # no file, and reports damage.
        if error.errno not in (errno.ENOENT, errno.EBADMSG):
            raise


@atexit.register
def release_copies() -> None:
    """Remove this process's temporary folders, which hold the downloaded copies."""
    copies.clear()
    for folder in list(temporary_folders):
        remove_temporary_folder(folder)


def make_temporary_folder() -> Path:
    """Make a folder in TMPDIR, after removing the folders of processes that were killed."""
    tmpdir = Path(tempfile.gettempdir())
    for lock_file in tmpdir.glob(f"{TEMPORARY}*.lock"):
        folder = lock_file.with_suffix("")
        # Skip this process's own folders: the locks on them keep out only other processes.
        if folder in temporary_folders:
            continue
        # If the process that made the folder is alive, lockf raises an OSError, and the folder
        # stays.
        with contextlib.suppress(OSError), lock_file.open("r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            lock_file.unlink()
    folder = tmpdir / f"{TEMPORARY}{uuid.uuid4().hex}"
    # The lock file is beside the folder, not in it. Code that reads a copy may open and close every
    # file in the folder, and closing any descriptor of the lock file would release this process's
    # lock. The lock file gets the suffix .lock only once it is locked. Otherwise another process
    # could take it for one that was left behind.
    lock = folder.with_suffix(".new").open("x")
    # Register it for `release_copies`.
    temporary_folders[folder] = lock
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX)
    except OSError as error:
        if not goes_without_lock(error, f"TMPDIR ({tmpdir})"):
            raise
    os.rename(lock.name, folder.with_suffix(".lock"))
    folder.mkdir(mode=0o700)
    return folder


def remove_temporary_folder(folder: Path) -> None:
    """Remove a folder that `make_temporary_folder` made, and release its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    lock = temporary_folders.pop(folder)
    # If locking failed, the lock file still has the suffix .new.
    for suffix in (".lock", ".new"):
        folder.with_suffix(suffix).unlink(missing_ok=True)
    lock.close()
