"""Checkpoints published on disk first, then uploaded to an object store in the background.

Training waits for the disk alone. Each rank uploads a near-equal part of the files, which it finds
in the run directory that all share; rank 0 writes the manifest once the store lists every file. The
upload takes no collective. At each save the ranks agree whether all have uploaded their parts of
the one before. If not, the new checkpoint is not uploaded, unless it is the last one.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import RankError, UserError
from . import CheckpointError
from .manifest import check_file, read_manifest, shared_out
from .paths import published
from .publish import Found, Publisher, Write
from .tensors import identity_differences

log = logging.getLogger(__name__)
POLL = 1.0  # seconds


class UploadingPublisher(Publisher):
    """The checkpoints of a run on disk, uploaded to a store."""

    def __init__(self, directory: Path, store: Any) -> None:
        """`store`: a StorePublisher (storage.py)."""
        super().__init__(directory, store.retention, store.group)
        self.store = store
        self.sender = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self.path: Path | None = None  # what was sent last
        self.left_out: Path | None = None  # what is newer, and was not
        self.copied: Future[None] | None = None  # this rank's part of it
        self.published: Future[None] | None = None  # on rank 0
        self.given_up = threading.Event()

    def publish(self, step: int, write: Write, facts: dict[str, Any]) -> Path:
        """Save one checkpoint on disk, and begin to upload it."""
        path = super().publish(step, write, facts)
        self.submit(path)
        return path

    def newest_good(self) -> Found | None:
        """The newest good checkpoint, on disk or in the store; None when there is none."""
        try:
            here = super().newest_good()
        except CheckpointError as error:
            if (found := self.newer(None)) is None:
                raise
            log.warning("%s", error)
            return found
        return self.newer(here)

    def close(self) -> None:
        """Wait until the newest has arrived; RankError, on every rank, if it has not."""
        try:
            with contextlib.suppress(*[RankError] * bool(self.left_out)):  # for a newer one
                self._arrive()
            if self.left_out:
                self._send(self.left_out)
                self._arrive()
        except RankError as error:
            problem = f"{self.path} is good, but it was not uploaded to {self.store.directory}"
            raise CheckpointError(f"{problem}: {error}. The same command tries again") from error
        finally:
            self.given_up.set()
            self.left_out = None
            self.sender.shutdown()

    def discard(self, path: Path) -> None:
        """Begin to remove a checkpoint, unless it is being uploaded."""
        if path != self.path:
            super().discard(path)

    def newer(self, here: Found | None) -> Found | None:
        """The newer of a checkpoint on disk and the store's; one that only the disk has is sent.

        UserError when the store has another run's.
        """
        group, store, step = self.group, self.store, here[1]["step"] if here else -1
        store.spared = attempt_of(*here) if here else None
        group.from_first(store.refuse_others)
        store.own()
        newest = group.from_first(
            lambda: max((int(path.name[5:]) for path in published(store.directory)), default=-1)
        )
        if newest > step:
            try:
                there = store.newest_good()
            except CheckpointError as error:
                if not here:
                    raise
                log.warning("%s", error)
                there = None
            if there and there[1]["step"] > step:
                return there
        ours = here and not identity_differences(here[1].get("identity"), store.identity or {})
        if here and newest != step and (ours or not store.identity):  # else it will be refused
            self._send(here[0])
        return here

    def submit(self, path: Path) -> None:
        """Upload a published checkpoint, or leave it out if the one before is not yet uploaded."""
        statuses = self.group.agree(lambda: not self.copied or self.copied.done())

        def is_free() -> bool:
            last = self.published
            if last and last.done() and isinstance(last.exception(), UserError):
                last.result()  # the store is another run's by now
            return all(statuses)

        if self.group.from_first(is_free):
            self._send(path)
            return
        if self.group.rank == 0 and self.path and not self.left_out:
            log.warning(
                "%s is still being uploaded to %s: %s is left out, unless it stays the newest",
                *(self.path.name, self.store.directory, path.name),
            )
        self.left_out = path

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
            arguments = path, self.copied, self.given_up
            self.published = self.sender.submit(self._publish, *arguments)

    def _copy(self, path: Path) -> None:
        """Send this rank's part, without files that an earlier process has sent."""
        with warning(path):
            manifest, directory = read_manifest(path), self.store.directory
            source = path / manifest.get("folder", "")
            target = directory / attempt_of(path, manifest)
            there = target.sizes()
            for name, entry in shared_out(manifest, self.group.rank, self.group.size):
                if there.get(name) != entry["size"]:
                    if problem := check_file(source / name, entry):
                        raise CheckpointError(problem)
                    (target / name).send(source / name)

    def _publish(self, path: Path, copied: Future[None], given_up: threading.Event) -> None:
        """Write the manifest once all files are there."""
        copied.result()
        with warning(path):
            manifest = read_manifest(path)
            attempt = attempt_of(path, manifest)
            folder, is_last = self.store.directory / attempt, False
            while not folder.holds(manifest["files"]):
                if is_last:
                    self.store.check_owner()
                    raise CheckpointError("not all of it has arrived")
                is_last = given_up.wait(POLL)
            facts = {k: value for k, value in manifest.items() if k not in ("digest", "folder")}
            self.store.commit(attempt, facts)
        log.info("uploaded: %s", self.store.directory / path.name)
        self.store.prune()


@contextlib.contextmanager
def warning(path: Path) -> Iterator[None]:
    """Log an error at once; it is raised again at the end of the run."""
    try:
        yield
    except Exception as error:
        log.warning("%s was not uploaded: %s", path.name, error)
        raise


def attempt_of(path: Path, manifest: dict[str, Any]) -> str:
    """Where the files of a checkpoint go, the same on every rank."""
    return f"{path.name}/{manifest['digest'][:8]}"
