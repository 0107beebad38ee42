"""Publish, find, set aside and prune checkpoints, so that their directory survives any crash.

A checkpoint is a directory such as `step_00000120/` with a manifest.json and the files that it
names. After the first save, there is a loadable checkpoint at every instant, since a save takes
these steps:

1. rank 0 makes a new directory next to the published checkpoints: the reservation;
2. every rank writes its files there; a failure on any rank fails the save on every rank;
3. every rank syncs its files to disk and hashes them (sha256);
4. rank 0 writes the manifest, and syncs the manifest and the reservation;
5. rank 0 renames the reservation to its final name, and syncs the parent directory;
6. rank 0 prunes old checkpoints.

A published checkpoint is never written to again. A restore takes the newest checkpoint that is not
damaged. It renames damaged ones with a warning, and `prune` neither counts nor removes them.

The file system must be POSIX and shared by all ranks. Its rename must be atomic, and its fsync must
really write to disk.
"""

import contextlib
import errno
import hashlib
import logging
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..distributed import Group
from ..errors import RankError, UserError
from ..files import naming, rename_directory, sync_directory
from . import MANIFEST, CheckpointError, step_name
from .manifest import FORMAT_VERSION, read_manifest, sealed, verify
from .paths import Place, damaged, published

log = logging.getLogger(__name__)
# The prefixes of names: of reservations, and of checkpoints that are being removed.
RESERVED = ".saving-"
DISCARDED = ".discarded-"
# A function that writes a rank's files into a folder, and returns their names.
Write = Callable[[Path], Iterable[str]]
# A checkpoint and its manifest.
Found = tuple[Place, dict[str, Any]]


@dataclass(frozen=True)
class RetentionConfig:
    """When to save, and which checkpoints to keep."""

    every: int = 100
    """Steps between saves (0: only at the end and when asked to stop)."""
    keep: int = 3
    """Keep this many of the newest checkpoints, and the best by validation."""
    best: str = "validation_loss"
    """Validation metric that selects the best checkpoint, such as validation_accuracy."""
    best_is: Literal["min", "max"] = "min"
    """Whether the smallest or the largest value is the best."""
    keep_every: int = 0
    """Also keep forever each checkpoint whose step is a multiple of this (0: none)."""
    frozen: Literal["all", "no"] = "all"
    """Frozen weights: "all" saves them, "no" leaves out those in the files of --init-from."""
    on_failure: Literal["stop", "continue"] = "stop"
    """After a failed save: "stop" ends training, "continue" trains until the next save."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if min(self.every, self.keep_every) < 0 or self.keep < 1:
            raise UserError("checkpoint: every and keep-every must be >= 0, keep must be >= 1")
        if not self.best.startswith("validation_"):
            raise UserError(
                f"--checkpoint.best {self.best} is not a validation metric: its name must begin "
                "with validation_, as in validation_loss"
            )


class Publisher:
    """The checkpoints of one run, in `directory`.

    All ranks call `publish`, `newest_good` and `close` together. Inside these, every rank calls
    `folder_of` and `make_durable`, and only rank 0 calls the other methods.
    """

    # The advice in error messages on how to begin without the old checkpoints.
    start_over = "start over with --fresh, which sets the old run aside"

    def __init__(self, directory: Place, retention: RetentionConfig, group: Group) -> None:
        self.directory = directory
        self.retention = retention
        self.group = group
        # The score of each checkpoint that `prune` counts, such as ["min validation_loss", 1.2].
        self.scores: dict[Place, list[Any]] = {}
        # Whether `reserve` has made the directory, and has synced its parents.
        self.synced = False
        # Whether a warning has said that permission to remove something is missing.
        self.refused = False

    def publish(self, step: int, write: Write, facts: dict[str, Any]) -> Place:
        """Save one checkpoint in the six steps above, and return its path; collective.

        `write(folder)` writes this rank's files and returns their names. All ranks call `write`
        together, and if it raises on one rank, it must raise on all. `facts` go into the manifest.

        If any rank fails, every rank raises CheckpointError, and rank 0 removes the partial files.
        But a UserError of any rank is raised on every rank unchanged. If a rank's process dies, the
        others fail or hang in the next collective, until torchrun or the watchdog ends them.
        """
        group = self.group
        reserved = ""
        committed = False
        try:
            with group.together():
                if group.is_first:
                    reserved = self.reserve(step)
            reserved = group.broadcast(reserved)

            folder = self.folder_of(reserved)
            names = write(folder)

            with group.together():
                entries = self.make_durable(reserved, names)

            # Only rank 0, which writes the manifest, gathers the entries of all ranks.
            files: dict[str, Any] = {}
            for of_one_rank in group.gather(entries):
                files.update(of_one_rank)
            manifest = {"format_version": FORMAT_VERSION, "step": step, "files": files, **facts}
            with group.together():
                if group.is_first:
                    self.commit(reserved, manifest)
                    committed = True
        except UserError:
            # Another run may have taken over the storage, so remove nothing there.
            raise
        except Exception as error:
            problem = f"checkpoint of step {step} was not saved"
            if committed:
                # Another rank has failed, but the checkpoint is already published: keep it.
                problem = f"checkpoint of step {step} was saved, but then a rank failed"
            elif group.is_first and reserved:
                self.abandon(reserved)
            raise CheckpointError(f"{problem}: {error}") from error
        path = self.directory / step_name(step)
        if group.is_first:
            if "score" in facts:
                # With this entry, `prune` need not read the score from the manifest.
                self.scores[path] = facts["score"]
            self.prune()
        return path

    def newest_good(self, after: int = -1) -> Found | None:
        """Return the newest good checkpoint after step `after`; None if there is none; collective.

        Sets aside the damaged checkpoints that are newer than this one. Raises CheckpointError if
        all are damaged: a person must decide whether to start over. Raises another RankError if a
        checkpoint cannot be read, which does not mean damage: a retry may succeed.
        """
        group = self.group
        paths: list[Place] = []
        with group.together():
            if group.is_first:
                self.remove_leftovers()
                paths = published(self.directory)
        for path in reversed(group.broadcast(paths)):
            if int(path.name.removeprefix("step_")) <= after:
                return None
            manifest, problems = verify(path, group)
            if not problems:
                return path, manifest
            aside = ""
            with group.together():
                if group.is_first:
                    aside = str(self.set_aside(path))
            aside = group.broadcast(aside)
            text = "DAMAGED CHECKPOINT %s: %s. Moved to %s; trying the previous checkpoint."
            log.warning(text, path, "; ".join(problems), aside)

        names: list[str] = []
        with group.together():
            if group.is_first:
                names = damaged(self.directory)
        names = group.broadcast(names)
        if names:
            raise CheckpointError(
                f"no good checkpoint is left in {self.directory} ({', '.join(names)}). "
                f"Look at them, or {self.start_over}."
            )
        return None

    def close(self) -> None:
        """Do nothing, since `publish` leaves nothing to wait for."""

    def prune(self) -> None:
        """Remove checkpoints that retention does not keep, and abandoned reservations.

        A failure only logs a warning, since the new checkpoint is saved.
        """
        try:
            scores: dict[Place, list[Any]] = {}
            for path in published(self.directory):
                # If a manifest is damaged, or cannot be read just now, its checkpoint is neither
                # counted nor removed: a person should look at it.
                with contextlib.suppress(RankError, OSError):
                    if path in self.scores:
                        scores[path] = self.scores[path]
                    else:
                        scores[path] = read_manifest(path)["score"]
            self.scores = scores
            # Oldest first, as `published` lists them.
            good = list(scores)
            newest = good[-self.retention.keep :]
            best = best_by_validation(scores)
            every = self.retention.keep_every
            for path in good:
                step = int(path.name.removeprefix("step_"))
                is_kept_forever = every > 0 and step % every == 0
                if path not in newest and path != best and not is_kept_forever:
                    self.discard(path)
            self.remove_leftovers()
        except (OSError, RankError, UserError) as error:
            self.warn_not_removed(error)

    def warn_not_removed(self, error: Exception) -> None:
        """Warn that old checkpoints were not removed; warn of a missing permission only once."""
        if isinstance(error, PermissionError):
            if self.refused:
                return
            self.refused = True
        log.warning("old checkpoints could not be removed: %s", error)

    def reserve(self, step: int) -> str:
        """Make a reservation, which is a new directory to write into; return its name."""
        if not self.synced:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Sync each parent, since any directory in the path may be new. Either this run has just
            # made it, or another run made it and was killed before it could sync.
            for parent in self.directory.parents:
                # Stop at a parent that this user cannot write to: the user's runs have made neither
                # this parent nor a directory in it. Syncing also needs permission to read.
                if not os.access(parent, os.R_OK | os.W_OK):
                    break
                sync_directory(parent)
            self.synced = True
        name = f"{RESERVED}{step_name(step)}-{uuid.uuid4().hex[:8]}"
        (self.directory / name).mkdir()
        return name

    def folder_of(self, reserved: str) -> Path:
        """Return the folder where this rank writes the files of a reservation."""
        return self.directory / reserved

    def make_durable(self, reserved: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Sync this rank's files to disk and hash them; return their entries in the manifest."""
        folder = self.folder_of(reserved)
        entries: dict[str, dict[str, Any]] = {}
        for name in names:
            with naming(folder / name), open(folder / name, "rb", buffering=0) as written:
                os.fsync(written.fileno())
                sha256 = hashlib.file_digest(written, "sha256").hexdigest()
                # Hashing has read the file to its end, so the position is the size.
                size = written.tell()
                entries[name] = {"size": size, "sha256": sha256}
        return entries

    def commit(self, reserved: str, manifest: dict[str, Any]) -> None:
        """Write the manifest, and rename the reservation: this publishes the checkpoint."""
        reservation = self.directory / reserved
        target = self.directory / step_name(manifest["step"])
        with naming(reservation / MANIFEST), open(reservation / MANIFEST, "wb") as file:
            file.write(sealed(manifest))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(reservation)
        # An earlier save of this step may have failed after its rename, and left this directory.
        if os.path.lexists(target):
            self.set_aside(target)
        os.rename(reservation, target)
        try:
            sync_directory(self.directory)
        except OSError:
            # The rename may not survive a power loss, so this save fails: undo the rename.
            with contextlib.suppress(OSError):
                os.rename(target, reservation)
            raise

    def abandon(self, reserved: str) -> None:
        """Remove the files of a failed save."""
        shutil.rmtree(self.directory / reserved, ignore_errors=True)

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged or replaced checkpoint, so that it is never counted again."""
        number = 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{path.name}.damaged-{number}")
        rename_directory(path, aside)
        sync_directory(self.directory)
        return aside

    def discard(self, path: Path) -> None:
        """Begin to remove a checkpoint; `remove_leftovers` does the rest."""
        # Rename it first: a crash during the removal must not leave a part of the checkpoint under
        # a published name.
        try:
            os.rename(path, self.directory / f"{DISCARDED}{path.name}-{uuid.uuid4().hex[:8]}")
        except OSError as error:
            # An overlay file system cannot rename a folder of a lower layer, so remove the files
            # here. Remove the manifest first: if a crash leaves other files, the checkpoint then
            # counts as damaged.
            if error.errno != errno.EXDEV:
                raise
            (path / MANIFEST).unlink()
            shutil.rmtree(path)

    def remove_leftovers(self) -> None:
        """Remove discarded checkpoints, and the reservations of saves that did not finish."""
        # Only one run writes to this directory, and it does not call this method during a save. So
        # no reservation is in use now.
        names = os.listdir(self.directory) if self.directory.exists() else []
        leftovers = [name for name in names if name.startswith((RESERVED, DISCARDED))]
        if leftovers:
            # First sync the renames by `discard`, including those by a killed process. Otherwise a
            # crash of the machine could undo the rename of a checkpoint that is half removed.
            sync_directory(self.directory)
            for name in leftovers:
                leftover = self.directory / name
                # Remove what can be removed. The next save tries to remove the rest, but does not
                # warn again.
                shutil.rmtree(leftover, ignore_errors=True)
                if leftover.exists() and not self.refused:
                    self.refused = True
                    log.warning("%s cannot be removed: look at its permissions", leftover)


def best_by_validation(scores: Mapping[Place, list[Any]]) -> Place | None:
    """Return the checkpoint with the best score; None if no score counts.

    `scores` has the oldest checkpoint first. A score is a rule and a value, such as
    ["min validation_loss", 1.2]; the value is None if there was no validation. Only scores that
    have the same rule as the newest checkpoint count. Among equal scores the newest is the best.
    """
    best: Place | None = None
    best_value = math.nan
    newest_rule = ""
    # Begin with the newest checkpoint, which sets the rule. Among equal scores, the first stays the
    # best.
    for path, (rule, value) in reversed(list(scores.items())):
        if not newest_rule:
            newest_rule = rule
        if rule != newest_rule or value is None or not math.isfinite(value):
            continue
        if rule.startswith("max "):
            is_better = value > best_value
        else:
            is_better = value < best_value
        if best is None or is_better:
            best = path
            best_value = value
    return best
