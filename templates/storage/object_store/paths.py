"""Files of checkpoints, on disk or in an object store: find them, open them."""

import atexit
import contextlib
import io
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..errors import UserError
from ..files import read_json
from . import MANIFEST, PUBLISHED, disk
from .object_store import URL, RemotePath, remote, remote_of

Place = Any  # a Path or a RemotePath, by the settings: either has what a checkpoint needs
DAMAGED = re.compile(re.escape(MANIFEST) + r"\.damaged-\d+")
copies: dict[RemotePath, Path] = {}  # folders and files of a store: where they are copied to


def located(where: Path | str | RemotePath) -> Place:
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


def steps(directory: RemotePath) -> list[RemotePath]:
    """The folders of checkpoints in a store, oldest first, finished or not."""
    names = filter(PUBLISHED.fullmatch, directory.sizes())
    return [directory / name for name in sorted(names, key=lambda name: int(name[5:]))]


def published(directory: Place) -> list[Place]:
    """Published checkpoints, oldest first, good or not."""
    if isinstance(directory, RemotePath):
        # On a disk one without a manifest is damaged; in a store it was never finished.
        return [path for path in steps(directory) if (path / MANIFEST).exists()]
    return disk.published(directory)


def damaged(directory: Place) -> list[str]:
    """The names of damaged checkpoints that were set aside."""
    if isinstance(directory, RemotePath):
        inside = ((path, name) for path in steps(directory) for name in path.sizes())
        return [f"{path.name}/{name}" for path, name in inside if DAMAGED.fullmatch(name)]
    return disk.damaged(directory)


def listing(folder: Place) -> dict[str, int]:
    """The names in a folder, with their sizes."""
    return folder.sizes() if isinstance(folder, RemotePath) else disk.listing(folder)


def fingerprint_of(path: Place) -> str:
    """Fingerprint of a file, or of a folder: on disk of its files, in a store of its listing."""
    if isinstance(path, RemotePath):
        return repr(sorted(path.sizes().items()))
    return disk.fingerprint_of(path)


def open_regular(path: Place) -> Any:
    """Open a regular file or an object for reading."""
    return io.BytesIO(path.read()) if isinstance(path, RemotePath) else disk.open_regular(path)


def local_folder(path: Place, group: Group | None = None) -> Path:
    """The folder from which a checkpoint is read, one for each machine: of a store, a scratch one.

    `fetch` copies the files into it. It is in TMPDIR, which needs room for the checkpoint until
    `release_copies`. With a `group` it is a new one, and this a collective call.
    """
    if not isinstance(path, RemotePath):
        return path
    if group or path not in copies:
        group = group or Group()
        place, _ = share_of_files(path, group)
        folders = group.agree(lambda: "" if place else tempfile.mkdtemp(prefix="checkpoint-"))
        copies[path] = Path(group.from_first(lambda: folders)[group.rank - place])
    return copies[path]


def fetch(path: Path, again: bool = False) -> None:
    """Copy a file into its `local_folder`, if that is of a store."""
    for source, folder in copies.items():
        if folder == path.parent and (again or not path.exists()):
            (source / path.name).fetch(path)


def release_copies() -> None:
    """Remove what was fetched."""
    while copies:
        shutil.rmtree(copies.popitem()[1], ignore_errors=True)


def share_of_files(path: Place, group: Group) -> tuple[int, int]:
    """This rank among those that read the same files, and their number.

    On disk these are all ranks; of a store each machine fetches a copy, which its ranks share.
    """
    if not isinstance(path, RemotePath) or group.size == 1:
        return group.rank, group.size
    return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


atexit.register(release_copies)
