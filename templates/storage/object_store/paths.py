"""Files of checkpoints, on disk or in an object store: find them, open them."""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError
from ..files import read_json
from . import MANIFEST, PUBLISHED, disk
from .object_store import URL, RemotePath, persistently, remote, remote_of
from .object_streams import PART

T = TypeVar("T")
Place = Any  # a Path or a RemotePath, by the settings: either has what a checkpoint needs
DAMAGED = re.compile(re.escape(MANIFEST) + r"\.damaged-\d+")


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
    return path.open() if isinstance(path, RemotePath) else disk.open_regular(path)


@contextlib.contextmanager
def local_copy(path: Place) -> Iterator[Path]:
    """A file as one on disk: an object is fetched into a temporary file."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)  # errors name the file
        with path.open() as file, copy.open("wb") as target:
            shutil.copyfileobj(file, target, PART)
        yield copy


def retried(action: Callable[[], T], path: Place) -> Callable[[], T]:
    """What writes to a path: on a disk as it is, in a store again while its failure may pass."""
    return partial(persistently, action, path) if isinstance(path, RemotePath) else action
