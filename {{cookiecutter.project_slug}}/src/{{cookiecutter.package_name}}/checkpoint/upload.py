"""Checkpoints published on disk first, then copied to an object store behind training.

Training waits for the disk alone. Each rank sends a near-equal part of the files, which it sees in
the run directory that all share; rank 0 writes the manifest once the store shows every file. That
takes no collective. At each save the ranks agree whether all have sent their parts of the one
before. If not, the new one is left out, and sent at the end if it is the last.
"""

import logging
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..errors import RankError, UserError
from .manifest import CheckpointError, data_of, has_sizes, published, read_manifest, shared_out
from .publish import RetentionConfig, Snapshots, checkpoints_of
from .remote import PART, RemotePath
from .retrying import persistently
from .tensors import identity_differences

log = logging.getLogger(__name__)
Found = tuple[Any, dict[str, Any]] | None  # a checkpoint and its manifest
POLL = 1.0  # seconds


class Mirror:
    """Copies a run's checkpoints to a store; every method is called by all ranks together."""

    def __init__(
        self,
        directory: RemotePath,
        retention: RetentionConfig,
        group: Group,
        identity: dict[str, Any] | None,
    ) -> None:
        self.directory, self.group = directory, group
        self.identity = identity
        self.snapshots = Snapshots(directory, retention, group, identity)
        self.sender = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self.path: Path | None = None  # what was sent last
        self.left_out: Path | None = None  # what is newer, and was not
        self.copied: Future[None] | None = None  # this rank's part of it
        self.published: Future[None] | None = None  # on rank 0
        self.given_up = threading.Event()

    def newer(self, here: Found) -> Found:
        """The newer one of what was found on disk and the store's; what only the disk has is sent.

        UserError when the store has those of another run.
        """
        group, step = self.group, here[1]["step"] if here else -1
        spared = _attempt(*here) if here else None
        group.from_first(lambda: self.snapshots.storage.refuse_others())
        self.snapshots.storage.claim(group, spared)
        newest = group.from_first(
            lambda: max((int(p.name[5:]) for p in published(self.directory)), default=-1)
        )
        if newest > step:
            try:
                there = self.snapshots.newest_good()
            except CheckpointError as error:
                if not here:
                    raise
                log.warning("%s", error)
                there = None
            if there and there[1]["step"] > step:
                return there
        ours = here and not identity_differences(here[1].get("identity"), self.identity or {})
        if here and newest != step and (ours or not self.identity):  # else it will be refused
            self._send(here[0])
        return here

    def submit(self, path: Path) -> None:
        """Send a published checkpoint, or leave it out if one is still on its way."""
        statuses = self.group.agree(lambda: not self.copied or self.copied.done())

        def has_all() -> bool:
            published = self.published
            if published and published.done() and isinstance(published.exception(), UserError):
                published.result()  # the store is another run's by now
            return all(statuses)

        if not self.group.from_first(has_all):
            if self.group.rank == 0 and self.path and not self.left_out:
                log.warning(
                    "%s is still on its way to %s: %s is left out, unless it stays the newest",
                    *(self.path.name, self.directory, path.name),
                )
            self.left_out = path
            return
        self._send(path)

    def finish(self) -> None:
        """Wait until the newest has arrived; RankError, on every rank, if it has not."""
        try:
            try:
                self._arrive()
            except RankError:
                if not self.left_out:
                    raise
            if self.left_out:
                self._send(self.left_out)
                self._arrive()
        except RankError as error:
            what = f"{self.path} is good, but it was not uploaded to {self.directory}"
            failed = CheckpointError(f"{what}: {error}. The same command tries again")
            failed.agreed = True
            raise failed from error
        finally:
            self.given_up.set()
            self.left_out = None
            self.sender.shutdown()

    def _arrive(self) -> None:
        self.group.agree(lambda: self.copied and self.copied.result())
        self.given_up.set()  # all parts are there now: it is published by the next look, or never
        self.group.from_first(lambda: self.published and self.published.result())

    def _send(self, path: Path) -> None:
        self.given_up.set()  # one whose part a rank could not send; else it is published by now
        self.given_up = threading.Event()
        self.path, self.left_out = path, None
        self.copied = self.sender.submit(self._copy, path)
        if self.group.rank == 0:
            self.published = self.sender.submit(self._publish, path, self.copied, self.given_up)

    def _copy(self, path: Path) -> None:
        """Send this rank's part, but for what an earlier start has sent."""
        try:
            manifest = read_manifest(path)
            source, target = data_of(path, manifest), self.directory / _attempt(path, manifest)
            there = target.sizes()
            for name, entry in shared_out(manifest, self.group):
                if there.get(name) != entry["size"]:
                    _copy(source / name, target / name, entry)
        except Exception as error:
            log.warning("%s was not uploaded: %s", path.name, error)
            raise

    def _publish(self, path: Path, copied: Future[None], given_up: threading.Event) -> None:
        """Write the manifest once all files are there."""
        copied.result()
        try:
            manifest = read_manifest(path)
            attempt = _attempt(path, manifest)
            folder, is_last = self.directory / attempt, False
            while not has_sizes(folder, manifest):
                if is_last:
                    self.snapshots.storage.check_owner()
                    raise CheckpointError("not all of it has arrived")
                is_last = given_up.wait(POLL)
            facts = {k: value for k, value in manifest.items() if k not in ("digest", "folder")}
            self.snapshots.storage.commit(attempt, facts)
        except Exception as error:
            log.warning("%s was not uploaded: %s", path.name, error)
            raise
        log.info("uploaded: %s", self.directory / path.name)
        self.snapshots.tidy_up()


def find_newest(snapshots: Snapshots, mirror: Mirror | None, run_dir: Path) -> Found:
    """The newest good checkpoint, on disk or in the store; None when there is none.

    UserError when the run has some elsewhere: nobody has asked to start it over.
    """
    try:
        found = snapshots.newest_good()
    except CheckpointError as error:
        found = mirror and mirror.newer(None)
        if not found:
            raise
        log.warning("%s", error)
        return found
    if mirror:
        found = mirror.newer(found)

    def refuse_to_forget() -> None:
        for before in (checkpoints_of(run_dir), run_dir / "checkpoints"):
            if before != snapshots.directory and published(before):
                raise UserError(
                    f"this run has its checkpoints in {before}, and there are none in "
                    f"{snapshots.directory}: go on there (--checkpoint.url), copy them, or start "
                    "another run (--name NAME)"
                )

    if found is None:
        snapshots.group.from_first(refuse_to_forget)
    return found


def _attempt(path: Path, manifest: dict[str, Any]) -> str:
    """Where its files go, which every rank can tell alone."""
    return f"{path.name}/{manifest['digest'][:8]}"


def _copy(source: Path, target: RemotePath, entry: dict[str, Any]) -> None:
    """Send a file; ValueError, and nothing is sent, when it is not what was published."""

    def send() -> None:
        with open(source, "rb") as file, target.create() as stream:
            shutil.copyfileobj(file, stream, PART)
            if stream.entry() != entry:
                raise ValueError(f"{source} has other content than was saved")

    persistently(send, target)
