"""Write tensors by torch.distributed.checkpoint (DCP), so that no error is lost.

DCP's writing threads lose their errors: their files would be missing from a checkpoint that counts
as saved. And what the system says of a full or failing disk should reach whoever saves.
"""

import contextlib
import io
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed.checkpoint as dcp

from ..distributed import Group, parallel
from ..files import naming
from .paths import Place, retrying
from .reader import reading
from .tensors import Tensors, nest, walk

# DCP says so to every plain process, though no_dist is given.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


def write_tensors(folder: Place, tensors: Tensors, group: Group, threads: int = 1) -> list[str]:
    """Write this rank's tensors (a collective call); the names of its files."""
    writer = PartsWriter(folder, threads)
    with reading(folder, "writing"):
        dcp.save(
            tensors,
            storage_writer=writer,
            process_group=group.process_group,
            no_dist=not group.process_group,
        )
        if writer.lost:
            raise writer.lost[0]
    return writer.names


def share_of(tensors: Tensors, rank: int, size: int) -> Tensors:
    """What this rank has to write: a near-equal part of what it and other ranks hold alike."""
    pairs = list(walk(tensors))
    loads: dict[int, list[int]] = {}
    mine = set()
    for path, tensor in sorted(pairs, key=lambda pair: -pair[1].nbytes):
        copies, place = parallel.copies(tensor, rank, size)
        load = loads.setdefault(copies, [0] * copies)
        lightest = load.index(min(load))
        load[lightest] += tensor.nbytes + 4096  # a small tensor has its cost too
        if lightest == place:
            mine.add(path)
    return nest((path, tensor) for path, tensor in pairs if path in mine)


@retrying
class PartsWriter(dcp.FileSystemWriter):
    """DCP's writer, into a folder of any storage; keeps the errors that its threads would lose."""

    def __init__(self, folder: Place, threads: int) -> None:
        # The publisher syncs the files.
        super().__init__("", thread_count=threads, sync_files=False)
        self.path, self.lost, self.names = folder, [], []
        # The publisher has made the folder, which is fresh; the index gets its final name at once.
        self.fs = types.SimpleNamespace(
            concat_path=lambda path, suffix: path / suffix.removesuffix(".tmp"),
            create_stream=self.create,
            **dict.fromkeys(("mkdir", "exists", "rename"), lambda *paths: None),
        )

    @property
    def checkpoint_id(self) -> str:
        """The folder, as DCP's index has it."""
        return str(self.path)

    @contextlib.contextmanager
    def create(self, path: Place, mode: str) -> Iterator[Any]:
        """Create a file; an error is kept, and DCP goes on."""
        stream = None
        try:
            with naming(path), path.open(mode) as stream:
                yield stream
        except Exception as error:
            self.lost.append(error)
            if stream is None:
                yield io.BytesIO()  # DCP needs a stream to go on
        else:
            self.names.append(path.name)
