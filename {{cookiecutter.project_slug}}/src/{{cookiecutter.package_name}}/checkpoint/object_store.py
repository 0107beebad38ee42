"""What publishing needs of an object store, where a rename is a copy: the manifest goes last.

    URL/owner.json                        who writes here: whoever started last
    URL/step_00000120/manifest.json       its being there makes it a checkpoint
    URL/step_00000120/1f3a9c2e/…          the files of the attempt that made it

Each attempt has a folder of its own, which the manifest names, and nothing is written twice: what a
process that is thought dead still uploads can harm no checkpoint. Nor can it publish: before a
manifest is written, the owner must still be the one that started to save.
"""

import contextlib
import itertools
import json
import logging
import os
import re
import socket
import uuid
from collections.abc import Iterator
from typing import Any

from ..distributed import Group
from ..errors import RankError, UserError
from .manifest import (
    MANIFEST,
    PUBLISHED,
    CheckpointError,
    data_of,
    parse_manifest,
    published,
    read_manifest,
    sealed,
    step_name,
)
from .remote import RemotePath
from .tensors import identity_differences

log = logging.getLogger(__name__)
OWNER = "owner.json"
ATTEMPT = re.compile(r"[0-9a-f]{8}")
ASIDE = re.compile(re.escape(MANIFEST) + r"\.damaged-\d+")


class ObjectStorage:
    """Checkpoints below a URL; but for `claim` and `finish`, called by rank 0 only."""

    start_over = "start over with another --checkpoint.url"

    def __init__(self, directory: RemotePath, identity: dict[str, Any] | None) -> None:
        self.directory, self.identity = directory, identity
        self.token = uuid.uuid4().hex
        self.spared: str | None = None

    def refuse_others(self) -> None:
        """UserError when the newest checkpoint is of another run, whose owner has to stay."""
        with telling_why(self.directory):
            for path in reversed(published(self.directory) if self.identity else ()):
                with contextlib.suppress(CheckpointError):  # it is damaged: the one before it tells
                    self._refuse_other(path, read_manifest(path).get("identity"))
                    return

    def _refuse_other(self, path: RemotePath, identity: Any) -> None:
        if problems := identity_differences(identity, self.identity):
            raise UserError(
                "\n  ".join([f"{path} is of another run:", *problems])
                + "\nGive another --checkpoint.url, or take over the weights alone: --init-from "
                f"{path}"
            )

    def claim(self, group: Group, spared: str | None = None) -> None:
        """Become the owner, and see that all ranks look at the same store (UserError).

        A run that still goes on somewhere else stops at its next save. What attempts have left is
        removed, but that of one which is to be gone on with.
        """
        self.spared = spared or self.spared
        token = group.from_first(self._own)

        def look() -> None:
            if self._owner() != token:
                raise UserError(
                    f"{socket.gethostname()} does not see what rank 0 writes to {self.directory}: "
                    "give all machines the same endpoint and the same rights"
                )

        group.agree(look)

    def reserve(self, step: int) -> str:
        """The name of a folder that nobody has written to."""
        return f"{step_name(step)}/{uuid.uuid4().hex[:8]}"

    def finish(self, path: RemotePath) -> dict[str, Any]:
        """What was sent, as it was counted and hashed on its way: an entry in the manifest."""
        return path.written.pop(path.path)

    def abandon(self, reserved: str) -> None:
        """Remove what a save that failed has written; what is left the next start removes."""
        name, attempt = reserved.split("/")
        path = self.directory / name
        with contextlib.suppress(OSError, RankError):
            # The answer to writing the manifest may have been lost, and nobody could look.
            if (path / MANIFEST).exists() and read_manifest(path).get("folder") == attempt:
                (path / MANIFEST).unlink()
            (path / attempt).remove_tree()

    def commit(self, reserved: str, manifest: dict[str, Any]) -> None:
        """Publish what was reserved, by writing the manifest."""
        name, attempt = reserved.split("/")
        content = sealed({**manifest, "folder": attempt})
        parse_manifest(content, name)  # what would be refused later must not be published now
        path = self.directory / name
        try:
            (path / MANIFEST).write_new(content, self.check_owner)
        except FileExistsError:
            self.set_aside(path)
            (path / MANIFEST).write_new(content, self.check_owner)

    def set_aside(self, path: RemotePath) -> RemotePath:
        """Rename a damaged checkpoint's manifest: so it is one no longer, and nothing is lost."""
        inside = path.sizes()
        aside = next(
            n for i in itertools.count(1) if (n := f"{MANIFEST}.damaged-{i}") not in inside
        )
        (path / MANIFEST).rename(path / aside)
        return path / aside

    def damaged(self) -> list[str]:
        """The names of those set aside."""
        return [f"{p.name}/{n}" for p in self._steps() for n in p.sizes() if ASIDE.fullmatch(n)]

    def discard(self, path: RemotePath, manifest: dict[str, Any]) -> None:
        """Remove a checkpoint, its manifest first: what a crash leaves is a leftover."""
        self.check_owner()
        (path / MANIFEST).unlink()
        data_of(path, manifest).remove_tree()

    def remove_leftovers(self) -> None:
        """Remove attempts that no manifest names, up to the newest checkpoint.

        None of a later step, which other ranks may be sending (mirror.py).
        """
        self.check_owner()
        for newest in published(self.directory)[-1:]:
            steps = self._steps()
            self._clean(steps[: steps.index(newest) + 1])

    def _clean(self, steps: list[RemotePath]) -> None:
        """But nothing of a step of which something was set aside."""
        for path in steps:
            inside = path.sizes()
            leftovers = set(filter(ATTEMPT.fullmatch, inside))
            if MANIFEST in inside:
                try:
                    leftovers.discard(read_manifest(path).get("folder"))
                except RankError:
                    continue  # damaged, which `newest_good` tells, or not to be read just now
            if not any(map(ASIDE.fullmatch, inside)):
                for name in sorted(leftovers):
                    if f"{path.name}/{name}" == self.spared:
                        continue
                    log.info("removing what is left of a save: %s", path / name)
                    (path / name).remove_tree()

    def _steps(self) -> list[RemotePath]:
        names = filter(PUBLISHED.fullmatch, self.directory.sizes())
        return [self.directory / name for name in sorted(names, key=lambda name: int(name[5:]))]

    def _own(self) -> str:
        note = {"token": self.token, "process": f"{os.getpid()} on {socket.gethostname()}"}
        with telling_why(self.directory):
            (self.directory / OWNER).write(json.dumps(note, indent=1).encode())
            self._clean(self._steps())
        if count := self.directory.abort_uploads():
            log.info("dropped %d half uploads that were left in %s", count, self.directory)
        return self.token

    def check_owner(self) -> None:
        """UserError when another run has taken over since."""
        if self._owner() != self.token:
            raise UserError(
                f"another run has taken over {self.directory} ({OWNER} there names it): this one "
                "stops, and has not touched its checkpoints"
            )

    def _owner(self) -> str | None:
        try:
            return json.loads((self.directory / OWNER).read())["token"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None


@contextlib.contextmanager
def telling_why(directory: RemotePath) -> Iterator[None]:
    """UserError, with what may be the reason, for a store that cannot be used from the start."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{directory} cannot be used: {error}. Is the address right, does the bucket exist, "
            "and does the environment say who you are (as AWS_PROFILE) and where the store is "
            "(AWS_ENDPOINT_URL, if it is not Amazon's)?"
        ) from error
