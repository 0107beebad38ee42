"""Publish, verify, fall back, prune: how a directory of checkpoints survives anything.

A checkpoint is a directory `step_00000120/`: a manifest.json and the files it names. It comes into
being like this, and at no instant is there no loadable checkpoint:

1. rank 0 makes a fresh, reserved directory beside the published ones;
2. every rank writes its files there; a failure on any rank fails the save on every rank;
3. every rank syncs its files to disk and hashes them (sha256);
4. rank 0 writes the manifest, syncs it and the directory;
5. rank 0 renames the reservation to its final name, and syncs the parent directory;
6. rank 0 prunes.

What is published is never written again. Reading goes the other way: the newest checkpoint whose
manifest and every file verify; a damaged one is moved aside, named aloud, and never counted.

This module knows neither tensors nor formats, and storage.py what a disk needs for this, which has
to be a POSIX file system that all ranks share, on which rename is atomic and fsync is honest. In an
object store the manifest alone publishes, written last: object_storage.py.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..distributed import Group
from ..errors import RankError, UserError
from .disk import DiskStorage
from .manifest import (
    FORMAT_VERSION,
    CheckpointError,
    best_by_validation,
    data_of,
    has_sizes,
    published,
    read_manifest,
    step_name,
    verify,
)
from .object_store import ObjectStorage
from .remote import Place, RemotePath, check_address, located

log = logging.getLogger(__name__)
Writer = Callable[[Place], Iterable[str]]  # writes a rank's files into a folder, and names them


@dataclass(frozen=True)
class RetentionConfig:
    """When to save, and which checkpoints to keep."""

    every: int = 100
    """Save every this many steps (0: only at the end and when asked to stop)."""
    keep: int = 3
    """Keep this many of the newest checkpoints, and the best by validation."""
    keep_every: int = 0
    """Also keep for good each checkpoint whose step is a multiple of this (0: none)."""
    on_failure: Literal["stop", "continue"] = "stop"
    """After a failed save: "stop" ends training, "continue" goes on to the next save."""
    url: str | None = None
    """Keep them in an object store, as in s3://bucket/run, of this run alone (default: on disk,
    in the run directory, which all machines then have to share)."""
    local_first: bool = False
    """With a url: publish on disk, and upload that behind training."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if self.every < 0 or self.keep_every < 0 or self.keep < 1:
            raise UserError("checkpoint: every and keep-every must be >= 0, keep must be >= 1")
        if self.url is not None:
            check_address(self.url)
        if self.local_first and not self.url:
            raise UserError("--checkpoint.local-first uploads to a --checkpoint.url: give one")

    @property
    def far(self) -> bool:
        """Whether they are in the store only, and the run directory has none."""
        return self.url is not None and not self.local_first


class Snapshots:
    """The checkpoints of one run, in `directory`; every method is called by all ranks together."""

    def __init__(
        self,
        directory: Place,
        retention: RetentionConfig,
        group: Group,
        identity: dict[str, Any] | None = None,
    ) -> None:
        """`identity` is that of the run, if a store is to be refused that has another's."""
        self.directory, self.retention, self.group = directory, retention, group
        self.storage = storage_of(directory, identity)
        self.in_use: Callable[[], Place | None] = lambda: None
        """A checkpoint that is not to be pruned now, since somebody reads it."""

    def publish(self, step: int, write: Writer, facts: dict[str, Any]) -> Place:
        """Save one checkpoint; `write(folder)` writes this rank's files and names them.

        `facts` goes into the manifest. CheckpointError, on every rank, when any rank failed; then
        nothing of the attempt is left and the checkpoints before are untouched.
        """
        group, storage, reserved = self.group, self.storage, None

        def write_and_hash() -> dict[str, dict[str, Any]]:
            folder = self.directory / reserved
            return {name: storage.finish(folder / name) for name in write(folder)}

        def commit() -> None:
            files = {name: entry for part in written for name, entry in part.items()}
            if len(files) != sum(map(len, written)) or not files:
                raise CheckpointError("two ranks wrote the same file, or none wrote any")
            manifest = {"format_version": FORMAT_VERSION, "step": step, "files": files, **facts}
            storage.commit(reserved, manifest)

        try:
            reserved = group.from_first(lambda: storage.reserve(step))
            written = group.agree(write_and_hash)
            group.from_first(commit)
        except RankError as error:
            if group.rank == 0 and reserved:
                storage.abandon(reserved)
            failed = CheckpointError(f"the checkpoint of step {step} was not saved: {error}")
            failed.agreed = True
            raise failed from error
        if group.rank == 0:
            self.tidy_up()
        return self.directory / step_name(step)

    def newest_good(self) -> tuple[Place, dict[str, Any]] | None:
        """The newest checkpoint that verifies, or None if none was ever published.

        Damaged ones on the way are renamed to `step_… .damaged-<n>`. CheckpointError if there are
        checkpoints but no good one: starting afresh over them must be somebody's decision. Also
        when one cannot be read: that is not damage, and may pass.
        """
        self.group.from_first(self.storage.refuse_others)
        self.storage.claim(self.group)
        self.group.from_first(self.storage.remove_leftovers)
        for path in reversed(self.group.from_first(lambda: published(self.directory))):
            manifest, problems = verify(path, self.group)
            if not problems:
                return path, manifest
            moved = self.group.from_first(lambda path=path: str(self.storage.set_aside(path)))
            log.warning(
                "DAMAGED CHECKPOINT %s: %s. Moved to %s; going back to the one before it.",
                path,
                "; ".join(problems),
                moved,
            )
        if damaged := self.group.from_first(self.storage.damaged):
            raise CheckpointError(
                f"no good checkpoint is left in {self.directory} ({', '.join(damaged)}). "
                f"Look at them, or {self.storage.start_over}."
            )
        return None

    def tidy_up(self) -> None:
        """Prune; the checkpoint is safe by now, so trouble with this is no failure of the save."""
        try:
            self.prune()
        except (OSError, RankError, UserError) as error:
            log.warning("old checkpoints could not be removed: %s", error)

    def prune(self) -> None:
        """Remove what retention does not keep, and reservations nobody is writing (rank 0 only).

        Counts only checkpoints whose manifest and file sizes are right, so that damaged ones
        never push out good ones; the damaged are left for a person to look at.
        """
        good: dict[Place, dict[str, Any]] = {}
        for path in published(self.directory):
            with contextlib.suppress(RankError, OSError):  # damaged, or not to be read just now
                manifest = read_manifest(path)
                if has_sizes(data_of(path, manifest), manifest):
                    good[path] = manifest
        keep = set(list(good)[-self.retention.keep :])
        if best := best_by_validation(good):
            keep.add(best)
        if every := self.retention.keep_every:
            keep.update(path for path, manifest in good.items() if manifest["step"] % every == 0)
        for path in good.keys() - keep - {self.in_use()}:
            self.storage.discard(path, good[path])
        self.storage.remove_leftovers()


def storage_of(
    directory: Place, identity: dict[str, Any] | None = None
) -> DiskStorage | ObjectStorage:
    """What knows how to keep checkpoints there."""
    if isinstance(directory, RemotePath):
        return ObjectStorage(directory, identity)
    return DiskStorage(directory)


def checkpoints_of(run: Place) -> Place:
    """Where a run has its checkpoints: in the store that its settings name, else in itself.

    A URL is the place itself.
    """
    if isinstance(run, RemotePath):
        return run
    url = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        url = json.loads((run / "config.json").read_text("utf-8"))["checkpoint"]["url"]
    return located(url) if url else run / "checkpoints"


def list_checkpoints(run_dir: Path) -> tuple[list[str], bool]:
    """Verify all checkpoints of a run: a line for each, and whether one is damaged."""
    directory = checkpoints_of(located(run_dir))
    found = {path: verify(path) for path in published(directory)}
    if not found:
        raise UserError(f"there are no checkpoints in {directory}: train first")
    best = best_by_validation({path: m for path, (m, problems) in found.items() if not problems})
    lines = []
    for path, (manifest, problems) in found.items():
        if not path.exists():
            continue  # pruned by a run that is under way
        if problems:
            lines.append(f"{path.name}  DAMAGED  {'; '.join(problems)}")
            continue
        size = sum(entry["size"] for entry in manifest["files"].values()) / 1e6
        line = f"{path.name}  good  {size:,.1f} MB in {len(manifest['files'])} files"
        if (loss := manifest.get("validation_loss")) is not None:
            line += f"  validation loss {loss:.4f}"
        lines.append(line + ("  best" if path == best else ""))
    lines += [f"{name}  set aside" for name in storage_of(directory).damaged()]
    return lines, any(problems and path.exists() for path, (_, problems) in found.items())
