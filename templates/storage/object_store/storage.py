"""Store checkpoints on disk, in an object store, or on disk with uploads in the background."""

import dataclasses
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..errors import RankError, UserError
from ..files import flatten
from . import CheckpointError
from .manifest import check_file, read_manifest
from .object_store import address_of, check_address, remote
from .object_store import end_in_time as end_in_time
from .paths import Place, published, settings_of_storage, step_folders, storage_path
from .publish import Found, Publisher, RetentionConfig, Write
from .store_publisher import StorePublisher, explaining

log = logging.getLogger(__name__)
# Prefixes of the names of settings that a run does not take from a store. Anyone who can write to
# the store could make these settings point to other files or servers.
NOT_TAKEN = ("data.path", "tracker.")


@dataclass(frozen=True)
class StorageConfig(RetentionConfig):
    """Settings of checkpoints on disk or in an object store."""

    url: str | None = None
    """Address of this run's checkpoints in an object store, such as s3://bucket/run; if not given,
    they are in the run directory, which all machines must then share."""
    local_first: bool = False
    """With --checkpoint.url: save to disk first, then upload in the background."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        super().__post_init__()
        if self.url is not None:
            check_address(self.url)
        if self.local_first and not self.url:
            raise UserError(
                "--checkpoint.local-first needs --checkpoint.url, to upload to: give it"
            )

    @property
    def in_store(self) -> bool:
        """Whether checkpoints are in an object store, which --fresh does not clear."""
        return self.url is not None

    @property
    def far(self) -> bool:
        """Whether checkpoints are only in the object store, not in the run directory."""
        return self.url is not None and not self.local_first

    def saved_settings(self, name: str) -> dict[str, Any]:
        """Return the settings in the newest readable manifest of the store, by dotted names.

        Returns {} if there is none, or if it belongs to a run of another name.
        """
        directory = storage_path(str(self.url))
        with explaining(directory):
            for path in reversed(step_folders(directory)):
                try:
                    saved = dict(flatten(read_manifest(path)["config"]))
                except (CheckpointError, RecursionError):
                    # The manifest is missing or damaged, so read the one before.
                    continue
                if saved.get("name") != name:
                    return {}
                taken: dict[str, Any] = {}
                for setting, value in saved.items():
                    if not setting.startswith(NOT_TAKEN):
                        taken[setting] = value
                return taken
        return {}


class UploadingPublisher(Publisher):
    """Publishes checkpoints on disk, and uploads them to a store in the background.

    Training waits only for the disk. Rank 0 uploads one checkpoint at a time. A checkpoint that is
    saved during an upload is skipped, unless it is still the newest when the run ends.
    """

    start_over = "start over with another --name and --checkpoint.url"

    def __init__(self, directory: Path, store: StorePublisher) -> None:
        super().__init__(directory, store.retention, store.group)
        self.store = store
        self.uploader = ThreadPoolExecutor(1, thread_name_prefix="upload")
        # The last upload, which may still be running, and the checkpoint that it uploads.
        self.last_upload: Future[None] | None = None
        self.uploading: Path | None = None
        # The newest skipped checkpoint, which `close` uploads; None once a newer upload has begun.
        self.skipped: Path | None = None

    def publish(self, step: int, write: Write, facts: dict[str, Any]) -> Path:
        """Save one checkpoint on disk, and start to upload it; collective.

        A failed upload only logs a warning. But if the run's last upload fails, `close` raises its
        error. Raises UserError, on every rank, if another run has taken over the store.
        """
        path = super().publish(step, write, facts)
        with self.group.together():
            if self.group.is_first:
                self.submit(path)
        return path

    def newest_good(self, after: int = -1) -> Found | None:
        """Return the newest good checkpoint, on disk or in the store; collective.

        If all checkpoints in one of the two places are damaged, logs a warning and returns one from
        the other place. Raises CheckpointError if that place has no good checkpoint either.
        """
        on_disk: Found | None = None
        in_store: Found | None = None
        problem: CheckpointError | None = None
        try:
            on_disk = super().newest_good(after)
        except CheckpointError as error:
            problem = error
            log.warning("%s", error)
        if on_disk is not None:
            # In the store, look only for checkpoints that are newer than this one.
            _, manifest = on_disk
            after = manifest["step"]
        try:
            in_store = self.store.newest_good(after)
        except CheckpointError as error:
            problem = error
            log.warning("%s", error)
        if in_store is not None:
            return in_store
        if on_disk is not None:
            # The store has no newer checkpoint, and may even lack the one on disk. If the run does
            # not save a newer one, `close` then uploads it.
            self.skipped, _ = on_disk
            return on_disk
        if problem is not None:
            raise problem
        return None

    def close(self) -> None:
        """Wait until the store has the newest checkpoint; collective.

        Raises CheckpointError, on every rank, if the upload failed: the checkpoint is only on disk.
        Raises UserError if another run has taken over the store.
        """
        try:
            with self.group.together():
                if self.group.is_first:
                    self._finish_uploads()
        except RankError as error:
            problem = f"the newest checkpoint is on disk, but not in {self.store.directory}"
            raise CheckpointError(
                f"{problem}: {error}. Run the same command again to upload it"
            ) from error
        finally:
            self.uploader.shutdown()

    def discard(self, path: Path) -> None:
        """Begin to remove a checkpoint, unless the last upload may still be reading it.

        In that case a later `prune` removes it.
        """
        if path != self.uploading:
            super().discard(path)

    def submit(self, path: Path) -> None:
        """Start to upload a published checkpoint; skip it during another upload.

        Raises UserError if the last upload found that another run has taken over the store.
        """
        if self.last_upload is None:
            self._begin_upload(path)
        elif self.last_upload.done():
            error = self.last_upload.exception()
            if isinstance(error, UserError):
                raise error
            self._begin_upload(path)
        else:
            # Warn only once during an upload.
            if self.skipped is None:
                text = "%s is still being uploaded: %s is skipped, unless it stays the newest"
                log.warning(text, self.uploading, path.name)
            self.skipped = path

    def _finish_uploads(self) -> None:
        """Upload the newest checkpoint if it was skipped; raise the error of the last upload."""
        if self.skipped is not None:
            # The uploader's only thread first finishes the previous upload. An error of that upload
            # is only logged.
            self._begin_upload(self.skipped)
        if self.last_upload is not None:
            self.last_upload.result()

    def _begin_upload(self, path: Path) -> None:
        self.uploading = path
        self.skipped = None
        self.last_upload = self.uploader.submit(self._upload, path)

    def _upload(self, path: Path) -> None:
        """Upload a checkpoint and publish it in the store; runs in the uploader's thread."""
        store = self.store
        reserved = ""
        try:
            manifest = read_manifest(path)
            in_store = [remote_path.name for remote_path in published(store.directory)]
            if path.name in in_store:
                return
            folder = path / manifest.get("folder", "")
            reserved = store.reserve(manifest["step"])
            # A file on disk may have been damaged since the save. Do not publish it as good.
            for name, entry in manifest["files"].items():
                problem = check_file(folder / name, entry)
                if problem is not None:
                    raise CheckpointError(problem)
            store.upload(folder, manifest["files"], reserved)
            facts = dict(manifest)
            # In the store, the manifest has another digest, and the folder of this upload. `commit`
            # adds both.
            del facts["digest"]
            facts.pop("folder", None)
            store.commit(reserved, facts)
        except Exception as error:
            log.warning("%s was not uploaded: %s", path.name, error)
            if reserved:
                store.abandon(reserved)
            raise
        log.info("uploaded: %s", store.directory / path.name)
        store.prune()


def open_storage(run_dir: Path, config: StorageConfig, group: Group, identity: Any) -> Publisher:
    """Return the publisher of a run's checkpoints; collective.

    Raises UserError, on every rank, if the run has checkpoints elsewhere, but none where these
    settings look for them.
    """
    on_this_disk = run_dir / "checkpoints"
    target: Place = on_this_disk
    if config.url:
        target = storage_path(config.url)
    with group.together():
        if group.is_first:
            refuse_to_forget(run_dir, config, target)
    if not config.url:
        return Publisher(on_this_disk, config, group)
    store = StorePublisher(target, config, group, identity)
    if config.local_first:
        return UploadingPublisher(on_this_disk, store)
    return store


def refuse_to_forget(run_dir: Path, config: StorageConfig, target: Place) -> None:
    """Raise UserError if the run has checkpoints, but not where it would look for them.

    `target` is the folder in the store or, if `config` has no URL, on disk. Also logs a warning if
    the run was uploaded before, but `config` has no URL.
    """
    on_this_disk = run_dir / "checkpoints"
    saved_url = settings_of_storage(run_dir).get("url")
    if saved_url:
        saved_url = address_of(run_dir, saved_url)
    if saved_url and not config.url:
        text = "this run is no longer uploaded to %s: give --checkpoint.url to continue uploading"
        log.warning(text, saved_url)
    if published(target):
        return
    # The folder to which the previous start saved.
    previous = on_this_disk
    if saved_url:
        previous = remote(saved_url)
    looks_in = {target}
    if config.local_first:
        looks_in.add(on_this_disk)
    for elsewhere in {previous, on_this_disk} - looks_in:
        if published(elsewhere):
            raise UserError(
                f"this run has its checkpoints in {elsewhere}, not in {target}: keep using the "
                "former (--checkpoint.url), copy them, or give a new --name"
            )


def on_disk(config: Any) -> Any:
    """Return the settings with checkpoints on disk instead of in a store.

    Measurements, and other runs with these settings, must not write to the store.
    """
    checkpoint = dataclasses.replace(config.checkpoint, url=None, local_first=False)
    return dataclasses.replace(config, checkpoint=checkpoint)
