"""Sharded checkpoints by torch.distributed.checkpoint (DCP), and all that touches its private side.

Writing adds to DCP's own `save` an even division of what several ranks hold alike, errors of writer
threads, which DCP loses, and a cache of plans for each run, where DCP keeps one for the process.

Reading runs no code from a checkpoint: DCP's index is read by an unpickler that knows only DCP's
own classes, and only files that the verified manifest names are opened.
"""

import contextlib
import importlib
import io
import pickle
import types
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from ..distributed import Group, parallel
from ..files import naming
from . import DCP_INDEX, CheckpointError
from .manifest import reading, reason_of
from .paths import open_regular
from .tensors import Tensors, check_shapes, nested

# A restore hashes several files at once, so a rank that has much to write divides it.
LARGE = 32 << 20  # bytes that are worth a file of their own
FILES = 4  # of a rank
# With a single process DCP warns at each save that there is only one. For good, and not around the
# save: that runs in a thread of its own, and filters are the process's.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")

# What an index of DCP consists of.
DCP_CLASSES = (
    "MetadataIndex",
    "Metadata",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
ALLOWED = {
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in DCP_CLASSES),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    *(f"torch.{name}" for name, value in vars(torch).items() if type(value) is torch.dtype),
}


class DcpSaver:
    """Writes the checkpoints of one run; all ranks call `write` together."""

    def __init__(self, group: Group, threads: int = 0) -> None:
        self.group, self.threads = group, threads
        self.cache = uuid.uuid4().hex  # the name of this run's plans in DCP's cache
        self.forms: list[Any] | None = None
        """Names, shapes and dtypes that this rank wrote last; None if that save failed."""

    def write(self, folder: Path, tensors: Tensors) -> list[str]:
        """Write this rank's tensors; the names of its files. CheckpointError on every rank."""
        forms = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        # DCP compares plans by all but the dtype, and a save that failed may have left half a plan.
        if self.group.any(forms != self.forms):
            forget_plans(self.cache)
        self.forms = None  # until this save has succeeded
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = self.cache
        size = sum(parallel.local_part(tensor).nbytes for tensor in tensors.values())
        files = self.threads or max(1, min(size // LARGE, FILES, len(tensors)))
        writer = DcpWriter(folder, files)
        try:
            dcp.save(
                nested(tensors),
                storage_writer=writer,
                planner=planner,
                process_group=self.group.process_group,
                no_dist=self.group.process_group is None,
            )
        except dcp.CheckpointException as error:  # no Exception; DCP raises it on all ranks
            raise CheckpointError(f"writing {folder}: {failures_of(error)}") from error
        self.forms = forms
        return writer.names


class DcpWriter(dcp.FileSystemWriter):
    """DCP's writer; keeps the errors that its threads would lose.

    Their files would be missing from a checkpoint that counts as saved.
    """

    def __init__(self, folder: Path, files: int) -> None:
        # The publisher syncs the files. Copying ahead would make the training stream wait.
        super().__init__(folder, sync_files=False, thread_count=files, per_thread_copy_ahead=0)
        cast(Any, self.fs).create_stream = self.create
        self.errors: list[Exception] = []
        self.names: list[str] = []

    @contextlib.contextmanager
    def create(self, path: Any, mode: str) -> Iterator[Any]:
        """Create a file; an error is kept, and DCP continues."""
        stream = None
        try:
            with naming(path), path.open(mode) as stream:
                yield stream
        except Exception as error:
            if path.name.startswith(DCP_INDEX):  # which no thread writes
                raise
            self.errors.append(error)
            if stream is None:
                yield io.BytesIO()  # DCP needs a stream to continue
        else:
            self.names.append(path.name.removesuffix(".tmp"))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's files."""
        results = super().write_data(plan, planner)
        if self.errors:
            raise self.errors[0]
        if len(results.value()) < len(plan.items):
            raise CheckpointError("a thread of DCP did not end its file")
        return results


def failures_of(error: dcp.CheckpointException) -> str:
    """The different errors of the ranks, each with the lowest rank that had it; four at most."""
    texts: dict[str, str] = {}
    for rank, (failure, _) in sorted(error.failures.items()):
        text = reason_of(failure)
        texts.setdefault(text, f"rank {rank}: {text}")
    return "; ".join([*texts.values()][:4])


def forget_plans(cache: str) -> None:
    """Remove what DCP has cached under a name."""
    SavePlanner._cached_save_plan.pop(cache, None)
    SavePlanner._cached_final_save_plan.pop(cache, None)
    SavePlanner._cached_all_plans.pop(cache, None)
    SavePlanner._cached_global_plan.pop(cache, None)
    SavePlanner._cached_metadata.pop(cache, None)


def write_tensors(folder: Path, tensors: Tensors, group: Group) -> list[str]:
    """Write tensors once; the names of this rank's files. All ranks call it together."""
    return DcpSaver(group).write(folder, tensors)


def divided(tensors: Tensors, group: Group) -> Tensors:
    """What this rank has to write: a near-equal part of what it and other ranks hold alike.

    The largest tensor first, each goes to the rank that has the least so far. All ranks compute the
    same division, each for those that hold the same as itself.
    """
    loads: dict[int, list[int]] = {}  # bytes of each holder, by the number of holders
    mine = set()
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        tensor = tensors[name]
        holders, index = parallel.replicas(tensor, group.rank, group.size)
        load = loads.setdefault(holders, [0] * holders)
        lightest = load.index(min(load))
        load[lightest] += tensor.nbytes + 4096  # a small tensor has its cost too
        if lightest == index:
            mine.add(name)
    return {name: tensor for name, tensor in tensors.items() if name in mine}


class DcpDirectory:
    """Tensors in a directory of DCP, by names as in "model.norm.weight".

    `forms` are tensors without data, of their shapes and dtypes, by name.
    """

    def __init__(self, path: Path, files: Iterable[str]) -> None:
        """`files`: those that the index may refer to."""
        self.path = path
        self.forms: Tensors = {}
        with reading(path):
            with open_regular(path / DCP_INDEX) as file:
                self.index: Any = IndexUnpickler(file).load()
            named = {info.relative_path for info in self.index.storage_data.values()}
            if odd := named - {*files}:
                raise pickle.UnpicklingError(f"{DCP_INDEX} points to {odd.pop()!a:.200}")
            for name in named:
                open_regular(path / name).close()  # DCP would follow a link
            for name, entry in self.index.state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):  # no object is ever read
                    dtype = entry.properties.dtype
                    self.forms[name] = torch.empty(entry.size, dtype=dtype, device="meta")

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, of sharded ones the parts that are here; collective."""
        with group.together():
            check_shapes(self.forms, targets)
        planner = dcp.DefaultLoadPlanner()
        reader = dcp.FileSystemReader(self.path)
        # Their own methods would unpickle anything.
        cast(Any, planner).load_bytes = _refuse_object
        cast(Any, reader).read_metadata = self._read_metadata
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
            except dcp.CheckpointException as error:  # no Exception; DCP raises it on all ranks
                text = f"reading {self.path} was refused: {failures_of(error)}"
                raise CheckpointError(text) from error

    def _read_metadata(self, *arguments: Any, **options: Any) -> Any:
        return self.index


def _refuse_object(item: Any, value: Any) -> None:
    raise CheckpointError(f"{item.dest_index.fqn} is not a tensor")


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
