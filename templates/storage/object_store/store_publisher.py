"""Checkpoints in an object store: publish, find, set aside and prune them.

A store renames by copying, so what publishes a checkpoint there is its manifest, written last:

    URL/owner.json                        the process that writes here: the one that started last
    URL/step_00000120/manifest.json       published: without it this is no checkpoint
    URL/step_00000120/1f3a9c2e/…          the files of one attempt to save it

Each attempt has a folder of its own, which the manifest names, and no object is written twice. So a
process that was taken for dead and still uploads can harm no checkpoint. Nor can it publish one:
before it writes a manifest, a process reads in `owner.json` that no other has started since.
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
# The object that names the one process which may publish and remove.
OWNER = "owner.json"
# The name of an attempt's folder.
ATTEMPT = re.compile(r"[0-9a-f]{8}")


@contextlib.contextmanager
def explaining(directory: Place) -> Iterator[None]:
    """Turn an OSError of a store into a UserError that says what to look at."""
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
        self.identity = identity
        # What this process writes to owner.json.
        self.token = uuid.uuid4().hex
        # Where this rank writes its files before they are uploaded; there during a save only.
        self.temporary_folder: Path | None = None

    def newest_good(self, after: int = -1) -> Found | None:
        """Take over the store, then find the newest good checkpoint.

        Collective; an error on any rank is raised on all. Another run that is still active there
        stops at its next save. UserError if a rank does not see what rank 0 wrote.
        """
        group = self.group
        with group.together():
            if group.is_first:
                self._take_over()
        token_of_first = group.broadcast(self.token)
        with group.together():
            if self._owner() != token_of_first:
                raise UserError(
                    f"{socket.gethostname()} does not see what rank 0 writes to {self.directory}: "
                    "give all machines the same endpoint and the same rights"
                )
        return super().newest_good(after)

    def reserve(self, step: int) -> str:
        """Return the name of a folder that nobody has written to."""
        return f"{step_name(step)}/{uuid.uuid4().hex[:8]}"

    def publish(self, step: int, write: Write, facts: dict[str, Any]) -> Place:
        """Save one checkpoint; each rank writes its files on its own disk, then uploads them."""
        try:
            with self.group.together():
                self.temporary_folder = paths.make_temporary_folder()
            return super().publish(step, write, facts)
        finally:
            if self.temporary_folder is not None:
                paths.remove_temporary_folder(self.temporary_folder)
            self.temporary_folder = None

    def folder_of(self, reserved: str) -> Path:
        """Return where this rank writes its files: on its own disk."""
        assert self.temporary_folder, "`publish` has made it"
        return self.temporary_folder

    def make_durable(self, reserved: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Hash this rank's files and upload them; return their entries in the manifest."""
        entries = super().make_durable(reserved, names)
        self.upload(self.folder_of(reserved), entries, reserved)
        return entries

    def upload(self, folder: Path, names: Iterable[str], reserved: str) -> None:
        """Upload files of a folder to the reserved one, several at a time."""
        sources = [folder / name for name in names]
        targets = [self.directory / reserved / source.name for source in sources]
        with ThreadPoolExecutor(TRANSFERS) as pool:
            # The list waits for all, and raises the first error.
            list(pool.map(RemotePath.send, targets, sources))

    def commit(self, reserved: str, manifest: dict[str, Any]) -> None:
        """Write the manifest, which publishes the checkpoint; UserError if another run took over.

        CheckpointError if the store does not have the files as they were sent.
        """
        name, attempt = reserved.split("/")
        path = self.directory / name
        sizes = (path / attempt).sizes()
        for file, entry in manifest["files"].items():
            if sizes.get(file) != entry["size"]:
                # A run that has taken over removes unpublished files. That is the error then.
                self.check_owner()
                raise CheckpointError(f"{path / attempt} does not hold what was sent to it")
        content = sealed({**manifest, "folder": attempt})
        try:
            (path / MANIFEST).write_new(content, self.check_owner)
        except FileExistsError:
            self.set_aside(path)
            (path / MANIFEST).write_new(content, self.check_owner)

    def abandon(self, reserved: str) -> None:
        """Remove what a failed save has uploaded; the next start removes what this leaves."""
        name, attempt = reserved.split("/")
        path = self.directory / name
        with contextlib.suppress(OSError, RankError):
            # The manifest may have been written, and the answer to that lost.
            if (path / MANIFEST).exists() and read_manifest(path).get("folder") == attempt:
                (path / MANIFEST).unlink()
            (path / attempt).remove_tree()

    def set_aside(self, path: RemotePath) -> RemotePath:
        """Rename the manifest of a damaged checkpoint, which then counts no more, and keep it."""
        names = path.sizes()
        number = 1
        while f"{MANIFEST}.damaged-{number}" in names:
            number += 1
        manifest = path / MANIFEST
        aside = path / f"{MANIFEST}.damaged-{number}"
        # The store copies it, since a manifest that fails the store's checksum cannot be read.
        manifest.request("cp_file", manifest.path, aside.path)
        manifest.unlink()
        return aside

    def discard(self, path: RemotePath) -> None:
        """Remove the manifest of a checkpoint; `remove_leftovers` removes its files."""
        self.check_owner()
        (path / MANIFEST).unlink()

    def remove_leftovers(self) -> None:
        """Remove the attempts that no manifest names; a failure is a warning.

        A step with a damaged manifest, set aside or not, keeps all its attempts.
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
        if any(DAMAGED.fullmatch(name) for name in names):
            return
        published_attempt = None
        if MANIFEST in names:
            try:
                published_attempt = read_manifest(path).get("folder")
            except RankError:
                # It is damaged, and `newest_good` reports it, or it cannot be read just now.
                return
        for name in names:
            if ATTEMPT.fullmatch(name) and name != published_attempt:
                (path / name).remove_tree()

    def check_owner(self) -> None:
        """UserError when another run has taken over since."""
        if self._owner() != self.token:
            raise UserError(
                f"another run has taken over {self.directory} ({OWNER} there names it): this one "
                "stops, and has not touched its checkpoints"
            )

    def _take_over(self) -> None:
        """Become the owner; UserError if the newest readable checkpoint is of another run."""
        with explaining(self.directory):
            if self.identity:
                self._refuse_another_run()
            process = f"{os.getpid()} on {socket.gethostname()}"
            note = {"token": self.token, "process": process}
            (self.directory / OWNER).write(json.dumps(note, indent=1).encode())
            self.directory.abort_multipart_uploads()

    def _refuse_another_run(self) -> None:
        """UserError if the newest readable checkpoint is of another run."""
        for path in reversed(published(self.directory)):
            try:
                identity = read_manifest(path).get("identity")
            except CheckpointError:
                # It is damaged: the one before it decides.
                continue
            problems = identity_differences(identity, self.identity)
            if problems:
                lines = "\n  ".join([f"{path} is of another run:", *problems])
                way = "Another run needs another --checkpoint.url and --name (or --run-dir)"
                raise UserError(f"{lines}\n{way}{offer_weights(path, problems)}")
            return

    def _owner(self) -> str | None:
        """Return the token in owner.json, None if there is none."""
        # A store, or a proxy before it, may once deny that the object exists, or cut it short.
        for delay in (0.0, *object_store.RETRY_DELAYS):
            time.sleep(delay)
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                return json.loads((self.directory / OWNER).read())["token"]
        return None
