"""Publish, find, set aside and prune checkpoints in an object store.

A store cannot rename atomically, so a checkpoint is published by its manifest, written last:

    URL/owner.json                        names the process that may publish: the last to start
    URL/step_00000120/manifest.json       publishes the checkpoint
    URL/step_00000120/1f3a9c2e/…          the files of one attempt to save it

Each attempt to save writes to a new folder, which the manifest names, and never replaces a file. So
a process that seems dead, but still uploads, cannot damage a checkpoint. Nor can it publish one:
before a process writes a manifest, it checks owner.json, which names another process if that one
started later.
"""

import contextlib
import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..errors import RankError, UserError
from . import MANIFEST, CheckpointError, object_store, paths, step_name
from .manifest import read_manifest, sealed
from .object_store import RemotePath
from .paths import DAMAGED, TRANSFERS, Place, published, step_folders
from .publish import Found, Publisher, RetentionConfig, Write
from .tensors import identity_differences, offer_weights

log = logging.getLogger(__name__)
# The object that names the only process that may publish and remove checkpoints.
OWNER = "owner.json"
# The pattern of an attempt's folder name.
ATTEMPT = re.compile(r"[0-9a-f]{8}")


@contextlib.contextmanager
def explaining(directory: Place) -> Iterator[None]:
    """Convert an OSError of a store to a UserError that says what to check."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{directory} cannot be used: {error}. Check the URL, that the bucket exists, and "
            "that the environment has your credentials (such as AWS_PROFILE) and the endpoint "
            "(AWS_ENDPOINT_URL, if it is not Amazon's)"
        ) from error


class StorePublisher(Publisher):
    """The checkpoints of one run below a URL."""

    start_over = "start over with another --checkpoint.url"
    directory: RemotePath

    def __init__(
        self, directory: RemotePath, retention: RetentionConfig, group: Group, identity: Any = None
    ) -> None:
        """Use the store at `directory`.

        With an `identity`, `newest_good` raises UserError if the checkpoints are another run's.
        """
        super().__init__(directory, retention, group)
        self.identity = identity
        # Identifies this process in owner.json.
        self.token = uuid.uuid4().hex
        # During a save, the folder where this rank writes its files before they are uploaded.
        self.temporary_folder: Path | None = None

    def newest_good(self, after: int = -1) -> Found | None:
        """Take over the store, then find the newest good checkpoint; collective.

        An error on any rank is raised on all of them. Another run that is still active in the store
        stops at its next save. Raises UserError if a rank does not see rank 0's objects.
        """
        group = self.group
        with group.together():
            if group.is_first:
                self._take_over()
        token_of_first = group.broadcast(self.token)
        with group.together():
            if self._owner() != token_of_first:
                raise UserError(
                    f"{socket.gethostname()} does not see the objects of rank 0 in "
                    f"{self.directory}: give all machines the same endpoint and permissions"
                )
        return super().newest_good(after)

    def reserve(self, step: int) -> str:
        """Return the name of a new attempt's folder, such as step_00000120/1f3a9c2e."""
        return f"{step_name(step)}/{uuid.uuid4().hex[:8]}"

    def publish(self, step: int, write: Write, facts: dict[str, Any]) -> Place:
        """Save one checkpoint; each rank writes its files to its own disk, then uploads them.

        Collective. An error on any rank is raised on all of them.
        """
        try:
            with self.group.together():
                self.temporary_folder = paths.make_temporary_folder()
            return super().publish(step, write, facts)
        finally:
            if self.temporary_folder is not None:
                paths.remove_temporary_folder(self.temporary_folder)
            self.temporary_folder = None

    def folder_of(self, reserved: str) -> Path:
        """Return the folder on this machine's disk where this rank writes its files."""
        assert self.temporary_folder, "`publish` has made it"
        return self.temporary_folder

    def make_durable(self, reserved: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Hash this rank's files and upload them; return their entries in the manifest."""
        entries = super().make_durable(reserved, names)
        self.upload(self.folder_of(reserved), entries, reserved)
        return entries

    def upload(self, folder: Path, names: Iterable[str], reserved: str) -> None:
        """Upload files of a local folder to an attempt's folder, several at a time."""
        sources = [folder / name for name in names]
        targets = [self.directory / reserved / source.name for source in sources]
        with ThreadPoolExecutor(TRANSFERS) as pool:
            # list() waits for all uploads, and raises the first error.
            list(pool.map(RemotePath.send, targets, sources))

    def commit(self, reserved: str, manifest: dict[str, Any]) -> None:
        """Write the manifest, which publishes the checkpoint; UserError if another run took over.

        Raises CheckpointError if a file is missing in the store, or has another size.
        """
        name, attempt = reserved.split("/")
        path = self.directory / name
        sizes = (path / attempt).sizes()
        for file, entry in manifest["files"].items():
            if sizes.get(file) != entry["size"]:
                # Another run may have taken over and removed the unpublished files. Then raise the
                # UserError of `check_owner` instead.
                self.check_owner()
                raise CheckpointError(f"{path / attempt / file} does not have the uploaded size")
        content = sealed({**manifest, "folder": attempt})
        try:
            (path / MANIFEST).write_new(content, self.check_owner)
        except FileExistsError:
            # The step has a manifest of an earlier attempt: set that aside, then write the new one.
            self.set_aside(path)
            (path / MANIFEST).write_new(content, self.check_owner)

    def abandon(self, reserved: str) -> None:
        """Remove the files of a failed save; `remove_leftovers` later removes those that stay."""
        name, attempt = reserved.split("/")
        path = self.directory / name
        with contextlib.suppress(OSError, RankError):
            # The store may have written the manifest, although the save failed because the store's
            # answer was lost.
            if (path / MANIFEST).exists() and read_manifest(path).get("folder") == attempt:
                (path / MANIFEST).unlink()
            (path / attempt).remove_tree()

    def set_aside(self, path: RemotePath) -> RemotePath:
        """Rename the manifest of a damaged or replaced checkpoint, which never counts again."""
        names = path.sizes()
        number = 1
        while f"{MANIFEST}.damaged-{number}" in names:
            number += 1
        manifest = path / MANIFEST
        aside = path / f"{MANIFEST}.damaged-{number}"
        # Let the store copy the manifest. If the manifest does not match the store's checksum, this
        # process cannot read it.
        manifest.request("cp_file", manifest.path, aside.path)
        manifest.unlink()
        return aside

    def discard(self, path: RemotePath) -> None:
        """Remove the manifest of a checkpoint; `remove_leftovers` removes its files."""
        self.check_owner()
        (path / MANIFEST).unlink()

    def remove_leftovers(self) -> None:
        """Remove attempts that no manifest names; a failed request only logs a warning.

        A step with a damaged manifest keeps all its attempts, even if the manifest was set aside.
        Raises UserError if another run has taken over the store.
        """
        self.check_owner()
        try:
            for path in step_folders(self.directory):
                self._remove_attempts(path)
        except (OSError, RankError) as error:
            self.warn_not_removed(error)

    def _remove_attempts(self, path: RemotePath) -> None:
        """Remove the attempts to save one step, except the one that its manifest names."""
        names = path.sizes()
        # A manifest was set aside: keep the files that it names.
        if any(DAMAGED.fullmatch(name) for name in names):
            return
        published_attempt = None
        if MANIFEST in names:
            try:
                published_attempt = read_manifest(path).get("folder")
            except RankError:
                # The manifest cannot be read just now, or is damaged, which `newest_good` reports.
                # Keep all attempts, since one of them may have its files.
                return
        for name in names:
            if ATTEMPT.fullmatch(name) and name != published_attempt:
                (path / name).remove_tree()

    def check_owner(self) -> None:
        """Raise UserError if another run has taken over the store."""
        if self._owner() != self.token:
            raise UserError(
                f"another run has taken over {self.directory}, so this one stops: see {OWNER} "
                "there for its process"
            )

    def _take_over(self) -> None:
        """Write this process into owner.json; UserError if the checkpoints are another run's."""
        with explaining(self.directory):
            if self.identity:
                self._refuse_another_run()
            process = f"{os.getpid()} on {socket.gethostname()}"
            note = {"token": self.token, "process": process}
            (self.directory / OWNER).write(json.dumps(note, indent=1).encode())
            self.directory.abort_multipart_uploads()

    def _refuse_another_run(self) -> None:
        """Raise UserError if the newest readable checkpoint is another run's."""
        for path in reversed(published(self.directory)):
            try:
                identity = read_manifest(path).get("identity")
            except CheckpointError:
                # The manifest is damaged, so check the previous checkpoint.
                continue
            problems = identity_differences(identity, self.identity)
            if problems:
                lines = "\n  ".join([f"{path} belongs to another run:", *problems])
                way = "Give this run another --checkpoint.url and --name (or --run-dir)"
                raise UserError(f"{lines}\n{way}{offer_weights(path, problems)}")
            return

    def _owner(self) -> str | None:
        """Return the token in owner.json; None if there is none."""
        # Now and then a store or a proxy does not find the object, or returns only a part of it. So
        # try again.
        for delay in (0.0, *object_store.RETRY_DELAYS):
            time.sleep(delay)
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                return json.loads((self.directory / OWNER).read())["token"]
        return None
