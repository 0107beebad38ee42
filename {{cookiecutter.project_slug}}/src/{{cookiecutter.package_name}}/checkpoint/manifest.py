"""Read and write the manifest of a checkpoint, and verify the files that it names.

manifest.json lists each file with its size and sha256, and ends with a digest of its own text. The
digest detects corruption, not tampering. A manifest can only name files in its own directory, or in
one folder of this directory.
"""

import contextlib
import errno
import hashlib
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
# The end of manifest.json: the digest, which has 64 hex digits, and the characters that close the
# JSON.
SEAL = b'%s"\n}'
SEAL_LENGTH = 64 + 3
# The manifest of a checkpoint, and a text for each problem of the checkpoint ([] if it is good).
Verified = tuple[dict[str, Any], list[str]]
# Read errors that mean damage. EBADMSG comes from storage with its own checksums.
DAMAGE = {
    errno.ENOENT: "is missing",
    errno.ENOTDIR: "is missing",
    errno.EINVAL: "is not a regular file",
    errno.ELOOP: "is a link",
    errno.EBADMSG: "has other content than was saved",
}


def sealed(manifest: dict[str, Any]) -> bytes:
    """Serialize a manifest as JSON that ends with a digest: the sha256 of all text before it."""
    without_end = json.dumps(manifest, indent=1).removesuffix("\n}")
    text = f'{without_end},\n "digest": "'.encode()
    digest = hashlib.sha256(text).hexdigest()
    return text + SEAL % digest.encode()


def problem_of(path: Place, error: OSError) -> RankError:
    """Return a CheckpointError if a read error means damage; a RankError if it may be temporary."""
    if error.errno in DAMAGE:
        return CheckpointError(f"{path.name} {DAMAGE[error.errno]}")
    # A lack of permission or a failing disk does not mean that the file is damaged. A
    # CheckpointError would make the caller set the checkpoint aside.
    reason = error.strerror or str(error) or type(error).__name__
    return RankError(f"{path} cannot be read: {reason}")


@contextlib.contextmanager
def reading(path: Place) -> Iterator[None]:
    """Convert an error in the block to a CheckpointError of one line.

    UserError and RankError, which this project raises, pass unchanged.
    """
    try:
        yield
    except (UserError, RankError):
        raise
    except Exception as error:
        # A library may raise any exception for a file of the wrong format.
        raise CheckpointError(f"{path} cannot be loaded: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """Return an error's type and first line, without torch's advice to disable weights_only."""
    # torch's advice comes before these words. If a message lacks them, `text` is all of it.
    _, _, text = str(error).rpartition("WeightsUnpickler error: ")
    first_line, _, _ = text.strip().partition("\n")
    return f"{type(error).__name__}: {first_line}"


def read_manifest(path: Place) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint.

    Raises CheckpointError if the manifest is damaged, and another RankError if it cannot be read.
    """
    try:
        with open_regular(path / MANIFEST) as file:
            content = file.read()
    except OSError as error:
        raise problem_of(path / MANIFEST, error) from error
    text = content[:-SEAL_LENGTH]
    digest = hashlib.sha256(text).hexdigest()
    if content[-SEAL_LENGTH:] != SEAL % digest.encode():
        raise CheckpointError(f"{MANIFEST} does not match its own digest")
    try:
        manifest = _in_this_release(json.loads(content))
    except CheckpointError:
        raise
    except Exception as error:
        # The digest is correct, so the file is not corrupted: other code wrote it.
        raise CheckpointError(f"{MANIFEST} is not a manifest ({type(error).__name__})") from error
    # The directory of a copy may have any name except the name of another step.
    name = step_name(manifest["step"])
    if PUBLISHED.fullmatch(path.name) and path.name != name:
        raise CheckpointError(f"{MANIFEST} belongs to {name}")
    return manifest


def _in_this_release(manifest: dict[str, Any]) -> dict[str, Any]:
    """Check a manifest's types and file names; add the fields that earlier releases did not write.

    Changes the manifest in place, and returns it. Raises CheckpointError for an unknown format, a
    forbidden file name, or no file at all. A missing field, or one of the wrong type, may raise any
    other error, which the caller turns into a CheckpointError.
    """
    version = manifest["format_version"]
    # `isinstance` would accept True, which is an int and equals 1.
    if type(version) is not int or version != FORMAT_VERSION:
        problem = f"{MANIFEST} has format {version}; this code reads {FORMAT_VERSION}"
        raise CheckpointError(problem)
    # `int` would convert a string. Adding 0 raises an error for a string.
    manifest["step"] = int(manifest["step"] + 0)
    files: dict[str, dict[str, Any]] = {}
    for name, entry in manifest["files"].items():
        files[name] = {"size": int(entry["size"]), "sha256": str(entry["sha256"])}
    manifest["files"] = files
    manifest["config"] = dict(manifest.get("config") or {})
    if "base" in manifest:
        base = manifest["base"]
        manifest["base"] = {
            "path": str(base["path"]),
            "digest": str(base["digest"]),
            "tied": dict(base["tied"]),
        }
    # Earlier releases stored no score, only the validation loss.
    loss = manifest.get("validation_loss")
    rule, score = "min validation_loss", loss
    if manifest.get("score"):
        rule, score = manifest["score"]
    # Adding 0.0 converts a number to a float, and raises an error for a string, which `float` would
    # convert. Adding "" raises an error for a rule that is not a string.
    manifest["validation_loss"] = None if loss is None else loss + 0.0
    manifest["score"] = ["" + rule, None if score is None else score + 0.0]
    names = list(files)
    # A checkpoint in an object store, or a copy of it, has its files in this folder.
    if "folder" in manifest:
        names.append(manifest["folder"])
    for name in names:
        if not FILE_NAME.fullmatch(name) or name in (".", "..", MANIFEST):
            raise CheckpointError(f"{MANIFEST} names a file outside its own directory: {name!a}")
    if not files:
        raise CheckpointError(f"{MANIFEST} names no file")
    return manifest


def check_file(path: Path, entry: dict[str, Any]) -> str | None:
    """Compare a file with its entry in the manifest; return the problem, or None if it is good.

    Raises RankError if the file cannot be read, which does not mean damage.
    """
    try:
        with open_regular(path) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            # Hashing has read the file to its end, so the position is the size.
            size = file.tell()
    except OSError as error:
        problem = problem_of(path, error)
        if isinstance(problem, CheckpointError):
            return str(problem)
        raise problem from error
    if size != entry["size"]:
        return f"{path.name} has {size:,} bytes, not {entry['size']:,}"
    if sha256 != entry["sha256"]:
        return f"{path.name} has other content than was saved (sha256 differs)"
    return None


def verify(path: Place, group: Group | None = None) -> Verified:
    """Verify every byte of a checkpoint; collective.

    The ranks divide the files among them. All ranks return the same manifest ({} if it is damaged)
    and problems. Raises RankError, on every rank, if any rank cannot read a file: this does not
    mean that the file is damaged.
    """
    group = group or Group()
    # Repeat a failed check: after a single bad read, a good checkpoint must not count as damaged.
    manifest, problems = _read_on_first(path, group)
    if problems:
        manifest, problems = _read_on_first(path, group)
    if not problems:
        problems = _check_files(path, manifest, group)
        if problems:
            problems = _check_files(path, manifest, group)
    return manifest, problems


def _read_on_first(path: Place, group: Group) -> Verified:
    """Read the manifest on rank 0; return it and its problems on every rank; collective.

    Raises RankError, on every rank, if rank 0 cannot read it, which does not mean damage.
    """
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
    """Return the problems of all files of a checkpoint, on every rank; collective.

    Raises RankError, on every rank, if any rank cannot read a file.
    """
    local = local_copy(path, manifest, group)
    problems: list[str] = []
    with group.together():
        # Hashing releases the GIL, so these threads run in parallel, one on each core that this
        # rank may use.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            checks = []
            for name in files_of_rank(manifest, local.rank, local.ranks):
                entry = manifest["files"][name]
                checks.append(pool.submit(check_file, local.folder / name, entry))
        for check in checks:
            problem = check.result()
            if problem is not None:
                problems.append(problem)
    # Several machines may report the same problem: the keys of `distinct` hold it once. Only rank 0
    # gathers the problems of all ranks, so it sends the result to the other ranks.
    distinct: dict[str, None] = {}
    for of_one_rank in group.gather(problems):
        distinct.update(dict.fromkeys(of_one_rank))
    return group.broadcast(list(distinct))


def files_of_rank(manifest: dict[str, Any], rank: int, ranks: int) -> list[str]:
    """Return the names of the files that a rank checks; all ranks get similar numbers of bytes."""
    sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
    largest_first = sorted(sizes, key=sizes.__getitem__, reverse=True)
    # Deal out the files from the first rank to the last, then from the last to the first, and so
    # on: with three ranks to 0, 1, 2, 2, 1, 0, 0, 1, 2. This balances the bytes.
    names: list[str] = []
    for index, name in enumerate(largest_first):
        turn, offset = divmod(index, ranks)
        chosen = offset if turn % 2 == 0 else ranks - 1 - offset
        if chosen == rank:
            names.append(name)
    return names
