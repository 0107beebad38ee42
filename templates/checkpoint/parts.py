"""Write tensors by torch.distributed.checkpoint (DCP), so that no error is lost.

DCP's writing threads lose their errors: their files would be missing from a checkpoint that counts
as saved. And what the system says of a full or failing disk should reach whoever saves.
"""

import contextlib
import io
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from ..distributed import Group
from ..files import naming
from .paths import Place, create, persistently
from .reader import DCP_INDEX, reading
from .tensors import Tensors

# DCP says so to every plain process, though no_dist is given.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


def write_tensors(folder: Place, part: Tensors, group: Group, threads: int = 1) -> list[str]:
    """Write this rank's part (a collective call); the names of its files."""
    # The files are synced once, together with their directory, by the publisher.
    writer = PartsWriter(folder, threads)
    with reading(folder, "writing"):
        dcp.save(
            part,
            storage_writer=writer,
            process_group=group.process_group,
            no_dist=not group.process_group,
        )
    return [*writer.fs.names, DCP_INDEX] if group.rank == 0 else writer.fs.names


class Files(FileSystem):
    """Creates files for DCP, and keeps the errors of its threads."""

    def __init__(self) -> None:
        self.caller = threading.current_thread()
        self.lost: list[Exception] = []
        self.names: list[str] = []

    def concat_path(self, path: Place, suffix: str) -> Place:
        """A file in a folder."""
        return path / suffix

    def mkdir(self, path: Place) -> None:
        """Nothing to do: the publisher has made the folder."""

    def exists(self, path: Place) -> bool:
        """The folder is fresh."""
        return False

    def rename(self, path: Place, new_path: Place) -> None:
        """Give a file its name."""
        path.rename(new_path)

    @contextlib.contextmanager
    def create_stream(self, path: Place, mode: str) -> Iterator[Any]:
        """Create a file; an error in one of DCP's threads, where it would be lost, is kept."""
        stream = None
        try:
            with naming(path), create(path) as stream:
                yield stream
        except Exception as error:
            if threading.current_thread() is self.caller:
                raise
            self.lost.append(error)
            if stream is None:
                yield io.BytesIO()  # DCP's thread goes on, and needs a stream
        else:
            if not path.name.startswith(DCP_INDEX):
                self.names.append(path.name)


class PartsWriter(dcp.FileSystemWriter):
    """DCP's writer, which fails when one of its threads does."""

    def __init__(self, folder: Place, threads: int) -> None:
        super().__init__("", thread_count=threads, sync_files=False)
        self.path, self.fs = folder, Files()

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write the planned parts; raises what a thread raised."""

        def write() -> Any:
            self.fs = Files()
            written = super(PartsWriter, self).write_data(plan, planner)
            if self.fs.lost:
                raise self.fs.lost[0]
            return written

        return persistently(write, self.path)

    def finish(self, metadata: dcp.Metadata, results: Any) -> None:
        """Write the index."""
        persistently(lambda: super(PartsWriter, self).finish(metadata, results), self.path)

    @property
    def checkpoint_id(self) -> str:
        """The folder, as DCP's index has it."""
        return str(self.path)
