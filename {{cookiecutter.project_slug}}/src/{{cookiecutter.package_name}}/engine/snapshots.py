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

This module knows neither tensors nor formats. It needs a POSIX file system that all ranks share,
on which rename is atomic and fsync is honest.
"""

import contextlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import UserError
from .control import HostGroup, RankError
from .manifest import (
    FORMAT_VERSION,
    MANIFEST,
    SnapshotError,
    best_by_validation,
    naming,
    published,
    read_manifest,
    sealed,
    sha256_of,
    step_name,
    verify,
)

log = logging.getLogger(__name__)
DAMAGED = re.compile(r"step_\d{8,}\.damaged-\d+")
RESERVED = ".saving-"
DISCARDED = ".discarded-"
Writer = Callable[[Path], Iterable[str]]  # writes a rank's files into a directory, and names them


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

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if self.every < 0 or self.keep_every < 0 or self.keep < 1:
            raise UserError("checkpoint: every and keep-every must be >= 0, keep must be >= 1")


class Snapshots:
    """The checkpoints of one run, in `directory`; every method is called by all ranks together."""

    def __init__(self, directory: Path, retention: RetentionConfig, group: HostGroup) -> None:
        self.directory, self.retention, self.group = directory, retention, group
        self.placed = False  # whether the names that lead to the directory are safe

    def publish(self, step: int, write: Writer, facts: dict[str, Any]) -> Path:
        """Save one checkpoint; `write(directory)` writes this rank's files and names them.

        `facts` goes into the manifest. SnapshotError, on every rank, when any rank failed; then
        nothing of the attempt is left and the checkpoints before are untouched.
        """
        group, target = self.group, self.directory / step_name(step)
        reservation = None
        try:
            reservation = Path(group.from_first(lambda: str(self._reserve(step))))
            written = group.agree(lambda: _write_and_hash(reservation, write))
            group.from_first(lambda: self._commit(reservation, target, step, written, facts))
        except RankError as error:
            if group.rank == 0 and reservation:
                shutil.rmtree(reservation, ignore_errors=True)
            failed = SnapshotError(f"the checkpoint of step {step} was not saved: {error}")
            failed.agreed = True
            raise failed from error
        if group.rank == 0:
            # The checkpoint is safe by now, so trouble in tidying up is no failure of the save.
            try:
                self.prune()
            except OSError as error:
                log.warning("old checkpoints could not be removed: %s", error)
        return target

    def newest_good(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that verifies, or None if none was ever published.

        Damaged ones on the way are renamed to `step_… .damaged-<n>`. SnapshotError if there are
        checkpoints but no good one: starting afresh over them must be somebody's decision. Also
        when one cannot be read: that is not damage, and may pass.
        """
        self.group.from_first(self._remove_leftovers)
        for path in reversed(self.group.from_first(lambda: published(self.directory))):
            manifest, problems = verify(path, self.group)
            if not problems:
                return path, manifest
            moved = self.group.from_first(lambda path=path: str(self._set_aside(path)))
            log.warning(
                "DAMAGED CHECKPOINT %s: %s. Moved to %s; going back to the one before it.",
                path,
                "; ".join(problems),
                moved,
            )
        if damaged := self.group.from_first(lambda: _damaged(self.directory)):
            raise SnapshotError(
                f"no good checkpoint is left in {self.directory} ({', '.join(damaged)}). "
                "Look at them, or start over with --fresh, which sets the old run aside."
            )
        return None

    def prune(self) -> None:
        """Remove what retention does not keep, and reservations nobody is writing (rank 0 only).

        Counts only checkpoints whose manifest and file sizes are right, so that damaged ones
        never push out good ones; the damaged are left for a person to look at.
        """
        good: dict[Path, dict[str, Any]] = {}
        for path in published(self.directory):
            with contextlib.suppress(RankError, OSError):  # damaged, or not to be read just now
                manifest = read_manifest(path)
                if all(
                    os.lstat(path / name).st_size == entry["size"]
                    for name, entry in manifest["files"].items()
                ):
                    good[path] = manifest
        keep = set(list(good)[-self.retention.keep :])
        if best := best_by_validation(good):
            keep.add(best)
        if every := self.retention.keep_every:
            keep.update(path for path, manifest in good.items() if manifest["step"] % every == 0)
        for path in good.keys() - keep:
            # Renamed first: a crash half way through removing must not leave half a checkpoint.
            discarded = self.directory / f"{DISCARDED}{path.name}-{uuid.uuid4().hex[:8]}"
            os.rename(path, discarded)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        # Nobody else writes here: the run directory has one writer, and it saves one at a time.
        names = os.listdir(self.directory) if self.directory.exists() else []
        if leftovers := [name for name in names if name.startswith((RESERVED, DISCARDED))]:
            # Also of a process killed before it could: else a crash of the machine might bring
            # back the name of a checkpoint that was half removed.
            sync_directory(self.directory)
            for name in leftovers:
                shutil.rmtree(self.directory / name, ignore_errors=True)

    def _reserve(self, step: int) -> Path:
        if not self.placed:
            self.directory.mkdir(parents=True, exist_ok=True)
            # This run may have made all of the path, or a process killed before it could sync it.
            for parent in self.directory.parents:
                if not os.access(parent, os.R_OK | os.W_OK):
                    break  # and nobody like us has made a name in it
                sync_directory(parent)
            self.placed = True
        reservation = self.directory / f"{RESERVED}{step_name(step)}-{uuid.uuid4().hex[:8]}"
        reservation.mkdir()
        return reservation

    def _commit(
        self,
        reservation: Path,
        target: Path,
        step: int,
        written: list[dict[str, dict[str, Any]]],
        facts: dict[str, Any],
    ) -> None:
        files = {name: entry for part in written for name, entry in part.items()}
        if len(files) != sum(map(len, written)) or not files:
            raise SnapshotError("two ranks wrote the same file, or none wrote any")
        manifest = {"format_version": FORMAT_VERSION, "step": step, "files": files, **facts}
        with naming(reservation / MANIFEST):
            (reservation / MANIFEST).write_bytes(sealed(manifest))
        read_manifest(reservation)  # what would be refused later must not be published now
        _sync(reservation / MANIFEST)
        sync_directory(reservation)
        if os.path.lexists(target):
            self._set_aside(target)
        os.rename(reservation, target)
        try:
            sync_directory(self.directory)
        except OSError:  # it is not certain to be there after a power loss
            with contextlib.suppress(OSError):
                os.rename(target, reservation)
            raise

    def _set_aside(self, path: Path) -> Path:
        for n in range(1, 1000):
            aside = path.with_name(f"{path.name}.damaged-{n}")
            if not os.path.lexists(aside):
                os.rename(path, aside)
                sync_directory(self.directory)
                return aside
        raise SnapshotError(f"{path} was damaged a thousand times: have the disk looked at")


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; a synced file whose name is not can still be lost."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _write_and_hash(directory: Path, write: Writer) -> dict[str, dict[str, Any]]:
    entries = {}
    for name in write(directory):
        path = directory / name
        # Whoever wrote the file may have synced it before its last buffer left (DCP can).
        _sync(path)
        entries[name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    return entries


def _sync(path: Path, flags: int = os.O_RDONLY) -> None:
    descriptor = os.open(path, flags)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return sorted(name for name in os.listdir(directory) if DAMAGED.fullmatch(name))
