"""Checkpoints published on disk first, then uploaded to an object store in the background.

Training waits for the disk alone. Rank 0 uploads, one checkpoint at a time: what is published while
an upload is under way is left out, unless it is the newest when the run ends.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import RankError, UserError
from . import CheckpointError
from .manifest import check_file, read_manifest
from .paths import published
from .publish import Found, Publisher, Write

log = logging.getLogger(__name__)


class UploadingPublisher(Publisher):
    """The checkpoints of a run on disk, uploaded to a store."""

    def __init__(self, directory: Path, store: Any) -> None:
        """`store`: a StorePublisher (storage.py)."""
        super().__init__(directory, store.retention, store.group)
        self.store = store
        self.sender = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self.path: Path | None = None  # what was sent last
        self.left_out: Path | None = None  # what is newer, and was not
        self.sending: Future[None] | None = None

    def publish(self, step: int, write: Write, facts: dict[str, Any]) -> Path:
        """Save one checkpoint on disk, and begin to upload it."""
        path = super().publish(step, write, facts)
        self.group.from_first(lambda: self.submit(path))
        return path

    def newest_good(self, after: int = -1) -> Found | None:
        """The newest good checkpoint, on disk or in the store."""
        here, problem = None, None
        try:
            here = super().newest_good(after)
        except CheckpointError as error:
            log.warning("%s", problem := error)
        there, step = None, here[1]["step"] if here else after
        try:
            there = self.store.newest_good(step)
        except CheckpointError as error:
            log.warning("%s", problem := error)
        if problem and not (here or there):
            raise problem
        if here and not there:  # the store may have an older one
            self.left_out = here[0]
        return there or here

    def close(self) -> None:
        """Wait until the newest has arrived; RankError, on every rank, if it has not."""
        try:
            self.group.from_first(self._arrive)
        except RankError as error:
            where = f"the newest checkpoint is good, but {self.store.directory} does not have it"
            raise CheckpointError(f"{where}: {error}. The same command tries again") from error
        finally:
            self.sender.shutdown()

    def discard(self, path: Path) -> None:
        """Begin to remove a checkpoint, unless it is being uploaded."""
        if path != self.path:
            super().discard(path)

    def submit(self, path: Path) -> None:
        """Upload a published checkpoint, or leave it out while another one is uploaded."""
        if self.sending and self.sending.done():
            if isinstance(self.sending.exception(), UserError):
                self.sending.result()  # the store is another run's by now
            self.sending = None
        if not self.sending:
            self._send(path)
            return
        if not self.left_out:
            text = "%s is still being uploaded: %s is left out, unless it stays the newest"
            log.warning(text, self.path, path.name)
        self.left_out = path

    def _arrive(self) -> None:
        if self.left_out:
            self._send(self.left_out)  # after the one before, whose error was logged
        if self.sending:
            self.sending.result()

    def _send(self, path: Path) -> None:
        self.path, self.left_out = path, None
        self.sending = self.sender.submit(self._upload, path)

    def _upload(self, path: Path) -> None:
        """Send all files of a checkpoint, as they were saved, and publish it in the store."""
        store, manifest = self.store, read_manifest(path)
        if manifest["step"] in (int(there.name[5:]) for there in published(store.directory)):
            return
        reserved, folder = store.reserve(manifest["step"]), path / manifest.get("folder", "")
        try:
            for name, entry in manifest["files"].items():
                if problem := check_file(folder / name, entry):
                    raise CheckpointError(problem)
            store.send(folder, manifest["files"], reserved)
            facts = {k: value for k, value in manifest.items() if k not in ("digest", "folder")}
            store.commit(reserved, facts)
        except Exception as error:
            log.warning("%s was not uploaded: %s", path.name, error)
            store.abandon(reserved)
            raise
        log.info("uploaded: %s", store.directory / path.name)
        store.prune()
