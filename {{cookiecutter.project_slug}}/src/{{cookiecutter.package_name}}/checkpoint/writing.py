"""Writing tensors, by torch.save or torch.distributed.checkpoint (DCP), so that no error is lost.

What the system says of a full or a failing disk reaches whoever saves. torch.save hides it behind a
message of its own, and of DCP's threads all but the first lose it: their files would be missing
from a checkpoint that was saved.
"""

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from ..distributed import Group
from ..files import naming
from .reader import Tensors, as_snapshot_errors
from .remote import Place, created
from .retrying import persistently
from .shards import DCP_INDEX

# It says so to every plain process, though no_dist is given.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


def write_whole(path: Place, tensors: Tensors) -> None:
    """Write all into one file of torch.save; OSError with the file's name."""

    def write() -> None:
        with naming(path), created(path) as file:
            torch.save(tensors, file)

    persistently(write, path)


def write_shards(folder: Place, tensors: Tensors, group: Group, threads: int) -> list[str]:
    """Write this rank's part with DCP (a collective call); return the names of its files."""
    # Files are synced once, together with their directory, by whoever publishes them.
    writer = ShardWriter(folder, threads)
    with as_snapshot_errors("writing"):
        process_group = group.process_group
        no_dist = not process_group
        dcp.save(tensors, storage_writer=writer, process_group=process_group, no_dist=no_dist)
    return [*writer.names, DCP_INDEX] if group.rank == 0 else writer.names


class Streams(FileSystem):
    """Opens files for DCP, on disk or in a store, and keeps what went wrong in its threads."""

    def __init__(self) -> None:
        self.caller = threading.current_thread()
        self.lost: list[Exception] = []
        self.names: list[str] = []

    def concat_path(self, path: Place, suffix: str) -> Place:
        """A name in a folder."""
        return path / suffix

    def mkdir(self, path: Place) -> None:
        """Nothing to do: whoever publishes has made the folder, and a store has none."""

    def exists(self, path: Place) -> bool:
        """The folder is fresh."""
        return False

    def rename(self, path: Place, new_path: Place) -> None:
        """Give a file its name."""
        path.rename(new_path)

    @contextlib.contextmanager
    def create_stream(self, path: Place, mode: str) -> Iterator[Any]:
        """Open a file; in a thread of DCP's an error ends there, and is kept."""
        stream = None
        self.names.append(path.name)
        try:
            with naming(path), created(path) as stream:
                yield stream
        except Exception as error:
            if threading.current_thread() is self.caller:
                raise
            self.lost.append(error)
            if stream is None:  # DCP's thread goes on, and wants one
                with open(os.devnull, "wb") as nowhere:
                    yield nowhere


class ShardWriter(dcp.FileSystemWriter):
    """DCP's writer, to a disk or a store, which fails when one of its threads does."""

    def __init__(self, folder: Place, threads: int) -> None:
        super().__init__("", thread_count=threads, sync_files=False)
        self.path, self.fs, self.names = folder, Streams(), []

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write the planned parts, and note the names; raises what a thread met with."""

        def write() -> Any:
            self.fs = Streams()
            written = super(ShardWriter, self).write_data(plan, planner)
            if self.fs.lost:
                raise self.fs.lost[0]
            return written

        written = persistently(write, self.path)
        self.names = list(self.fs.names)
        return written

    def finish(self, metadata: dcp.Metadata, results: Any) -> None:
        """Write the index."""
        persistently(lambda: super(ShardWriter, self).finish(metadata, results), self.path)

    @property
    def checkpoint_id(self) -> str:
        """Where it lies, as DCP's index has it."""
        return str(self.path)
