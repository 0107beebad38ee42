"""The manifest of a checkpoint, and whether all that it names is whole.

manifest.json names each file with its size and sha256, and ends with a digest of itself. This
detects corruption, not tampering. A manifest can name only plain files beside it.
"""

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from ..distributed import Group
from ..errors import RankError
from . import MANIFEST, PUBLISHED, CheckpointError, UnreadableError, step_name
from .paths import Place, listing, open_regular

FORMAT_VERSION = 1
FILE_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
CHUNK = 1 << 18  # bytes: what was just read is hashed while it is in the core's own cache
AHEAD = 1 << 21  # bytes that are read while as many are hashed: to hand on fewer costs too much
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


class Part(NamedTuple):
    """A part of a file, in bytes, and where it goes."""

    start: int
    length: int
    target: memoryview | Callable[[memoryview], object]
    """Memory for it; or what is called with it, and may not keep it."""


def read_once(
    path: Place, entry: dict[str, Any] | None, parts: Iterable[Part] = (), ahead: bool = False
) -> None:
    """Read a file once, hash it, and hand on parts; CheckpointError if it is not as `entry` says.

    So what is loaded is what was hashed; but parts are handed on before the whole is known to be
    good. Without an entry only the parts are read, and nothing is verified. `ahead`: another thread
    hashes what was read while this one reads on, a gain where a core is free for it.
    """
    digest, buffer, step = hashlib.sha256(), bytearray(CHUNK), AHEAD if ahead else CHUNK
    with open_regular(path) as file, ThreadPoolExecutor(1) as other:
        hashing, held = other.submit(digest.update, b"") if ahead else None, None
        size = file.seek(0, os.SEEK_END)
        if entry and size != entry["size"]:
            raise CheckpointError(f"{path.name} has {size:,} bytes, not {entry['size']:,}")
        ordered = sorted(parts, key=lambda part: part.start)
        for start, length, target in whole(ordered, size) if entry else ordered:
            if start + length > size:
                raise CheckpointError(f"{path.name} ends too early")
            if hashing and held is buffer:  # the next part may overwrite it
                hashing.result()
            if callable(target) and len(buffer) < length:
                buffer = bytearray(length)
            memory = memoryview(buffer)[:length] if callable(target) else target
            file.seek(start)
            for chunk in (memory[at : at + step] for at in range(0, length, step)):
                if file.readinto(chunk) != len(chunk):
                    raise CheckpointError(f"{path.name} ends too early")
                if hashing:
                    before, hashing = hashing, other.submit(digest.update, chunk)
                    before.result()  # so that no more than this chunk waits
                    held = chunk.obj
                elif entry:
                    digest.update(chunk)
            if callable(target):
                target(memory)
    if entry and digest.hexdigest() != entry["sha256"]:
        raise CheckpointError(f"{path.name} has other content than was saved (sha256 differs)")


def whole(parts: Iterable[Part], size: int) -> Iterator[Part]:
    """Parts of a file, in their order, and what lies between them."""
    at = 0
    for part in [*parts, Part(size, 0, len)]:
        if part.start < at:
            raise CheckpointError(f"there are parts that overlap at byte {at}")
        yield from (
            Part(begin, min(CHUNK, part.start - begin), len)
            for begin in range(at, part.start, CHUNK)
        )
        yield part
        at = part.start + part.length


def check_file(path: Place, entry: dict[str, Any]) -> str | None:
    """Compare one file with its manifest entry; return what is wrong with it, or None."""
    try:
        read_once(path, entry)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        problem = problem_of(path, error)
        if isinstance(problem, UnreadableError):
            raise problem from error
        return str(problem)
    return None


def verify(path: Place, group: Group | None = None) -> Verified:
    """Verify a checkpoint, every byte, the work divided among the ranks.

    Returns the manifest ({} if it is bad) and the problems found; the same on every rank.
    """
    group = group or Group()
    manifest, problems = verify_manifest(path, group)
    return manifest, problems or verify_files(path, manifest, group)


def verify_manifest(path: Place, group: Group) -> Verified:
    """Verify what a checkpoint says of itself, but none of its files."""

    def manifest_or_problem() -> Verified:
        try:
            manifest = read_manifest(path)
            data_of(path, manifest)
            return manifest, []
        except CheckpointError as error:
            return {}, [str(error)]

    return group.from_first(manifest_or_problem)


def verify_files(
    path: Place, manifest: dict[str, Any], group: Group, verified: Set[str] = frozenset()
) -> list[str]:
    """The problems found in files, but for those that this rank says are verified."""
    parts = group.agree(lambda: verified)
    left = group.from_first(lambda: manifest["files"].keys() - set().union(*parts))

    def check() -> list[str | None]:
        folder = data_of(path, manifest)
        mine = [pair for pair in shared_out(manifest, group) if pair[0] in left]
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            return list(pool.map(lambda pair: check_file(folder / pair[0], pair[1]), mine))

    gathered = group.agree(check)
    return group.from_first(lambda: [text for part in gathered for text in part if text])


def shared_out(manifest: dict[str, Any], group: Group) -> list[tuple[str, dict[str, Any]]]:
    """This rank's part of the files, with their entries: about as many bytes for each rank."""
    largest_first = sorted(manifest["files"].items(), key=lambda item: -item[1]["size"])
    there_and_back = 2 * group.size
    back = largest_first[there_and_back - 1 - group.rank :: there_and_back]
    return largest_first[group.rank :: there_and_back] + back


def has_sizes(folder: Place, manifest: dict[str, Any]) -> bool:
    """Whether all files of a checkpoint are in a folder, with the sizes that they should have."""
    sizes = listing(folder)
    return all(sizes.get(name) == entry["size"] for name, entry in manifest["files"].items())


def best_by_validation(manifests: dict[Place, dict[str, Any]]) -> Place | None:
    """The checkpoint with the lowest validation loss on record, the newest of equals."""
    found = ((manifest.get("validation_loss"), path) for path, manifest in manifests.items())
    losses = {path: x for x, path in found if isinstance(x, float) and math.isfinite(x)}
    return min(reversed(losses), key=losses.__getitem__, default=None)
