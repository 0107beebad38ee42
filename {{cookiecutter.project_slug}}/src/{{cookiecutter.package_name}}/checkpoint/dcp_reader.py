"""Directories of torch.distributed.checkpoint (DCP), read by any number of ranks.

No code from a checkpoint runs: DCP reads tensors by torch.load with `weights_only=True`, and here
an unpickler that knows DCP's own classes only reads the index. Imported when there is such a
directory, since DCP takes a while to import.
"""

import collections
import hashlib
import io
import pathlib
import pickle
import types
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from ..distributed import Group, parallel
from . import CheckpointError
from .manifest import Part, read_once
from .paths import Place, open_regular
from .reader import DCP_INDEX, Source, data_start, memory_for, printable, reading, with_data

SMALL = 1 << 20  # bytes; to copy parts up to here is quicker than to look for their data
CLASSES = (
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties),
    *(metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata),
    *(metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.serialization._get_layout),
    *(torch.Size, collections.OrderedDict, pathlib.PosixPath),
)


def plain(module: str, name: str) -> str:
    """A full name; Python 3.13 has its paths in a module of their own."""
    return f"{module.removesuffix('._local')}.{name}"


ALLOWED = {plain(kind.__module__, kind.__qualname__): kind for kind in CLASSES}
ALLOWED |= {f"torch.{n}": value for n, value in vars(torch).items() if type(value) is torch.dtype}


class Parts(Source):
    """Tensors in a directory of DCP, by names as in "model.norm.weight"."""

    def __init__(self, path: Place, files: Mapping[str, Any], hashing: bool = False) -> None:
        """`files`: those that the index may refer to; if `hashing`, with their manifest entries."""
        self.path, self.entries = path, files if hashing else {}
        self.verified = {DCP_INDEX} if hashing else set()
        with reading(path):
            self.index = read_index(path, files, self.entries.get(DCP_INDEX))
            self.forms = {
                printable(name): torch.empty(each.size, dtype=each.properties.dtype, device="meta")
                for name, each in self.index.state_dict_metadata.items()
                if isinstance(each, metadata.TensorStorageMetadata)  # no object is ever read
            }

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, each rank the parts that it holds; a collective call."""
        planner = dcp.DefaultLoadPlanner()
        wanted: dict[str, Wanted] = {}
        storages = Counter(
            parallel.local_part(target).untyped_storage().data_ptr() for target in targets.values()
        )
        several = {address for address, count in storages.items() if count > 1}

        def plan() -> list[str]:
            """Of which files this rank wants most."""
            with reading(self.path):
                planner.set_up_planner(dict(targets), self.index, is_coordinator=True)
                for item in planner.create_local_plan().items:
                    info = self.index.storage_data[item.storage_index]
                    places = wanted.setdefault(info.relative_path, {})
                    places.setdefault((info.offset, info.length), []).append(item)
            return [
                name
                for name, entry in self.entries.items()
                if sum(length for _, length in wanted.get(name, ())) > entry["size"] / 2
            ]

        def read_file(name: str) -> None:
            parts = parts_of(self.path / name, wanted[name], planner, several)
            read_once(self.path / name, self.entries[name] if name in mine else None, parts)

        def read_files() -> None:
            with reading(self.path), ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(read_file, wanted))

        claims = group.agree(plan)
        owners = group.from_first(lambda: divided(claims, self.entries))
        mine = {name for name, rank in owners.items() if rank == group.rank}
        group.agree(read_files)
        self.verified |= mine


Wanted = dict[tuple[int, int], list[ReadItem]]  # of a file: offset and length of parts, what for


def divided(claims: list[list[str]], entries: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    """The rank that hashes each file: one that wants most of it, and has least to hash so far.

    What no rank wants most of is left out: one rank would have to read what it does not need.
    """
    loads, claimants, owners = [0] * len(claims), {}, {}
    for rank, names in enumerate(claims):
        for name in names:
            claimants.setdefault(name, []).append(rank)
    for name in sorted(claimants, key=lambda name: -entries[name]["size"]):
        owners[name] = min(claimants[name], key=loads.__getitem__)
        loads[owners[name]] += entries[name]["size"]
    return owners


def parts_of(path: Place, wanted: Wanted, planner: LoadPlanner, several: Set[int]) -> list[Part]:
    """What is wanted of a file, and how it gets into the live tensors.

    `several`: addresses of storages that tensors of several names share. Who hashed there what it
    has read might hash what another thread has read there.
    """

    def copy(items: list[ReadItem], saved: torch.Tensor) -> None:
        for item in items:
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            source = saved[tuple(slice(start, start + length) for start, length in ranges)]
            target = planner.resolve_tensor(item)
            if source.shape != target.shape:  # copying would repeat a smaller one
                raise CheckpointError(f"{item.dest_index.fqn} is of another shape than saved")
            target.detach().copy_(source)

    def part_of(file: Any, start: int, length: int, items: list[ReadItem]) -> Part:
        if length <= SMALL or not isinstance(path, Path):
            load = partial(torch.load, map_location="cpu", weights_only=True)
            return Part(start, length, lambda part: copy(items, load(io.BytesIO(part))))
        form, begin = saved_form(FilePart(file, start, length))
        pairs = [(form, planner.resolve_tensor(item)) for item in items]
        tied = any(live.untyped_storage().data_ptr() in several for _, live in pairs)
        memory = None if tied else memory_for(pairs)
        target = memory or (lambda part: copy(items, with_data(form, part)))
        return Part(start + begin, form.untyped_storage().nbytes(), target)

    with open_regular(path) as file:
        return [part_of(file, *place, items) for place, items in wanted.items()]


class IndexUnpickler(pickle._Unpickler):  # in Python: the one in C has no method for BUILD
    """Reads the index of a DCP checkpoint, which consists of a few harmless classes."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name, if DCP writes it; UnpicklingError for any other."""
        if (full := plain(module, name)) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {full!a:.200}")
        return ALLOWED[full]

    def load_build(self) -> None:
        """Set the attributes of an object, but not of a class, which would stay for the process."""
        if isinstance(self.stack[-2], type | types.FunctionType):
            raise pickle.UnpicklingError("it changes a class")
        build: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]
        build(self)

    dispatch[pickle.BUILD[0]] = load_build


class FilePart(io.RawIOBase):
    """A part of a file as a file; DCP's own cannot be sought from its end."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; it."""
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def readinto(self, target: Any) -> int:
        """Read on; the number of bytes."""
        self.file.seek(self.start + self.at)
        count = self.file.readinto(memoryview(target)[: max(0, self.length - self.at)])
        self.at += count
        return count


def saved_form(file: Any) -> tuple[torch.Tensor, int]:
    """The one tensor in a file of torch.save, but none of its bytes; and where these begin."""
    with torch.serialization.skip_data():
        form = torch.load(file, map_location="cpu", weights_only=True)
    return form, data_start(file) if form.numel() else 0


def read_index(
    path: Place, files: Iterable[str], entry: dict[str, Any] | None = None
) -> metadata.Metadata:
    """The index of a directory of DCP.

    UnpicklingError when it refers to anything but `files`, or asks for a class of somebody else's;
    CheckpointError if it is not what its manifest `entry` says.
    """
    with open_regular(path / DCP_INDEX) as file:
        content = file.read()
    if entry and hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise CheckpointError(f"{DCP_INDEX} has other content than was saved (sha256 differs)")
    index = IndexUnpickler(io.BytesIO(content)).load()
    if odd := {info.relative_path for info in index.storage_data.values()} - {*files}:
        raise pickle.UnpicklingError(f"{DCP_INDEX} points to {odd.pop()!a:.200}")
    return index
