"""The manifest of a checkpoint, and whether all that it names is whole.

manifest.json names each file with its size and sha256, and ends with a digest of itself. This
detects corruption, not tampering. A manifest can name only plain files beside it.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..distributed import Group
from ..errors import RankError, UserError
from . import MANIFEST, PUBLISHED, CheckpointError, step_name
from .paths import Place, local_copy, open_regular

FORMAT_VERSION = 1
FILE_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
SEAL = b'%s"\n}'
SEALED = 64 + 3  # bytes at the end of the file
Verified = tuple[dict[str, Any], list[str]]  # a manifest, and its problems
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
    """Whether an error of reading is damage (CheckpointError), or may pass (RankError)."""
    if error.errno in DAMAGE:
        return CheckpointError(f"{path.name} {DAMAGE[error.errno]}")
    # No permission or a failing disk is no damage: it must not cost a good checkpoint its name.
    reason = error.strerror or str(error) or type(error).__name__
    return RankError(f"{path} cannot be read: {reason}")


@contextlib.contextmanager
def reading(path: Place) -> Iterator[None]:
    """Give all that libraries raise one type and one line."""
    try:
        yield
    except (UserError, RankError):
        raise
    except Exception as error:  # a file that is something else can fail in any way
        raise CheckpointError(f"reading {path} was refused: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The kind of an error and its first line, without torch's advice to load anything."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
    first_line = text.partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


def read_manifest(path: Place) -> dict[str, Any]:
    """Read the manifest of a checkpoint; CheckpointError says what is wrong with it."""
    try:
        with open_regular(path / MANIFEST) as file:
            content = file.read()
    except OSError as error:
        raise problem_of(path / MANIFEST, error) from error
    text, digest = content[:-SEALED], content[-SEALED:]
    if digest != SEAL % hashlib.sha256(text).hexdigest().encode():
        raise CheckpointError(f"{MANIFEST} does not match its own digest")
    try:
        manifest = _as_written_here(json.loads(content))
    except CheckpointError:
        raise
    except Exception as error:  # sealed, but by other code, or with other content
        raise CheckpointError(f"{MANIFEST} is not a manifest ({type(error).__name__})") from error
    name = step_name(manifest["step"])
    if PUBLISHED.fullmatch(path.name) and path.name != name:
        raise CheckpointError(f"{MANIFEST} belongs to {name}")
    return manifest


def _as_written_here(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with what earlier releases left out; any exception if a field cannot be used."""
    version = manifest["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:  # True == 1
        problem = f"{MANIFEST} has format {version}; this code reads {FORMAT_VERSION}"
        raise CheckpointError(problem)
    manifest["step"] = int(manifest["step"])
    manifest["files"] = {
        name: {"size": int(entry["size"]), "sha256": str(entry["sha256"])}
        for name, entry in manifest["files"].items()
    }
    manifest["config"] = dict(manifest.get("config") or {})
    # Earlier releases had the loss of the validation only.
    loss = manifest.get("validation_loss")
    rule, score = manifest.get("score") or ["min validation_loss", loss]
    # Adding 0.0 makes a float of a number, and refuses text, which `float` would take.
    manifest["validation_loss"] = None if loss is None else loss + 0.0
    manifest["score"] = ["" + rule, None if score is None else score + 0.0]
    for name in [*manifest["files"], manifest.get("folder", "x")]:
        if not FILE_NAME.fullmatch(name) or name in (".", "..", MANIFEST):
            raise CheckpointError(f"{MANIFEST} names a file outside its own directory: {name!a}")
    if not manifest["files"]:
        raise CheckpointError(f"{MANIFEST} names no file")
    return manifest


def check_file(path: Path, entry: dict[str, Any]) -> str | None:
    """Compare one file with its manifest entry; return what is wrong with it, or None."""
    try:
        with open_regular(path) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
    except OSError as error:
        if isinstance(problem := problem_of(path, error), CheckpointError):
            return str(problem)
        raise problem from error
    if size != entry["size"]:
        return f"{path.name} has {size:,} bytes, not {entry['size']:,}"
    if sha256 != entry["sha256"]:
        return f"{path.name} has other content than was saved (sha256 differs)"
    return None


def verify(path: Place, group: Group | None = None) -> Verified:
    """Verify a checkpoint, every byte, the work divided among the ranks; collective.

    Returns the manifest ({} if it cannot be read) and the problems; the same on every rank. The
    files of a checkpoint in an object store are copied for that (`local_copy`).
    """
    group = group or Group()
    # All is read twice: one wrong read must not cost a good checkpoint its name.
    manifest, problems = _read_on_first(path, group)
    if problems:
        manifest, problems = _read_on_first(path, group)
    if not problems:
        problems = _check_files(path, manifest, group)
        if problems:
            problems = _check_files(path, manifest, group)
    return manifest, problems


def _read_on_first(path: Place, group: Group) -> Verified:
    """The manifest as rank 0 reads it, and what is wrong with it; collective."""
    manifest: dict[str, Any] = {}
    problems: list[str] = []
    with group.together():
        if group.is_first:
            try:
                manifest = read_manifest(path)
            except CheckpointError as error:
                problems = [str(error)]
    return group.broadcast((manifest, problems))


def _check_files(path: Place, manifest: dict[str, Any], group: Group) -> list[str]:
    """What is wrong with the files of a checkpoint; collective."""
    folder, rank, size = local_copy(path, manifest, group)
    problems: list[str] = []
    with group.together():
        # Hashing releases Python's lock: a file for each core that this rank may use.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            checks = [
                pool.submit(check_file, folder / name, entry)
                for name, entry in shared_out(manifest, rank, size)
            ]
        problems = [problem for check in checks if (problem := check.result())]
    # Two ranks may have met the same problem.
    found = itertools.chain.from_iterable(group.gather(problems))
    return group.broadcast(list(dict.fromkeys(found)))


def shared_out(manifest: dict[str, Any], rank: int, size: int) -> list[tuple[str, dict[str, Any]]]:
    """The files, with their entries, that one of `size` ranks takes: each about as many bytes."""
    sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
    names = sorted(sizes, key=sizes.__getitem__, reverse=True)
    # In snake order (ranks 0 to n, then n to 0), which balances the bytes per rank.
    mine = names[rank :: 2 * size] + names[2 * size - 1 - rank :: 2 * size]
    return [(name, manifest["files"][name]) for name in mine]
