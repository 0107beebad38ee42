"""Directories of torch.distributed.checkpoint (DCP), read by any number of ranks.

No code from a checkpoint runs: torch.load gets `weights_only=True`, and the index an unpickler that
knows the names of DCP's own classes only. Imported when there is such a directory, since DCP takes
a while to import.
"""

import collections
import io
import pathlib
import pickle
import types
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem, metadata
from torch.futures import Future

from ..distributed import Group
from .paths import Place, open_regular
from .reader import DCP_INDEX, Form, Source, printable, reading

SMALL = 1 << 20  # bytes; up to here one read is quicker than many small ones
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

    def __init__(self, path: Place, files: Iterable[str]) -> None:
        """`files`: those that the index may refer to."""
        self.path = path
        with reading(path):
            self.index = read_index(path, files)
            self.forms = {
                printable(name): Form(tuple(entry.size), entry.properties.dtype)
                for name, entry in self.index.state_dict_metadata.items()
            }

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, each rank the parts that it holds; a collective call."""
        with reading(self.path):
            dcp.load(
                dict(targets),
                storage_reader=PartsReader(self.path, self.index),
                process_group=group.process_group,
                no_dist=not group.process_group,
            )


class IndexUnpickler(pickle._Unpickler):  # in Python: the one in C has no method for BUILD
    """Reads the index of a DCP checkpoint, which consists of a few harmless classes."""

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
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


class PartsReader(dcp.FileSystemReader):
    """DCP's reader, of an index that was read before; reads each stored part once."""

    def __init__(self, path: Place, index: metadata.Metadata) -> None:
        super().__init__("")
        self.path, self.index = path, index
        self.seen: dict[bytes, torch.Tensor] = {}  # by its pickle, a part that torch.load has read

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The index."""
        return self.index

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Copy the planned parts into live tensors, file by file."""
        files: dict[str, dict[Any, list[Any]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            files.setdefault(info.relative_path, {}).setdefault(item.storage_index, []).append(item)
        for name, parts in files.items():
            with open_regular(self.path / name) as file:
                for index, items in parts.items():
                    stored = self._load(file, self.storage_data[index])
                    for item in items:
                        part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
                        target = planner.resolve_tensor(item).detach()
                        if part.shape != target.shape:  # copying would repeat a smaller one
                            raise pickle.UnpicklingError(f"{index.fqn} is not as {DCP_INDEX} says")
                        target.copy_(part)
                        planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load(self, file: BinaryIO, info: Any) -> torch.Tensor:
        """The tensor in a stored part, which is a file of torch.save."""
        if info.length > SMALL:
            part = self._slice_file(file, info)
            return torch.load(part, map_location="cpu", weights_only=True)
        file.seek(info.offset)
        content = io.BytesIO(file.read(info.length))
        # torch.load takes ten times as long as the rest. Parts of one shape and dtype have the same
        # pickle: it reads the first of them, and the others differ in their bytes alone.
        archive = torch._C.PyTorchFileReader(content)
        pickled = archive.get_record("data.pkl")
        like = self.seen.get(pickled)
        if like is None:
            content.seek(0)
            like = torch.load(content, map_location="cpu", weights_only=True)
            if like.numel() and like.layout is torch.strided and not like.is_conj():
                self.seen[pickled] = like
            return like
        memory = torch.frombuffer(bytearray(archive.get_record("data/0")), dtype=like.dtype)
        return memory.as_strided(like.shape, like.stride(), like.storage_offset())


def read_index(path: Place, files: Iterable[str]) -> metadata.Metadata:
    """The index of a directory of DCP, without objects: DCP would unpickle those.

    UnpicklingError when it refers to anything but `files`, or asks for a class of somebody else's.
    """
    with open_regular(path / DCP_INDEX) as file:
        index = IndexUnpickler(file).load()
    if odd := {info.relative_path for info in index.storage_data.values()} - {*files}:
        raise pickle.UnpicklingError(f"{DCP_INDEX} points to {odd.pop()!a:.200}")
    index.state_dict_metadata = {
        name: entry
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, metadata.TensorStorageMetadata)
    }
    return index
