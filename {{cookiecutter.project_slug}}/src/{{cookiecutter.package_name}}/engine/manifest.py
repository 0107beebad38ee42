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
from typing import Any

from .control import HostGroup, RankError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 64 << 20  # bytes; keeps a hostile manifest from filling the memory
PUBLISHED = re.compile(r"step_(\d{8,})")


class UnreadableError(RankError):
    """A file is there but the system does not let it be read."""


class SnapshotError(RankError):
    """A checkpoint could not be saved, or none could be read."""


def step_name(step: int) -> str:
    """Name of the directory that holds the checkpoint of `step`."""
    return f"step_{step:08d}"


def published(directory: Path) -> list[Path]:
    """Published checkpoints, oldest first, good or not."""
    try:
        names = [name for name in os.listdir(directory) if PUBLISHED.fullmatch(name)]
    except FileNotFoundError:
        return []
    return [directory / name for name in sorted(names, key=lambda name: int(name[5:]))]


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check the manifest of the checkpoint at `path`; SnapshotError says what is wrong."""
    try:
        with open(os.open(path / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            content = file.read(MANIFEST_LIMIT + 1)
        if len(content) > MANIFEST_LIMIT:
            raise SnapshotError(f"{MANIFEST} is larger than {MANIFEST_LIMIT} bytes")
        manifest = json.loads(content)
        digest = manifest.pop("digest")
        if digest != digest_of(manifest):
            raise SnapshotError(f"{MANIFEST} does not match its own digest")
        version, step, files = (manifest[key] for key in ("format_version", "step", "files"))
        names_are_plain = all(_is_plain(name) for name in files)
        sizes_and_hashes = [(int(entry["size"]), str(entry["sha256"])) for entry in files.values()]
    except OSError as error:
        raise SnapshotError(_absent(path / MANIFEST, error)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{MANIFEST} is not a manifest ({type(error).__name__})") from error
    if version != FORMAT_VERSION:
        raise SnapshotError(f"{MANIFEST} has format {version}; this code reads {FORMAT_VERSION}")
    if not names_are_plain or not sizes_and_hashes:
        raise SnapshotError(f"{MANIFEST} names a file outside its own directory, or none at all")
    if PUBLISHED.fullmatch(path.name) and path.name != step_name(step):
        raise SnapshotError(f"{MANIFEST} belongs to {step_name(step)}")
    return manifest


def check_file(path: Path, entry: dict[str, Any]) -> str | None:
    """Compare one file with its manifest entry; return what is wrong with it, or None."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            return f"{path.name} is not a regular file"
        if found.st_size != entry["size"]:
            return f"{path.name} has {found.st_size:,} bytes, not {entry['size']:,}"
        if sha256_of(path) != entry["sha256"]:
            return f"{path.name} has other content than was saved (sha256 differs)"
    except OSError as error:
        return _absent(path, error)
    return None


def _absent(path: Path, error: OSError) -> str:
    # No permission or a failing disk is no damage: it must not cost a good checkpoint its name.
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        return f"{path.name} is missing or is a link"
    raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error


def verify(path: Path, group: HostGroup | None = None) -> tuple[dict[str, Any], list[str]]:
    """Verify a checkpoint, every byte, the work divided among the ranks.

    Returns the manifest ({} if it is bad) and the problems found; the same on every rank.
    """
    group = group or HostGroup()

    def manifest_or_problem() -> tuple[dict[str, Any], list[str]]:
        try:
            return read_manifest(path), []
        except SnapshotError as error:
            return {}, [str(error)]

    manifest, problems = group.from_first(manifest_or_problem)
    if problems:
        return manifest, problems
    largest_first = sorted(manifest["files"].items(), key=lambda item: -item[1]["size"])
    mine = largest_first[group.rank :: group.size]
    gathered = group.agree(lambda: [check_file(path / name, entry) for name, entry in mine])
    return manifest, group.from_first(lambda: [text for part in gathered for text in part if text])


def best_by_validation(manifests: dict[Path, dict[str, Any]]) -> Path | None:
    """The checkpoint with the lowest validation loss on record, the newest of equals."""
    judged = {
        path: manifest["validation_loss"]
        for path, manifest in manifests.items()
        if isinstance(loss := manifest.get("validation_loss"), float) and math.isfinite(loss)
    }
    return min(reversed(judged), key=judged.__getitem__, default=None)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(manifest: dict[str, Any]) -> str:
    """The sha256 of a manifest without its digest, written in one canonical way."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..", MANIFEST) and not re.search(r"[/\\\0]", name)
