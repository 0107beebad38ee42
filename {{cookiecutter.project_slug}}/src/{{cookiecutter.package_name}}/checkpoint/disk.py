"""What publishing needs of a disk: reserve, sync, rename, set aside, remove (see snapshots.py).

Each step leaves nothing behind that could be mistaken for a checkpoint, wherever a crash comes.
"""

import contextlib
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..files import naming, sync_directory, sync_file
from .manifest import MANIFEST, CheckpointError, read_manifest, sealed, sha256_of, step_name

DAMAGED = re.compile(r"step_\d{8,}\.damaged-\d+")
RESERVED = ".saving-"
DISCARDED = ".discarded-"


class DiskStorage:
    """Checkpoints in a directory; but for `claim` and `finish`, called by rank 0 only."""

    start_over = "start over with --fresh, which sets the old run aside"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.placed = False  # whether the names that lead to the directory are safe

    def refuse_others(self) -> None:
        """Nothing to do: whoever reads a checkpoint sees whose it is."""

    def claim(self, group: Group) -> None:
        """Nothing to do: the run directory, which it is in, has one writer."""

    def reserve(self, step: int) -> str:
        """Make a fresh directory to write into; its name."""
        if not self.placed:
            self.directory.mkdir(parents=True, exist_ok=True)
            # This run may have made all of the path, or a process killed before it could sync it.
            for parent in self.directory.parents:
                if not os.access(parent, os.R_OK | os.W_OK):
                    break  # and nobody like us has made a name in it
                sync_directory(parent)
            self.placed = True
        name = f"{RESERVED}{step_name(step)}-{uuid.uuid4().hex[:8]}"
        (self.directory / name).mkdir()
        return name

    def finish(self, path: Path) -> dict[str, Any]:
        """Make a file that was written durable; its entry in the manifest."""
        # Whoever wrote the file may have synced it before its last buffer left (DCP can).
        sync_file(path)
        return {"size": path.stat().st_size, "sha256": sha256_of(path)}

    def abandon(self, reserved: str) -> None:
        """Remove what a save that failed has written."""
        shutil.rmtree(self.directory / reserved, ignore_errors=True)

    def commit(self, reserved: str, manifest: dict[str, Any]) -> None:
        """Write the manifest, and publish what was reserved."""
        reservation = self.directory / reserved
        target = self.directory / step_name(manifest["step"])
        with naming(reservation / MANIFEST):
            (reservation / MANIFEST).write_bytes(sealed(manifest))
        read_manifest(reservation)  # what would be refused later must not be published now
        sync_file(reservation / MANIFEST)
        sync_directory(reservation)
        if os.path.lexists(target):
            self.set_aside(target)
        os.rename(reservation, target)
        try:
            sync_directory(self.directory)
        except OSError:  # it is not certain to be there after a power loss
            with contextlib.suppress(OSError):
                os.rename(target, reservation)
            raise

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged checkpoint, so that it is never counted again."""
        for n in range(1, 1000):
            aside = path.with_name(f"{path.name}.damaged-{n}")
            if not os.path.lexists(aside):
                os.rename(path, aside)
                sync_directory(self.directory)
                return aside
        raise CheckpointError(f"{path} was damaged a thousand times: have the disk looked at")

    def damaged(self) -> list[str]:
        """The names of those set aside."""
        if not self.directory.is_dir():
            return []
        return sorted(name for name in os.listdir(self.directory) if DAMAGED.fullmatch(name))

    def discard(self, path: Path, manifest: dict[str, Any]) -> None:
        """Begin to remove a checkpoint; `remove_leftovers` does the rest."""
        # Renamed first: a crash half way through removing must not leave half a checkpoint.
        discarded = self.directory / f"{DISCARDED}{path.name}-{uuid.uuid4().hex[:8]}"
        os.rename(path, discarded)

    def remove_leftovers(self) -> None:
        """Remove what was discarded, or reserved by a process that is gone."""
        # Nobody else writes here: the run directory has one writer, and it saves one at a time.
        names = os.listdir(self.directory) if self.directory.exists() else []
        if leftovers := [name for name in names if name.startswith((RESERVED, DISCARDED))]:
            # Also of a process killed before it could: else a crash of the machine might bring
            # back the name of a checkpoint that was half removed.
            sync_directory(self.directory)
            for name in leftovers:
                shutil.rmtree(self.directory / name, ignore_errors=True)
