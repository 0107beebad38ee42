"""The manifest of a checkpoint, and whether all that it names is whole.

manifest.json names each file with its size and sha256, and ends with a digest of itself. This
detects corruption, not tampering. A manifest can name only plain files beside it.
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
        reason = f"{error}".rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        text = f"reading {path} was refused: {type(error).__name__}: {reason}"
        raise CheckpointError(text) from error


def read_manifest(path: Place) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint; CheckpointError says what is wrong."""
    try:
        with open_regular(path / MANIFEST) as file:
            content = file.read()
    except OSError as error:
        raise problem_of(path / MANIFEST, error) from error
    text, digest = content[:-SEALED], content[-SEALED:]
    if digest != SEAL % hashlib.sha256(text).hexdigest().encode():
        raise CheckpointError(f"{MANIFEST} does not match its own digest")
    try:
        manifest = json.loads(content)
        version, name = manifest["format_version"], step_name(manifest["step"])
        names = [*manifest["files"], manifest.get("folder", "x")]
        plain = all(map(FILE_NAME.fullmatch, names)) and not {".", "..", MANIFEST} & {*names}
        if not isinstance(manifest.get("config"), dict):  # of an earlier release
            manifest["config"] = {}
        if any(type(entry["size"]) is not int for entry in manifest["files"].values()):
            raise TypeError("a size is no integer")
        loss = manifest.get("validation_loss")  # all that earlier releases have of a validation
        rule, score = manifest.setdefault("score", ["min validation_loss", loss])
        if not (isinstance(rule, str) and {type(loss), type(score)} <= {float, type(None)}):
            raise TypeError("a figure of the validation is no number")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is not a manifest ({type(error).__name__})") from error
    if type(version) is not int or version != FORMAT_VERSION:  # True == 1
        raise CheckpointError(f"{MANIFEST} has format {version}; this code reads {FORMAT_VERSION}")
    if not plain or not manifest["files"]:
        raise CheckpointError(f"{MANIFEST} names a file outside its own directory, or none at all")
    if PUBLISHED.fullmatch(path.name) and path.name != name:
        raise CheckpointError(f"{MANIFEST} belongs to {name}")
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
    """Verify a checkpoint, every byte, the work divided among the ranks.

    Returns the manifest ({} if it is bad) and the problems; the same on every rank. The files of a
    checkpoint in an object store are copied for that (`local_copy`).
    """
    group = group or Group()

    def manifest_or_problem() -> Verified:
        try:
            return read_manifest(path), []
        except CheckpointError as error:
            return {}, [str(error)]

    def check_files() -> list[str]:
        folder, rank, size = local_copy(path, manifest, group)

        def check() -> list[str | None]:
            mine = shared_out(manifest, rank, size)
            # Hashing lets go of Python's lock: a file for each core that this rank may use.
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                return list(pool.map(lambda item: check_file(folder / item[0], item[1]), mine))

        texts = (text for part in group.agree(check) for text in part if text)
        return group.from_first(lambda: [*dict.fromkeys(texts)])

    # All is read twice: one wrong read must not cost a good checkpoint its name.
    read = group.from_first(manifest_or_problem)
    manifest, problems = read if read[0] else group.from_first(manifest_or_problem)
    return manifest, problems or (check_files() and check_files())


def shared_out(manifest: dict[str, Any], rank: int, size: int) -> list[tuple[str, dict[str, Any]]]:
    """The files, with their entries, that one of `size` ranks takes: each about as many bytes."""
    largest_first = sorted(manifest["files"].items(), key=lambda item: -item[1]["size"])
    # Dealt there and back, so that the ranks' sums are near each other.
    return largest_first[rank :: 2 * size] + largest_first[2 * size - 1 - rank :: 2 * size]
