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
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from .control import HostGroup
from .manifest import naming
from .reading import Tensors, as_snapshot_errors
from .shards import DCP_INDEX

# It says so to every plain process, though no_dist is given.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


def write_whole(path: Path, tensors: Tensors) -> None:
    """Write all into one file of torch.save; OSError with the file's name."""
    with naming(path), open(path, "wb") as file:
        torch.save(tensors, file)


def write_shards(directory: Path, tensors: Tensors, group: HostGroup, threads: int) -> list[str]:
    """Write this rank's part with DCP (a collective call); return the names of its files."""
    # Files are synced once, together with their directory, by whoever publishes them.
    writer = ShardWriter(directory, thread_count=threads, sync_files=False)
    with as_snapshot_errors("writing"):
        dcp.save(tensors, storage_writer=writer, process_group=group.group, no_dist=not group.group)
    names = [path.name for path in directory.glob(f"__{group.rank}_*")]
    return [*names, DCP_INDEX] if group.rank == 0 else names


class Streams(FileSystem):
    """Opens files for DCP and keeps what went wrong with them in its threads."""

    def __init__(self) -> None:
        self.caller = threading.current_thread()
        self.lost: list[Exception] = []

    @contextlib.contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[Any]:
        """Open a file; in a thread of DCP's an error ends there, and is kept."""
        stream = None
        try:
            with naming(path), super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:
            if threading.current_thread() is self.caller:
                raise
            self.lost.append(error)
            if stream is None:  # DCP's thread goes on, and wants one
                with open(os.devnull, "wb") as nowhere:
                    yield nowhere


class ShardWriter(dcp.FileSystemWriter):
    """DCP's writer, which fails when one of its threads does."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write the planned parts; raises what a thread met with."""
        self.fs = Streams()
        written = super().write_data(plan, planner)
        if self.fs.lost:
            raise self.fs.lost[0]
        return written
