"""The manifest of a checkpoint, and whether all that it names is whole.

manifest.json names each file with its size and sha256, and ends with a digest of itself. This
detects corruption, not tampering. A manifest can name only plain files beside it.
"""

import contextlib
import errno
import hashlib
import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..distributed import Group
from ..errors import RankError, UserError
from . import MANIFEST, PUBLISHED, CheckpointError, UnreadableError, step_name
from .paths import Place, fetch, listing, local_folder, open_regular, share_of_files

FORMAT_VERSION = 1
FILE_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
SEAL = b'%s"\n}'
SEALED = 64 + 3  # bytes at the end of the file
Verified = tuple[dict[str, Any], list[str]]  # a manifest, and the problems that were found
DAMAGE = {
    errno.ENOENT: "is missing",
    errno.ENOTDIR: "is missing",
    errno.EINVAL: "is not a regular file",
    errno.ELOOP: "is a link",
    errno.EBADMSG: "has other content than was saved",  # by the checksums of the storage
}


def sealed(manifest: dict[str, Any]) -> bytes:
    """A manifest as it is written: JSON whose last entry is the sha256 of all text before it."""
    text = f'{json.dumps(manifest, indent=1)[:-2]},\n "digest": "'.encode()
    return text + SEAL % hashlib.sha256(text).hexdigest().encode()


def problem_of(path: Place, error: OSError) -> RankError:
    """Whether an error of reading is damage (CheckpointError), or may pass (UnreadableError)."""
    if error.errno in DAMAGE:
        return CheckpointError(f"{path.name} {DAMAGE[error.errno]}")
    # No permission or a failing disk is no damage: it must not cost a good checkpoint its name.
    reason = error.strerror or str(error) or type(error).__name__
    return UnreadableError(f"{path} cannot be read: {reason}")


@contextlib.contextmanager
def reading(path: Place, verb: str = "reading") -> Iterator[None]:
    """Give all that libraries raise one type and one line."""
    doing = f"{verb} {path}"
    try:
        yield
    except (UserError, RankError):
        raise
    except OSError as error:
        raise CheckpointError(f"{doing} failed: {error}") from error
    except Exception as error:  # a file that is something else can fail in any way
        reason = f"{error}".rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        text = f"{doing} was refused: {type(error).__name__}: {reason}"
        raise CheckpointError(text) from error


def read_manifest(path: Place) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint; CheckpointError says what is wrong."""
    if PUBLISHED.fullmatch(path.name) and path.is_symlink():
        raise CheckpointError("it is a link to somewhere else")
    try:
        with open_regular(path / MANIFEST) as file:
            content = file.read()
    except OSError as error:
        raise problem_of(path / MANIFEST, error) from error
    return parse_manifest(content, path.name)


def parse_manifest(content: bytes, name: str) -> dict[str, Any]:
    """Check the content of a manifest that lies in the directory `name`; CheckpointError."""
    text, digest = content[:-SEALED], content[-SEALED:]
    if digest != SEAL % hashlib.sha256(text).hexdigest().encode():
        raise CheckpointError(f"{MANIFEST} does not match its own digest")
    try:
        manifest = json.loads(content)
        version, step = manifest["format_version"], manifest["step"]
        loss, entries = manifest.get("validation_loss"), manifest["files"].values()
        if not all(type(n) is int for n in (version, step, *(entry["size"] for entry in entries))):
            raise TypeError("a version, a step or a size is no integer")
        if not isinstance(loss, float | None):
            raise TypeError("the validation loss is no number")
        names = [*manifest["files"], manifest.get("folder", "x")]
        plain = all(map(FILE_NAME.fullmatch, names)) and not {".", "..", MANIFEST} & {*names}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is not a manifest ({type(error).__name__})") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{MANIFEST} has format {version}; this code reads {FORMAT_VERSION}")
    if not plain or not entries:
        raise CheckpointError(f"{MANIFEST} names a file outside its own directory, or none at all")
    if PUBLISHED.fullmatch(name) and name != step_name(step):
        raise CheckpointError(f"{MANIFEST} belongs to {step_name(step)}")
    return manifest


def data_of(path: Place, manifest: dict[str, Any]) -> Place:
    """Where the files of a checkpoint lie: beside its manifest, or in a folder (object stores)."""
    if (name := manifest.get("folder")) is None:
        return path
    if (path / name).is_symlink():
        raise CheckpointError(f"{name} is a link")
    return path / name


def check_file(path: Path, entry: dict[str, Any]) -> str | None:
    """Compare one file with its manifest entry; return what is wrong with it, or None."""
    size, sha256 = 0, ""
    try:
        for again in (False, True):
            fetch(path, again)
            with open_regular(path) as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                size = file.tell()
            if (size, sha256) == (entry["size"], entry["sha256"]):
                return None
            # Read twice: one wrong read must not cost a good checkpoint its name.
    except OSError as error:
        problem = problem_of(path, error)
        if isinstance(problem, UnreadableError):
            raise problem from error
        return str(problem)
    if size != entry["size"]:
        return f"{path.name} has {size:,} bytes, not {entry['size']:,}"
    return f"{path.name} has other content than was saved (sha256 differs)"


def verify(path: Place, group: Group | None = None) -> Verified:
    """Verify a checkpoint, every byte, the work divided among the ranks.

    Returns the manifest ({} if it is bad) and the problems found; the same on every rank. The files
    of a checkpoint in an object store are fetched for that (`local_folder`).
    """
    group = group or Group()

    def manifest_or_problem() -> Verified:
        try:
            manifest = read_manifest(path)
            data_of(path, manifest)
            return manifest, []
        except CheckpointError as error:
            return {}, [str(error)]

    manifest, problems = group.from_first(manifest_or_problem)
    if problems:
        return manifest, problems
    folder = local_folder(data_of(path, manifest), group)

    def check() -> list[str | None]:
        mine = shared_out(manifest, *share_of_files(path, group))
        # Hashing lets go of Python's lock: a file for each core that this rank may use.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            return list(pool.map(lambda item: check_file(folder / item[0], item[1]), mine))

    gathered = group.agree(check)
    found = (text for part in gathered for text in part if text)
    return manifest, group.from_first(lambda: [*dict.fromkeys(found)])


def shared_out(manifest: dict[str, Any], rank: int, size: int) -> list[tuple[str, dict[str, Any]]]:
    """The files, with their entries, that one of `size` ranks takes: each about as many bytes."""
    largest_first = sorted(manifest["files"].items(), key=lambda item: -item[1]["size"])
    there_and_back = 2 * size
    back = largest_first[there_and_back - 1 - rank :: there_and_back]
    return largest_first[rank::there_and_back] + back


def has_sizes(folder: Place, manifest: dict[str, Any]) -> bool:
    """Whether all files of a checkpoint are in a folder, with the sizes that they should have."""
    sizes = listing(folder)
    return all(sizes.get(name) == entry["size"] for name, entry in manifest["files"].items())


def best_by_validation(manifests: dict[Place, dict[str, Any]]) -> Place | None:
    """The checkpoint with the lowest validation loss on record, the newest of equals."""
    found = ((manifest.get("validation_loss"), path) for path, manifest in manifests.items())
    losses = {path: x for x, path in found if isinstance(x, float) and math.isfinite(x)}
    return min(reversed(losses), key=losses.__getitem__, default=None)
