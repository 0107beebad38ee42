"""A published checkpoint: a directory, its manifest, and whether both are whole.

manifest.json names each file with its size and sha256, and carries a digest of itself. It is
read as untrusted: its size is bounded and it can name only plain files beside it.
"""

import errno
import hashlib
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from ..distributed import Group
from ..errors import RankError
from ..files import naming
from .remote import Place, RemotePath
from .retrying import ChangedError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 16 << 20  # bytes; keeps a hostile manifest from filling the memory
PUBLISHED = re.compile(r"step_[0-9]{8,}")
FILE_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
SEAL = b'%s"\n}'
SEALED = 64 + 3  # bytes at the end of the file
SHA256 = re.compile(r"[0-9a-f]{64}")


class UnreadableError(RankError):
    """A file is there but the system does not let it be read."""


class CheckpointError(RankError):
    """A checkpoint could not be saved, or none could be read."""


def step_name(step: int) -> str:
    """Name of the directory that holds the checkpoint of `step`."""
    return f"step_{step:08d}"


def published(directory: Place) -> list[Place]:
    """Published checkpoints, oldest first, good or not."""
    remote = isinstance(directory, RemotePath)
    try:
        names = filter(PUBLISHED.fullmatch, directory.sizes() if remote else os.listdir(directory))
        paths = [directory / name for name in sorted(names, key=lambda name: int(name[5:]))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    # On a disk one without a manifest is damaged; in a store it was never finished.
    return [path for path in paths if not remote or (path / MANIFEST).exists()]


def data_of(path: Place, manifest: dict[str, Any]) -> Place:
    """Where the files of a checkpoint lie: beside its manifest, or in a folder, as in a store."""
    if (name := manifest.get("folder")) is None:
        return path
    if isinstance(path, Path) and path.joinpath(name).is_symlink():
        raise CheckpointError(f"{name} is a link")
    return path / name


def open_plain(path: Place) -> BinaryIO:
    """Open a file for reading; CheckpointError when it is missing, a link, or no regular file.

    Nothing else is opened at all: opening a pipe waits for a writer, a device may do anything.
    """
    try:
        if isinstance(path, RemotePath):
            return path.open()
        if stat.S_ISREG(os.lstat(path).st_mode):
            return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError as error:
        # No permission or a failing disk is no damage: it must not cost a good checkpoint its name.
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise UnreadableError(f"{path} cannot be read: {reason(error)}") from error
        link = "" if isinstance(path, RemotePath) else " or is a link"
        raise CheckpointError(f"{path.name} is missing{link}") from error
    raise CheckpointError(f"{path.name} is not a regular file")


def read_manifest(path: Place) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint; CheckpointError says what is wrong."""
    if PUBLISHED.fullmatch(path.name) and isinstance(path, Path) and path.is_symlink():
        raise CheckpointError("it is a link to somewhere else")
    try:
        with open_plain(path / MANIFEST) as file:
            content = file.read(MANIFEST_LIMIT + 1)
    except ChangedError as error:
        raise CheckpointError(f"{MANIFEST} is not what was saved ({error.strerror})") from error
    except OSError as error:
        raise UnreadableError(f"{path / MANIFEST} cannot be read: {reason(error)}") from error
    return parse_manifest(content, path.name)


def reason(error: OSError) -> str:
    """What the system says, or the store."""
    return error.strerror or str(error) or type(error).__name__


def parse_manifest(content: bytes, name: str) -> dict[str, Any]:
    """Check the content of a manifest that lies in the directory `name`; CheckpointError."""
    if len(content) > MANIFEST_LIMIT:
        raise CheckpointError(f"{MANIFEST} is larger than {MANIFEST_LIMIT} bytes")
    text, digest = content[:-SEALED], content[-SEALED:]
    if digest != SEAL % hashlib.sha256(text).hexdigest().encode():
        raise CheckpointError(f"{MANIFEST} does not match its own digest")
    try:
        manifest = json.loads(content)
        version, step, files = (manifest[key] for key in ("format_version", "step", "files"))
        names_are_plain = all(map(_is_plain, files)) and _is_plain(manifest.get("folder", "x"))
        facts_are_sound = type(version) is type(step) is int and 0 <= step < 1 << 62
        facts_are_sound &= isinstance(manifest.get("validation_loss"), float | None)
        for entry in files.values():
            size, sha256 = entry["size"], entry["sha256"]
            facts_are_sound &= type(size) is int and SHA256.fullmatch(sha256) is not None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is not a manifest ({type(error).__name__})") from error
    if not facts_are_sound:
        raise CheckpointError(f"{MANIFEST} is not a manifest (something in it is of another type)")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{MANIFEST} has format {version}; this code reads {FORMAT_VERSION}")
    if not names_are_plain or not files:
        raise CheckpointError(f"{MANIFEST} names a file outside its own directory, or none at all")
    if PUBLISHED.fullmatch(name) and name != step_name(step):
        raise CheckpointError(f"{MANIFEST} belongs to {step_name(step)}")
    return manifest


def check_file(path: Place, entry: dict[str, Any]) -> str | None:
    """Compare one file with its manifest entry; return what is wrong with it, or None."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if size != entry["size"]:
                return f"{path.name} has {size:,} bytes, not {entry['size']:,}"
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                return f"{path.name} has other content than was saved (sha256 differs)"
    except CheckpointError as error:
        return str(error)
    except ChangedError as error:
        return f"{path.name} has other content than was saved ({error.strerror})"
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {reason(error)}") from error
    return None


def verify(path: Place, group: Group | None = None) -> tuple[dict[str, Any], list[str]]:
    """Verify a checkpoint, every byte, the work divided among the ranks.

    Returns the manifest ({} if it is bad) and the problems found; the same on every rank.
    """
    group = group or Group()

    def manifest_or_problem() -> tuple[dict[str, Any], list[str]]:
        try:
            manifest = read_manifest(path)
            data_of(path, manifest)
            return manifest, []
        except CheckpointError as error:
            return {}, [str(error)]

    manifest, problems = group.from_first(manifest_or_problem)
    if problems:
        return manifest, problems

    def check() -> list[str | None]:
        folder, mine = data_of(path, manifest), shared_out(manifest, group)
        return [check_file(folder / name, entry) for name, entry in mine]

    gathered = group.agree(check)
    return manifest, group.from_first(lambda: [text for part in gathered for text in part if text])


def has_sizes(folder: Place, manifest: dict[str, Any]) -> bool:
    """Whether all files of a checkpoint are in a folder, with the sizes that they should have."""
    files = manifest["files"].items()
    if isinstance(folder, RemotePath):
        sizes = folder.sizes()
        return all(sizes.get(name) == entry["size"] for name, entry in files)
    return all(os.lstat(folder / name).st_size == entry["size"] for name, entry in files)


def shared_out(manifest: dict[str, Any], group: Group) -> list[tuple[str, dict[str, Any]]]:
    """This rank's part of the files, with their entries: about as many bytes for each rank."""
    largest_first = sorted(manifest["files"].items(), key=lambda item: -item[1]["size"])
    return largest_first[group.rank :: group.size]


def best_by_validation(manifests: dict[Place, dict[str, Any]]) -> Place | None:
    """The checkpoint with the lowest validation loss on record, the newest of equals."""
    judged = {
        path: manifest["validation_loss"]
        for path, manifest in manifests.items()
        if isinstance(loss := manifest.get("validation_loss"), float) and math.isfinite(loss)
    }
    return min(reversed(judged), key=judged.__getitem__, default=None)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with naming(path), open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(manifest: dict[str, Any]) -> bytes:
    """A manifest as it is written: JSON whose last entry is the sha256 of all text before it.

    So any change is found, of a space or a double entry too, before the text is made sense of. It
    is no signature: who can change a checkpoint on purpose can seal it again.
    """
    text = f'{json.dumps(manifest, indent=1)[:-2]},\n "digest": "'.encode()
    return text + SEAL % hashlib.sha256(text).hexdigest().encode()


def digest_of(manifest: dict[str, Any]) -> str:
    """The sha256 of a manifest without its digest, written in one canonical way."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _is_plain(name: str) -> bool:
    # Nothing that leads elsewhere, and nothing that does harm when it is printed.
    return name not in (".", "..", MANIFEST) and FILE_NAME.fullmatch(name) is not None
