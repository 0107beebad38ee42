"""Read the tensors of a checkpoint into live ones, by any number of ranks.

No code from a checkpoint runs: torch.load gets `weights_only=True`, as it does from
torch.distributed.checkpoint (DCP), whose index is read by an unpickler that knows DCP's own classes
only. Of a checkpoint only the files that its verified manifest names are opened.
"""

import contextlib
import importlib
import os
import pickle
import types
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from ..distributed import Group
from . import DCP_INDEX, WHOLE_FILE, CheckpointError
from .manifest import reading
from .paths import Place, local_copy, open_regular
from .tensors import OneFile, check_shapes

DCP = "torch.distributed.checkpoint"
DCP_CLASSES = "MetadataIndex Metadata StorageMeta TensorProperties TensorStorageMetadata "
DCP_CLASSES += "BytesStorageMetadata ChunkStorageMetadata _MEM_FORMAT_ENCODING"
# What an index of DCP consists of.
ALLOWED = {f"{DCP}.metadata.{name}" for name in DCP_CLASSES.split()}
ALLOWED |= {f"{DCP}.filesystem._StorageInfo", "torch.serialization._get_layout", "torch.Size"}
ALLOWED |= {"collections.OrderedDict", "pathlib.PosixPath"}
ALLOWED |= {f"torch.{n}" for n, value in vars(torch).items() if type(value) is torch.dtype}


class DcpDirectory:
    """Tensors in a directory of DCP, by names as in "model.norm.weight".

    `forms` are tensors without data, of their shapes and dtypes, by name.
    """

    def __init__(self, path: Path, files: Iterable[str]) -> None:
        """`files`: those that the index may refer to."""
        # Not at the top: it takes a while, and what is saved by torch.save needs none of it.
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.path = path
        with reading(path):
            with open_regular(path / DCP_INDEX) as file:
                self.index: Any = IndexUnpickler(file).load()
            places = {info.relative_path for info in self.index.storage_data.values()}
            if odd := places - {*files}:
                raise pickle.UnpicklingError(f"{DCP_INDEX} points to {odd.pop()!a:.200}")
            for name in places:
                open_regular(path / name).close()  # DCP would follow a link
            self.forms = {
                name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
                for name, each in self.index.state_dict_metadata.items()
                if isinstance(each, TensorStorageMetadata)  # no object is ever read
            }

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, of sharded ones the parts that are here; a collective call."""
        import torch.distributed.checkpoint as dcp

        def refuse(item: Any, value: Any) -> None:
            raise CheckpointError(f"{item.dest_index.fqn} is not a tensor")

        def load() -> None:
            # Their own methods would unpickle anything.
            planner, reader = cast(Any, dcp.DefaultLoadPlanner()), dcp.FileSystemReader(self.path)
            planner.load_bytes = refuse
            cast(Any, reader).read_metadata = lambda *_, **__: self.index
            with reading(self.path), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # DCP warns when there is only one process
                try:
                    dcp.load(
                        dict(targets),
                        storage_reader=reader,
                        planner=planner,
                        process_group=group.process_group,
                        no_dist=group.process_group is None,
                    )
                except dcp.CheckpointException as error:  # no Exception; all ranks raise it
                    if failure := error.failures.get(group.rank):
                        raise failure[0] from error

        group.agree(lambda: check_shapes(self.forms, targets))
        group.agree(load)


Source = OneFile | DcpDirectory


class IndexUnpickler(pickle._Unpickler):  # in Python: the one in C has no method for BUILD
    """Reads the index of a DCP checkpoint, which consists of a few harmless classes."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name, if DCP writes it; UnpicklingError for any other."""
        module = module.removesuffix("._local")  # Python 3.13 has its paths there
        if f"{module}.{name}" not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!a:.200}")
        return getattr(importlib.import_module(module), name)

    def load_build(self) -> None:
        """Set the attributes of an object, but not of a class, which would stay for the process."""
        if isinstance(self.stack[-2], type | types.FunctionType):
            raise pickle.UnpicklingError("it changes a class")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)  # pyright: ignore

    dispatch[pickle.BUILD[0]] = load_build


def open_tensors(path: Place, manifest: dict[str, Any], rename: Any = dict) -> Source:
    """Open a checkpoint that is verified; or, with manifest {}, a file or directory of tensors."""
    local, *_ = local_copy(path, manifest)
    if not local.is_dir() or (not manifest and not (local / DCP_INDEX).exists()):
        return OneFile(local, rename)
    files = manifest.get("files") or os.listdir(local)
    if WHOLE_FILE in files:
        return OneFile(local / WHOLE_FILE)
    with contextlib.suppress(CheckpointError):  # one wrong read of the index must not end a run
        return DcpDirectory(local, files)
    return DcpDirectory(local, files)
