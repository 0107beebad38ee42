"""Checkpoints published on disk first, then copied to an object store behind training.

Training waits for the disk alone. Each rank sends a near-equal part of the files, which it sees in
the run directory that all share; rank 0 writes the manifest once the store shows every file. That
takes no collective, but at the end the ranks agree that the last one has arrived. Where the store
is too slow, the newest checkpoint goes next, and those between are left out.
"""

import logging
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import UserError
from .control import HostGroup, RankError
from .manifest import SnapshotError, published, read_manifest, shared_out
from .remote import PART, RemotePath
from .retrying import persistently
from .rundir import checkpoints_of
from .snapshots import RetentionConfig, Snapshots

log = logging.getLogger(__name__)
Found = tuple[Any, dict[str, Any]] | None  # a checkpoint and its manifest
POLL = 1.0  # seconds


class Mirror:
    """Copies a run's checkpoints to a store; all ranks have one. `submit` is for any thread."""

    def __init__(self, directory: RemotePath, retention: RetentionConfig, group: HostGroup) -> None:
        self.directory, self.group = directory, group
        self.snapshots = Snapshots(directory, retention, group)
        self.sender = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self.wanted: Path | None = None
        self.arrived: Path | None = None
        self.sending: Future[None] | None = None
        self.ending = threading.Event()

    def newer(self, here: Found) -> Found:
        """The newer one of what was found on disk and the store's; a collective call.

        What only the disk has is sent.
        """
        self.snapshots.storage.claim(self.group)
        there = self.group.from_first(lambda: [int(p.name[5:]) for p in published(self.directory)])
        step, newest = here[1]["step"] if here else -1, max(there, default=-1)
        if newest > step:
            found = self.snapshots.newest_good()
            return found if found and found[1]["step"] > step else here
        if here and newest < step:
            self.submit(here[0])
        return here

    def submit(self, path: Path) -> None:
        """Send a published checkpoint, once the one on its way has arrived or failed."""
        self.wanted = path
        self.sending = self.sender.submit(self._send, path)

    def finish(self) -> None:
        """Wait until the last checkpoint has arrived; RankError, on every rank, if it has not."""
        self.ending.set()

        def publish() -> None:
            if self.wanted and not self._publish(self.wanted):
                raise SnapshotError("some of its files are not there")

        try:
            self.group.agree(lambda: self.sending and self.sending.result())
            self.group.from_first(publish)
        except RankError as error:
            what = f"{self.wanted} is good, but it was not uploaded to {self.directory}"
            failed = SnapshotError(f"{what}: {error}. The same command tries again")
            failed.agreed = True
            raise failed from error
        finally:
            self.sender.shutdown()

    def _send(self, path: Path) -> None:
        """Send this rank's part; on rank 0 also wait for the others' and publish."""
        if path != self.wanted:
            return  # a newer one is there
        try:
            manifest = read_manifest(path)
            for name, entry in shared_out(manifest, self.group):
                _copy(path / name, self.directory / _attempt(path, manifest) / name, entry)
            while self.group.rank == 0 and path == self.wanted and not self._publish(path):
                if self.ending.wait(POLL):
                    break
        except Exception as error:
            if path == self.wanted:  # else it may have been pruned meanwhile
                log.warning("%s was not uploaded: %s", path.name, error)
                raise

    def _publish(self, path: Path) -> bool:
        """Write the manifest if all files are there; whether they are."""
        if self.arrived != path:
            manifest = read_manifest(path)
            attempt = _attempt(path, manifest)
            sizes = (self.directory / attempt).sizes()
            if any(sizes.get(n) != entry["size"] for n, entry in manifest["files"].items()):
                return False
            facts = {key: value for key, value in manifest.items() if key != "digest"}
            self.snapshots.storage.commit(attempt, facts)
            self.arrived = path
            log.info("uploaded: %s", self.directory / path.name)
            self.snapshots.prune()
        return True


def find_newest(snapshots: Snapshots, mirror: Mirror | None, run_dir: Path) -> Found:
    """The newest good checkpoint, on disk or in the store; None when there is none.

    UserError when the run has some elsewhere: nobody has asked to start it over.
    """
    try:
        found = snapshots.newest_good()
    except SnapshotError as error:
        if not mirror:
            raise
        log.warning("%s", error)
        found = None
    if mirror:
        found = mirror.newer(found)

    def refuse_to_forget() -> None:
        before = checkpoints_of(run_dir)
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
    """Send a file; SnapshotError when it is no longer what was published."""

    def send() -> None:
        with open(source, "rb") as file, target.create() as stream:
            shutil.copyfileobj(file, stream, PART)

    persistently(send, target)
    if target.written.pop(target.path) != entry:
        raise SnapshotError(f"{source} has other content than was saved")
