"""Directories of torch.distributed.checkpoint (DCP), read by any number of ranks.

No code from a checkpoint runs: DCP reads tensors by torch.load with `weights_only=True`, and here
an unpickler that knows DCP's own classes only reads the index. Imported when there is such a
directory, since DCP takes a while to import.
"""

import collections
import io
import operator
import pathlib
import pickle
import types
import warnings
from collections.abc import Iterable, Mapping
from typing import IO, Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from ..distributed import Group
from .paths import Place, open_regular
from .reader import DCP_INDEX, Source, printable, reading

SMALL = 1 << 20  # bytes; up to here one read is quicker than the many of torch.load
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
                printable(name): torch.empty(
                    entry.size, dtype=entry.properties.dtype, device="meta"
                )
                for name, entry in self.index.state_dict_metadata.items()
                if isinstance(entry, metadata.TensorStorageMetadata)  # there is nothing else
            }

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, each rank the parts that it holds; a collective call."""
        reader, ranks = PartsReader(self.path, self.index), group.process_group
        with reading(self.path), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # for one process
            dcp.load(dict(targets), storage_reader=reader, process_group=ranks, no_dist=not ranks)


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


class PartsReader(dcp.FileSystemReader):
    """DCP's reader, of a folder in any storage and of an index that was read before."""

    def __init__(self, path: Place, index: metadata.Metadata) -> None:
        super().__init__("")
        self.path, self.index = path, index
        self.fs = types.SimpleNamespace(
            concat_path=operator.truediv, create_stream=lambda path, mode: open_regular(path)
        )

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The index."""
        return self.index

    def _slice_file(self, file: IO[bytes], info: Any) -> IO[bytes]:
        """A stored part: a file of torch.save."""
        if info.length > SMALL:
            return super()._slice_file(file, info)
        file.seek(info.offset)
        return io.BytesIO(file.read(info.length))


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
