"""Directories of torch.distributed.checkpoint (DCP), read by any number of ranks.

No code from a checkpoint runs: DCP reads tensors by torch.load with `weights_only=True`, and the
index is read by an unpickler that knows DCP's own classes only. Imported when there is such a
directory, since DCP takes a while to import.
"""

import collections
import contextlib
import io
import pathlib
import pickle
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, filesystem, metadata

from ..distributed import Group
from ..errors import RankError
from . import DCP_INDEX, CheckpointError
from .manifest import reading
from .paths import open_regular
from .tensors import check_shapes, printable

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


class DcpDirectory:
    """Tensors in a directory of DCP, by names as in "model.norm.weight"."""

    def __init__(self, path: Path, files: Iterable[str]) -> None:
        """`files`: those that the index may refer to."""
        self.path = path
        with reading(path):
            self.index = read_index(path, files)
            self.forms = {
                printable(name): torch.empty(each.size, dtype=each.properties.dtype, device="meta")
                for name, each in self.index.state_dict_metadata.items()
                if isinstance(each, metadata.TensorStorageMetadata)  # no object is ever read
            }

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, each rank the parts that it holds; a collective call."""
        group.agree(lambda: check_shapes(self.forms, targets))
        group.agree(lambda: self._read(dict(targets), group))

    def _read(self, targets: dict[str, torch.Tensor], group: Group) -> None:
        with own_failure(f"reading {self.path}", group.rank), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns when there is only one process
            dcp.load(
                targets,
                storage_reader=SafeReader(self.path, self.index),
                planner=TensorPlanner(),
                process_group=group.process_group,
                no_dist=group.process_group is None,
            )


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, with an index that `read_index` has read: its own would unpickle anything."""

    def __init__(self, path: Path, index: metadata.Metadata) -> None:
        super().__init__(path)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The index, as it was read."""
        return self.index


class TensorPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner, for tensors only."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Refuse: the base class unpickles what the bytes hold."""
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor")


@contextlib.contextmanager
def own_failure(doing: str, rank: int) -> Iterator[None]:
    """Of what DCP raises on all ranks, raise what failed on this one, as a RankError.

    DCP's own error is no Exception. For use inside `Group.agree`, by which the other ranks fail.
    """
    try:
        yield
    except CheckpointException as error:
        if failure := error.failures.get(rank):
            known = isinstance(failure[0], OSError | RankError)
            kind = "" if known else f"{type(failure[0]).__name__}: "
            reason = f"{failure[0]}".rpartition("WeightsUnpickler error: ")[2].strip()
            text = f"{doing} failed: {kind}{reason.partition(chr(10))[0]}"
            raise CheckpointError(text) from error


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


def read_index(path: Path, files: Iterable[str]) -> metadata.Metadata:
    """The index of a directory of DCP.

    UnpicklingError when it refers to anything but `files`, or asks for a class of somebody else's.
    """
    with open_regular(path / DCP_INDEX) as file:
        index = IndexUnpickler(file).load()
    if odd := {info.relative_path for info in index.storage_data.values()} - {*files}:
        raise pickle.UnpicklingError(f"{DCP_INDEX} points to {odd.pop()!a:.200}")
    for name in {info.relative_path for info in index.storage_data.values()}:
        open_regular(path / name).close()  # DCP would follow a link
    return index
