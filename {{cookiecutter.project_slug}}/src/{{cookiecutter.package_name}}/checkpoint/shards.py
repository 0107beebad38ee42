"""Checkpoints of torch.distributed.checkpoint (DCP), read without its trust.

DCP would run any code that a crafted `.metadata` asks for, allocate what it promises and open what
it names. Here the index is decoded as data and rebuilt from values that were checked: it may
point only to files that it may read, inside of them, and its parts make up whole tensors. So the
memory that it can ask for is bounded by the files.
"""

import io
import itertools
import math
import mmap
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.futures import Future

from .archives import load_tensor
from .decoding import DTYPES, Decoder, Global, Made
from .manifest import open_plain
from .remote import Place, RemotePath

DCP_INDEX = ".metadata"
KINDS = ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties")
KINDS += ("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")
PATHS = ("pathlib.PosixPath", "pathlib._local.PosixPath")  # Python 3.13 has it elsewhere
OTHERS = ("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict")
INFO = f"{filesystem.__name__}._StorageInfo"
ALLOWED = {*(f"{metadata.__name__}.{kind}" for kind in KINDS), INFO, *PATHS, *OTHERS, *DTYPES}
Region = tuple[tuple[int, ...], tuple[int, ...]]  # of a tensor: offsets, sizes


def read_index(path: Place, sizes: Mapping[str, int | None]) -> metadata.Metadata:
    """The index of a directory of DCP, which may point to the files in `sizes` only.

    Those are in bytes, as a manifest that was verified has them; None: to be looked up.

    Entries that are no tensors are left out: nothing here reads them. UnpicklingError when the
    index is anything else than DCP writes.
    """
    if DCP_INDEX not in sizes:
        raise pickle.UnpicklingError(f"{DCP_INDEX} is not among the files")
    with open_plain(path / DCP_INDEX) as file:
        if isinstance(path, RemotePath):
            content = io.BytesIO(file.read())
        else:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    top = fields(Decoder(content, ALLOWED).load(), "Metadata")
    stored = dict(places(path, dict(sizes), top["storage_data"]))
    tensors, parts = {}, 0
    for name, entry in top["state_dict_metadata"].items():
        if type(entry) is not Made or entry.of != f"{metadata.__name__}.TensorStorageMetadata":
            continue
        facts = fields(entry, "TensorStorageMetadata")
        dtype = dtype_of(entry_of(facts["properties"], "TensorProperties"))
        size, chunks = numbers(facts["size"]), []
        parts += len(is_a(facts["chunks"], list))
        if parts > len(stored):  # also of one list of chunks that is used many times over
            raise pickle.UnpicklingError(f"{DCP_INDEX} has parts that are stored nowhere")
        for chunk in facts["chunks"]:
            region = fields(chunk, "ChunkStorageMetadata")
            chunks.append((numbers(region["offsets"]), numbers(region["sizes"])))
            info = stored[metadata.MetadataIndex(name, chunks[-1][0])]
            if math.prod(chunks[-1][1]) * dtype.itemsize > info.length:
                raise pickle.UnpicklingError(f"{name!a} is larger than what is stored of it")
        if not make_up(size, chunks):
            raise pickle.UnpicklingError(f"the parts of {name!a} do not make up the whole")
        tensors[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=dtype),
            torch.Size(size),
            [metadata.ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in chunks],
        )
    return metadata.Metadata(tensors, storage_data=stored, storage_meta=metadata.StorageMeta())


def places(
    path: Place, sizes: dict[str, int | None], storage: dict[Made, Made]
) -> Iterator[tuple[metadata.MetadataIndex, Any]]:
    """Where each part lies: in one of the files, not beyond its end, and not over each other."""
    used: Counter[str] = Counter()
    for key, value in storage.items():
        part, info = fields(key, "MetadataIndex"), fields(value, INFO)
        name, place = info["relative_path"], (info["offset"], info["length"])
        if type(name) is not str or name not in sizes or info.get("transform_descriptors"):
            raise pickle.UnpicklingError(f"{DCP_INDEX} points to {name!a:.200}")
        if sizes[name] is None:
            with open_plain(path / name) as file:
                sizes[name] = file.seek(0, 2)
        offset, length = numbers(place)
        used[name] += length
        if offset + length > sizes[name] or used[name] > sizes[name]:
            raise pickle.UnpicklingError(f"{DCP_INDEX} points beyond the end of {name!a}")
        offsets, fqn = part.get("offset"), is_a(part["fqn"], str)
        index = metadata.MetadataIndex(fqn, None if offsets is None else numbers(offsets))
        yield index, filesystem._StorageInfo(name, offset, length)


def make_up(size: tuple[int, ...], chunks: list[Region]) -> bool:
    """Whether parts make up a whole, each place once: cuts along each dimension, as sharding makes.

    Then nothing stays unread, and a tensor is not larger than its parts.
    """
    if any(len(size) != len(offsets) or len(size) != len(sizes) for offsets, sizes in chunks):
        return False
    if not math.prod(size):
        return True
    chunks = [chunk for chunk in chunks if math.prod(chunk[1])]
    count = 1
    for dimension, length in enumerate(size):
        cuts = sorted({(offsets[dimension], sizes[dimension]) for offsets, sizes in chunks})
        ends = [0, *(start + extent for start, extent in cuts)]
        if ends[-1] != length or ends[:-1] != [start for start, _ in cuts]:
            return False
        count *= len(cuts)
    return len(chunks) == count == len({offsets for offsets, _ in chunks})


def entry_of(made: Any, kind: str) -> Any:
    """The state of what has to be of a kind."""
    kind = kind if "." in kind else f"{metadata.__name__}.{kind}"
    if type(made) is not Made or made.of != kind:
        raise pickle.UnpicklingError(f"{DCP_INDEX} has something else in place of {kind}")
    return made.state


def fields(made: Any, kind: str) -> dict[str, Any]:
    """The fields of what has to be of a kind."""
    return is_a(entry_of(made, kind), dict)


def is_a(value: Any, kind: type) -> Any:
    """What has to be of a type of Python, before anything is done with it."""
    if type(value) is not kind:
        raise pickle.UnpicklingError(f"{DCP_INDEX} has no {kind.__name__} where one belongs")
    return value


def dtype_of(properties: Any) -> torch.dtype:
    """The dtype, which is the first of a tensor's properties."""
    return DTYPES[is_a(is_a(properties, tuple)[0], Global)]


def numbers(value: Any) -> tuple[int, ...]:
    """Sizes or offsets, as a tensor can have them."""
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in is_a(value, tuple)[:65]):
        raise pickle.UnpicklingError(f"{DCP_INDEX} has a size that is none")
    if len(value) > 64:
        raise pickle.UnpicklingError(f"{DCP_INDEX} has a tensor of {len(value)} dimensions")
    return value


class PlainReader(dcp.FileSystemReader):
    """DCP's reader of an index that was checked; reads tensors and nothing else."""

    def __init__(self, path: Place, index: metadata.Metadata) -> None:
        super().__init__("")
        self.path, self.index = path, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The index, which was read before."""
        return self.index

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Copy the planned parts into their targets, each stored part read once."""

        def place(item: Any) -> tuple[str, int, int]:
            info = self.storage_data[item.storage_index]
            return info.relative_path, info.offset, info.length

        in_order = sorted(plan.items, key=place)
        for name, of_file in itertools.groupby(in_order, lambda item: place(item)[0]):
            with open_plain(self.path / name) as file:
                for (_, offset, length), items in itertools.groupby(of_file, place):
                    stored = load_tensor(file, offset, length)
                    for item in items:
                        put(stored, item, planner, name)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def put(stored: torch.Tensor, item: Any, planner: dcp.LoadPlanner, name: str) -> None:
    """Copy what is wanted of a stored part to where it is wanted."""
    part = stored
    for dimension, (start, extent) in enumerate(
        zip(item.storage_offsets, item.lengths, strict=True)
    ):
        part = part.narrow(dimension, start, extent)
    target = planner.resolve_tensor(item).detach()
    if part.shape != target.shape:
        raise pickle.UnpicklingError(f"a part in {name} is not as {DCP_INDEX} has it")
    target.copy_(part)
    planner.commit_tensor(item, target)
