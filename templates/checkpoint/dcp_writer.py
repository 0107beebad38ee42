"""Write tensors into files of torch.distributed.checkpoint (DCP).

`dcp.save` exchanges at each save who writes what, and then what lies where. Here each rank knows
what it has to write (`share_of`). When it has, it says whether that lies where it did at the save
before: one bit. Only if anything has changed on any rank, rank 0 gathers what lies where, makes the
index of it, and keeps that for the next saves.
"""

import contextlib
import io
import itertools
import math
import pickle
import types
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch.distributed.checkpoint as dcp
from torch import Size
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ..distributed import Group, parallel
from ..errors import RankError, UserError
from ..files import naming
from . import DCP_INDEX, CheckpointError
from .manifest import reading
from .paths import Place
from .tensors import Path, Tensors, nest, walk

# A restore reads and hashes several files at once, so a rank that has much to write divides it.
LARGE = 32 << 20  # bytes that are worth a file of their own
FILES = 4  # of a rank
MANY = 1 << 16  # of all ranks: each file is to be created, synced, named and looked up


class Part(NamedTuple):
    """A part of a tensor, and where it lies."""

    path: Path
    properties: metadata.TensorProperties
    size: Sequence[int]
    """Of the whole tensor."""
    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    start: int
    length: int


class PartsSaver:
    """Writes the checkpoints of one run; all ranks call `write` together."""

    def __init__(self, group: Group, threads: int = 1) -> None:
        self.group, self.threads = group, threads
        self.last: list[Part] | None = None
        """What this rank wrote; None if that save failed."""
        self.index = b""
        """On rank 0: what is in DCP's index."""

    def write(self, folder: Place, tensors: Tensors) -> list[str]:
        """Write this rank's tensors; the names of its files."""
        rank, last, self.last = self.group.rank, self.last, None
        parts, writer, failure = None, PartsWriter(folder, self.threads), None

        def write_parts() -> list[Part]:
            planner, writer.lost, writer.names = dcp.DefaultSavePlanner(), [], []
            planner.set_up_planner(tensors, is_coordinator=rank == 0)
            plan, results = planner.create_local_plan(), []
            files = [plan.items] if self.threads > 1 else divided(plan.items, self.group.size)
            for number, items in enumerate(files):
                prefix = filesystem._StoragePrefix(f"__{rank}_{number or ''}")
                one_file = replace(plan, items=items, storage_data=prefix)
                results += writer.write_data(one_file, planner).value()
                if writer.lost:
                    raise writer.lost[0]
            return located(plan, results)

        def write_index() -> None:
            path = folder / DCP_INDEX
            with naming(path), path.open("wb") as file:
                file.write(self.index)

        try:
            with reading(folder, "writing"):
                parts = write_parts()
        except (UserError, RankError) as error:
            failure = error  # raised below: the others wait
        gathered: list[Packed | None] = []
        if self.group.any(parts is None or parts != last):
            gathered = self.group.agree(lambda: None if parts is None else packed(parts))
        if failure:
            raise failure
        if rank == 0:
            packs = [pack for pack in gathered if pack]
            if len(packs) < len(gathered):
                return writer.names  # another rank fails this save
            with reading(folder, "writing"):
                self.index = pickle.dumps(index_of(packs)) if packs else self.index
                write_index()
            writer.names.append(DCP_INDEX)
        self.last = parts
        return writer.names


def divided(items: list[WriteItem], ranks: int) -> list[list[WriteItem]]:
    """What one of so many ranks writes into each of its files: about as many bytes."""

    def size(item: WriteItem) -> int:
        data = item.tensor_data
        assert data, "planned from tensors alone"
        return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize

    count = max(1, min(sum(map(size, items)) // LARGE, FILES, MANY // ranks))
    loads, files = [0] * count, [list[WriteItem]() for _ in range(count)]
    for item in sorted(items, key=size, reverse=True):
        lightest = loads.index(min(loads))
        files[lightest].append(item)
        loads[lightest] += size(item)
    return [file for file in files if file] or [items]


def write_tensors(folder: Place, tensors: Tensors, group: Group) -> list[str]:
    """Write tensors once; the names of this rank's files. All ranks call it together."""
    return PartsSaver(group).write(folder, tensors)


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


def located(plan: SavePlan, results: list[WriteResult]) -> list[Part]:
    """What lies where, by what was planned and what was written."""
    places, parts = {result.index: result.storage_data for result in results}, []
    for item in plan.items:
        data, place = item.tensor_data, places[item.index]
        assert data, "planned from tensors alone"
        box = (tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        path, size = plan.planner_data[item.index.fqn], tuple(data.size)
        found = (place.relative_path, place.offset, place.length)
        parts.append(Part(path, data.properties, size, *box, *found))
    return parts


Packed = tuple[bytes, list[str], bytes]


def packed(parts: list[Part]) -> Packed:
    """Parts as they are sent: what is often the same on all ranks, names of files, and numbers."""
    files = sorted({part.file for part in parts})
    heads = pickle.dumps([(part.path, part.properties, part.size) for part in parts])
    rows = ((*p.offsets, *p.sizes, files.index(p.file), p.start, p.length) for p in parts)
    return heads, files, array("q", itertools.chain.from_iterable(rows)).tobytes()


def index_of(gathered: list[Packed]) -> metadata.Metadata:
    """DCP's index of the parts of all ranks; CheckpointError unless they make up each tensor."""
    entries: dict[str, metadata.TensorStorageMetadata] = {}
    paths, places, known = {}, {}, {}
    for heads, files, numbers in gathered:
        if heads not in known:
            known[heads] = [(".".join(head[0]), *head) for head in pickle.loads(heads)]
        number = iter(memoryview(numbers).cast("q"))
        for name, path, properties, size in known[heads]:
            offsets, sizes = (Size(itertools.islice(number, len(size))) for _ in range(2))
            if (entry := entries.get(name)) is None:
                entry = entries[name] = metadata.TensorStorageMetadata(properties, Size(size), [])
                paths[name] = path
            # The hint spares a reader the search among all parts.
            place = metadata.MetadataIndex(name, offsets, len(entry.chunks))
            file, start, length = itertools.islice(number, 3)
            places[place] = filesystem._StorageInfo(files[file], start, length)
            entry.chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
    for name, entry in entries.items():
        if not make_up(entry.size, entry.chunks):
            raise CheckpointError(f"the parts of {name} that the ranks wrote are not the whole")
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    return metadata.Metadata({**entries}, planner_data=paths, storage_data=places, version=version)


def make_up(size: Size, parts: list[metadata.ChunkStorageMetadata]) -> bool:
    """Whether parts cover a tensor, without an overlap."""
    numbers = itertools.chain.from_iterable((*part.offsets, *part.sizes) for part in parts)
    boxes = np.fromiter(numbers, np.int64).reshape(len(parts), 2, len(size))
    boxes = boxes[boxes[:, 1].all(1)]  # the others are empty
    starts, stops = boxes[:, 0], boxes.sum(1)
    inside = (starts >= 0).all() and (stops <= size).all()
    if not inside or boxes[:, 1].prod(1).sum() != math.prod(size):
        return False
    # As large as the whole. Sorted along the one dimension in which DTensors are cut, each begins
    # where the one before ends; else each pair is looked at.
    cut = np.flatnonzero((boxes[:, 1] != size).any(0))
    if len(cut) == 1:
        order = starts[:, cut[0]].argsort()
        return bool((starts[order[1:], cut[0]] == stops[order[:-1], cut[0]]).all())
    return not any(
        ((start < stops[:i]) & (starts[:i] < stop)).all(1).any()
        for i, (start, stop) in enumerate(zip(starts, stops, strict=True))
    )


class PartsWriter(dcp.FileSystemWriter):
    """DCP's writer, into a folder of any storage; keeps the errors that its threads would lose.

    Their files would be missing from a checkpoint that counts as saved.
    """

    def __init__(self, folder: Place, threads: int) -> None:
        # The publisher syncs the files.
        super().__init__("", thread_count=threads, sync_files=False)
        self.path, self.lost, self.names = folder, [], []
        self.fs = types.SimpleNamespace(
            concat_path=lambda path, name: path / name, create_stream=self.create
        )

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
