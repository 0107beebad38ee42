"""Checkpoint storage: on disk, in an object store, or on disk and uploaded in the background.

In an object store a rename is a copy, so the manifest, written last, publishes:

    URL/owner.json                        the process that writes here: the one that started last
    URL/step_00000120/manifest.json       its being there makes it a checkpoint
    URL/step_00000120/1f3a9c2e/…          the files of the attempt that made it

Each attempt has a folder of its own, which the manifest names, and nothing is written twice: what a
process that counts as dead still uploads can harm no checkpoint. Nor can it publish: `owner.json`
ensures that only the process that started last writes a manifest.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..errors import RankError, UserError
from ..files import flatten
from . import MANIFEST, CheckpointError, object_store, paths, step_name
from .manifest import check_file, read_manifest, sealed
from .object_store import RemotePath, check_address
from .paths import DAMAGED, TRANSFERS, Place, checkpoints_of, published, steps, storage_path
from .publish import Found, Publisher, RetentionConfig, Write
from .tensors import identity_differences, offer_weights

log = logging.getLogger(__name__)
OWNER = "owner.json"
# Nobody vouches for the settings in a store: not for what is read, nor for who gets figures.
NOT_TAKEN = ("data.path", "tracker.")
ATTEMPT = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class StorageConfig(RetentionConfig):
    """Checkpoints on disk or in a store."""

    url: str | None = None
    """Keep them in an object store, as in s3://bucket/run, of this run alone (default: on disk,
    in the run directory, which all machines then have to share)."""
    local_first: bool = False
    """With a url: publish on disk, and upload in the background."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        super().__post_init__()
        if self.url is not None:
            check_address(self.url)
        if self.local_first and not self.url:
            raise UserError("--checkpoint.local-first uploads to a --checkpoint.url: give one")

    @property
    def far(self) -> bool:
        """Whether they are in the store only, and the run directory has none."""
        return self.url is not None and not self.local_first

    def saved_settings(self, name: str) -> dict[str, Any]:
        """The settings of a run of that name in the store, by its newest manifest that is good."""
        directory = storage_path(f"{self.url}")
        with explaining(directory):
            for path in reversed(steps(directory)):
                with contextlib.suppress(CheckpointError, RecursionError):
                    saved = dict(flatten(read_manifest(path)["config"]))
                    ours = {n: v for n, v in saved.items() if not n.startswith(NOT_TAKEN)}
                    return ours if saved.get("name") == name else {}
        return {}


@contextlib.contextmanager
def explaining(directory: Place) -> Iterator[None]:
    """Say what to look at when a store cannot be used (UserError)."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{directory} cannot be used: {error}. Is the address right, does the bucket "
            "exist, and does the environment say who you are (as AWS_PROFILE) and where the "
            "store is (AWS_ENDPOINT_URL, if it is not Amazon's)?"
        ) from error


class StorePublisher(Publisher):
    """The checkpoints of one run below a URL."""

    start_over = "start over with another --checkpoint.url"
    directory: RemotePath

    def __init__(
        self, directory: RemotePath, retention: RetentionConfig, group: Group, identity: Any = None
    ) -> None:
        """`identity`: the run's, if a store with another run's is to be refused."""
        super().__init__(directory, retention, group)
        self.identity, self.token = identity, uuid.uuid4().hex
        self.scratch: Path | None = None  # of this rank, during a save

    def newest_good(self, after: int = -1) -> Found | None:
        """The newest good checkpoint, once this process owns the store, which all ranks see.

        A run that is still active somewhere else stops at its next save.
        """
        group = self.group
        with group.together():
            if group.is_first:
                self._take_over()
        token = group.broadcast(self.token)
        with group.together():
            if self._owner() != token:
                raise UserError(
                    f"{socket.gethostname()} does not see what rank 0 writes to {self.directory}: "
                    "give all machines the same endpoint and the same rights"
                )
        return super().newest_good(after)

    def reserve(self, step: int) -> str:
        """The name of a folder that nobody has written to."""
        return f"{step_name(step)}/{uuid.uuid4().hex[:8]}"

    def publish(self, step: int, write: Write, facts: dict[str, Any]) -> Place:
        """Save one checkpoint; each rank writes its files on disk first, and then sends them."""
        try:
            with self.group.together():
                self.scratch = paths.make_scratch()
            return super().publish(step, write, facts)
        finally:
            if self.scratch:
                paths.remove_scratch(self.scratch)
            self.scratch = None

    def folder_of(self, reserved: str) -> Path:
        """Where this rank writes its files: on its own disk."""
        assert self.scratch, "`publish` has made it"
        return self.scratch

    def make_durable(self, reserved: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Hash this rank's files and send them; their entries in the manifest."""
        entries = super().make_durable(reserved, names)
        self.send(self.folder_of(reserved), entries, reserved)
        return entries

    def send(self, folder: Path, names: Iterable[str], reserved: str) -> None:
        """Send files of a folder to what was reserved."""
        target = self.directory / reserved
        with ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(lambda name: (target / name).send(folder / name), names))

    def commit(self, reserved: str, manifest: dict[str, Any]) -> None:
        """Publish what was reserved, by writing the manifest."""
        name, attempt = reserved.split("/")
        content = sealed({**manifest, "folder": attempt})
        path = self.directory / name
        sizes = (path / attempt).sizes()
        if any(sizes.get(file) != entry["size"] for file, entry in manifest["files"].items()):
            self.check_owner()  # who takes over removes what is not published
            raise CheckpointError(f"{path / attempt} does not hold what was sent to it")
        try:
            (path / MANIFEST).write_new(content, self.check_owner)
        except FileExistsError:
            self.set_aside(path)
            (path / MANIFEST).write_new(content, self.check_owner)

    def abandon(self, reserved: str) -> None:
        """Remove what a failed save has written; what is left, the next start removes."""
        name, attempt = reserved.split("/")
        path = self.directory / name
        with contextlib.suppress(OSError, RankError):
            # The answer to writing the manifest may have been lost, and nobody could look.
            if (path / MANIFEST).exists() and read_manifest(path).get("folder") == attempt:
                (path / MANIFEST).unlink()
            (path / attempt).remove_tree()

    def set_aside(self, path: RemotePath) -> RemotePath:
        """Rename a damaged checkpoint's manifest: then it is none, and nothing is lost."""
        inside = path.sizes()
        names = (f"{MANIFEST}.damaged-{n}" for n in itertools.count(1))
        aside, manifest = path / next(n for n in names if n not in inside), path / MANIFEST
        # By the store itself: a manifest that does not match its checksum cannot be read.
        manifest.ask("cp_file", manifest.path, aside.path)
        manifest.unlink()
        return aside

    def discard(self, path: RemotePath) -> None:
        """Begin to remove a checkpoint, by its manifest; `remove_leftovers` does the rest."""
        self.check_owner()
        (path / MANIFEST).unlink()

    def remove_leftovers(self) -> None:
        """Remove attempts that no manifest names; none of a step with damage that was set aside."""
        self.check_owner()
        try:
            for path in steps(self.directory):
                inside, named = path.sizes(), None
                if any(map(DAMAGED.fullmatch, inside)):
                    continue
                if MANIFEST in inside:
                    try:
                        named = read_manifest(path).get("folder")
                    except RankError:
                        continue  # damaged, for `newest_good` to report, or not readable just now
                for name in filter(ATTEMPT.fullmatch, inside):
                    if name != named:
                        (path / name).remove_tree()
        except (OSError, RankError) as error:
            self.warn_not_removed(error)

    def check_owner(self) -> None:
        """UserError when another run has taken over since."""
        if self._owner() != self.token:
            raise UserError(
                f"another run has taken over {self.directory} ({OWNER} there names it): this one "
                "stops, and has not touched its checkpoints"
            )

    def _take_over(self) -> None:
        """Write who the owner is; UserError if the newest checkpoint is of another run."""
        with explaining(self.directory):
            for path in reversed(published(self.directory) if self.identity else ()):
                with contextlib.suppress(CheckpointError):  # damaged: look at the one before it
                    identity = read_manifest(path).get("identity")
                    if problems := identity_differences(identity, self.identity or {}):
                        lines = "\n  ".join([f"{path} is of another run:", *problems])
                        way = "Another run needs another --checkpoint.url and --name (or --run-dir)"
                        raise UserError(f"{lines}\n{way}{offer_weights(path, problems)}")
                    break
            note = {"token": self.token, "process": f"{os.getpid()} on {socket.gethostname()}"}
            (self.directory / OWNER).write(json.dumps(note, indent=1).encode())
            self.directory.abort_uploads()

    def _owner(self) -> str | None:
        for pause in (0.0, *object_store.PAUSES):  # a store, or a proxy before it, may err once
            time.sleep(pause)
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                return json.loads((self.directory / OWNER).read())["token"]
        return None


class UploadingPublisher(Publisher):
    """The checkpoints of a run on disk, uploaded to a store in the background.

    Training waits for the disk alone. Rank 0 uploads, one checkpoint at a time: what is published
    while an upload is under way is left out, unless it is the newest when the run ends.
    """

    def __init__(self, directory: Path, store: StorePublisher) -> None:
        super().__init__(directory, store.retention, store.group)
        self.store = store
        self.sender = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self.path: Path | None = None  # what was sent last
        self.left_out: Path | None = None  # what is newer, and was not
        self.sending: Future[None] | None = None

    def publish(self, step: int, write: Write, facts: dict[str, Any]) -> Path:
        """Save one checkpoint on disk, and begin to upload it."""
        path = super().publish(step, write, facts)
        with self.group.together():
            if self.group.is_first:
                self.submit(path)
        return path

    def newest_good(self, after: int = -1) -> Found | None:
        """The newest good checkpoint, on disk or in the store."""
        newest: Found | None = None
        problem: CheckpointError | None = None
        for publisher in (super(), self.store):
            try:
                newest = publisher.newest_good(newest[1]["step"] if newest else after) or newest
            except CheckpointError as error:
                log.warning("%s", problem := error)
        if problem and not newest:
            raise problem
        if newest and isinstance(newest[0], Path):  # the store may have an older one
            self.left_out = newest[0]
        return newest

    def close(self) -> None:
        """Wait until the newest has arrived; RankError, on every rank, if it has not."""
        try:
            with self.group.together():
                if self.group.is_first:
                    self._arrive()
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
        if not self.sending or self.sending.done():
            if self.sending and isinstance(self.sending.exception(), UserError):
                self.sending.result()  # the store is another run's by now
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
        store, reserved = self.store, ""
        try:
            manifest = read_manifest(path)
            if manifest["step"] in (int(there.name[5:]) for there in published(store.directory)):
                return
            reserved, folder = store.reserve(manifest["step"]), path / manifest.get("folder", "")
            for name, entry in manifest["files"].items():
                if problem := check_file(folder / name, entry):
                    raise CheckpointError(problem)
            store.send(folder, manifest["files"], reserved)
            facts = {k: value for k, value in manifest.items() if k not in ("digest", "folder")}
            store.commit(reserved, facts)
        except Exception as error:
            log.warning("%s was not uploaded: %s", path.name, error)
            if reserved:
                store.abandon(reserved)
            raise
        log.info("uploaded: %s", store.directory / path.name)
        store.prune()


def open_storage(run_dir: Path, config: StorageConfig, group: Group, identity: Any) -> Publisher:
    """What publishes and finds the checkpoints of a run; UserError if it has them elsewhere."""
    here = run_dir / "checkpoints"
    url: Any = storage_path(config.url) if config.url else here

    with group.together():
        if group.is_first:
            refuse_to_forget(run_dir, config, url)
    if not config.url:
        return Publisher(here, config, group)
    store = StorePublisher(url, config, group, identity)
    return UploadingPublisher(here, store) if config.local_first else store


def refuse_to_forget(run_dir: Path, config: StorageConfig, url: Place) -> None:
    """UserError if the run's checkpoints are elsewhere than its settings say now."""
    before, here = checkpoints_of(run_dir), run_dir / "checkpoints"
    now = {url}
    if config.local_first:
        now.add(here)
    for elsewhere in {before, here} - now:
        if published(elsewhere) and not published(url):
            text = f"this run has its checkpoints in {elsewhere}, and none are in {url}: stay"
            raise UserError(f"{text} there (--checkpoint.url), copy them, or type a new --name")
    if isinstance(before, RemotePath) and not config.url:
        text = "this run was uploaded to %s, and is no more: type --checkpoint.url for that"
        log.warning(text, before)


def on_disk(config: Any) -> Any:
    """The settings without a store: for what measures this machine, or is another run."""
    checkpoint = dataclasses.replace(config.checkpoint, url=None, local_first=False)
    return dataclasses.replace(config, checkpoint=checkpoint)
