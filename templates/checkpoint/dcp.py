"""Read and write sharded checkpoints with torch.distributed.checkpoint (DCP).

Only this file uses private names of DCP. It adds three things to DCP's own `save`:

- `divided` divides tensors that several ranks hold evenly among these ranks; `Writer` calls it
  before each save;
- `DcpWriter` raises errors of writer threads, which DCP loses;
- `DcpSaver` caches the save plans under a key of its own, while DCP uses one key for the whole
  process.

Reading runs no code from a checkpoint: the unpickler for DCP's index accepts only the few harmless
types that an index needs. The index may refer only to files that the verified manifest names.
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

# Each rank writes one file per 32 MB, but at most 4. A restore hashes several files in parallel.
BYTES_PER_FILE = 32 << 20
MOST_FILES = 4
# Writing a tensor has a fixed cost, which equals the cost of writing this number of bytes.
TENSOR_COST = 4096
# Without a process group, DCP warns at each save that there is none. A filter applies to the whole
# process, and a save may run in a thread, so this filter is set once and never removed.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")

# The classes of the objects in DCP's index.
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
# All names that the pickled index may refer to: these classes, and the types of their fields.
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
    """Writes the checkpoints of one run; all ranks call `write` together.

    `threads` is the number of files that each rank writes in parallel (0: by the size).
    """

    def __init__(self, group: Group, threads: int = 0) -> None:
        self.group = group
        self.threads = threads
        # The key of this run's plans in DCP's cache.
        self.cache = uuid.uuid4().hex
        # Names, shapes and dtypes of the tensors in this rank's last save; None before the first
        # save, and after one that failed.
        self.forms: list[Any] | None = None

    def write(self, folder: Path, tensors: Tensors) -> list[str]:
        """Write this rank's tensors and return the names of its files; collective.

        Raises CheckpointError, on every rank, when any rank failed.
        """
        forms = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        # DCP would reuse a cached plan even if dtypes have changed, or if a failed save has left
        # the plan incomplete. So drop the plans in these cases, on all ranks.
        if self.group.any(forms != self.forms):
            forget_plans(self.cache)
        self.forms = None
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = self.cache
        size = sum(parallel.local_part(tensor).nbytes for tensor in tensors.values())
        files = self.threads
        if not files:
            # Choose the number by the size, but at most one file per tensor: with more, DCP would
            # write empty files.
            files = max(1, min(size // BYTES_PER_FILE, MOST_FILES, len(tensors)))
        writer = DcpWriter(folder, files)
        # DCP flattens nested dictionaries, and joins their keys with dots: the names in its index
        # are those of `tensors` again.
        try:
            dcp.save(
                nested(tensors),
                storage_writer=writer,
                planner=planner,
                process_group=self.group.process_group,
                no_dist=self.group.process_group is None,
            )
        except dcp.CheckpointException as error:
            # DCP raises this exception, a BaseException, on all ranks.
            raise CheckpointError(f"writing {folder}: {failures_of(error)}") from error
        self.forms = forms
        return writer.names


class DcpWriter(dcp.FileSystemWriter):
    """DCP's writer, changed to raise the errors of its threads.

    DCP itself loses these errors, and counts a checkpoint with missing files as saved.
    """

    def __init__(self, folder: Path, files: int) -> None:
        # The publisher syncs the files, so DCP need not. If DCP copied ahead of writing, it could
        # wait for the training stream, even for tensors that are already on the host.
        super().__init__(folder, sync_files=False, thread_count=files, per_thread_copy_ahead=0)
        # DCP opens all files with `create_stream`: replace it.
        cast(Any, self.fs).create_stream = self.create
        self.errors: list[Exception] = []
        self.names: list[str] = []

    @contextlib.contextmanager
    def create(self, path: Any, mode: str) -> Iterator[Any]:
        """Create a file; store an error of a thread in `errors`, so that DCP continues."""
        stream = None
        try:
            with naming(path), path.open(mode) as stream:
                yield stream
        except Exception as error:
            # DCP writes its index outside of the threads, so it does not lose this error.
            if path.name.startswith(DCP_INDEX):
                raise
            # The error is not raised again, so DCP's thread continues after its `with` block.
            self.errors.append(error)
            if stream is None:
                # The file could not be opened, and the block has not run yet. Let it run with
                # another stream.
                yield io.BytesIO()
        else:
            # DCP writes its index to a .tmp file, and then renames it.
            self.names.append(path.name.removesuffix(".tmp"))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's files; raise the first error of a thread."""
        results = super().write_data(plan, planner)
        if self.errors:
            raise self.errors[0]
        if len(results.value()) < len(plan.items):
            raise CheckpointError("a writer thread of DCP did not finish its file")
        return results


def failures_of(error: dcp.CheckpointException) -> str:
    """Return at most four different errors as text, each with the first rank that had it.

    Raises KeyboardInterrupt if Ctrl-C interrupted a rank, since DCP catches that, too.
    """
    texts: dict[str, str] = {}
    for rank, (failure, _) in sorted(error.failures.items()):
        if isinstance(failure, KeyboardInterrupt):
            raise failure
        text = reason_of(failure)
        texts.setdefault(text, f"rank {rank}: {text}")
    first_four = list(texts.values())[:4]
    return "; ".join(first_four)


def forget_plans(cache: str) -> None:
    """Remove the plans that DCP has cached under a key."""
    SavePlanner._cached_save_plan.pop(cache, None)
    SavePlanner._cached_final_save_plan.pop(cache, None)
    SavePlanner._cached_all_plans.pop(cache, None)
    SavePlanner._cached_global_plan.pop(cache, None)
    SavePlanner._cached_metadata.pop(cache, None)


def write_tensors(folder: Path, tensors: Tensors, group: Group) -> list[str]:
    """Write one checkpoint and return the names of this rank's files; collective.

    An error on any rank is raised on all of them.
    """
    return DcpSaver(group).write(folder, tensors)


def divided(tensors: Tensors, group: Group) -> Tensors:
    """Return the tensors that this rank writes, so that exactly one rank writes each shard.

    The holders of a shard are the ranks that have it. Tensors are assigned from the largest to the
    smallest, each to the holder that has the least to write so far. So all holders write about the
    same number of bytes. All of them compute the same assignment, without communication.
    """
    # For each number of holders, the bytes that each holder writes so far. Tensors with different
    # numbers of holders are balanced separately.
    loads: dict[int, list[int]] = {}
    mine: set[str] = set()
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        tensor = tensors[name]
        # The number of holders, and this rank's index among them.
        holders, my_index = parallel.replicas(tensor, group.rank, group.size)
        load = loads.setdefault(holders, [0] * holders)
        lightest = load.index(min(load))
        load[lightest] += tensor.nbytes + TENSOR_COST
        if lightest == my_index:
            mine.add(name)
    return {name: tensor for name, tensor in tensors.items() if name in mine}


class DcpDirectory:
    """Tensors in a DCP directory, with names such as "model.norm.weight".

    `forms` maps each name to a tensor of its shape and dtype, without data.
    """

    def __init__(self, path: Path, files: Iterable[str]) -> None:
        """Read the index, which may refer only to `files`."""
        self.path = path
        self.forms: Tensors = {}
        with reading(path):
            with open_regular(path / DCP_INDEX) as file:
                self.index: Any = IndexUnpickler(file).load()
            file_names = {info.relative_path for info in self.index.storage_data.values()}
            unknown = file_names - set(files)
            if unknown:
                raise pickle.UnpicklingError(f"{DCP_INDEX} points to {unknown.pop()!a:.200}")
            for file_name in file_names:
                # DCP would follow a link. This call raises OSError for one.
                open_regular(path / file_name).close()
            for name, entry in self.index.state_dict_metadata.items():
                # Other entries are pickled objects, which are never read.
                if isinstance(entry, TensorStorageMetadata):
                    dtype = entry.properties.dtype
                    self.forms[name] = torch.empty(entry.size, dtype=dtype, device="meta")

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Fill `targets`, which are tensors of the run, with the saved values; collective.

        If a target is sharded, each rank reads only its own shard. Raises RankError, on every rank,
        if any rank fails; it is a CheckpointError if the failure is in DCP.
        """
        with group.together():
            check_shapes(self.forms, targets)
        planner = dcp.DefaultLoadPlanner()
        reader = dcp.FileSystemReader(self.path)
        # Replace DCP's own methods, which would unpickle anything.
        cast(Any, planner).load_bytes = _refuse_object
        cast(Any, reader).read_metadata = self._read_metadata
        with reading(self.path), warnings.catch_warnings():
            # DCP warns when there is only one process.
            warnings.simplefilter("ignore")
            try:
                dcp.load(
                    dict(targets),
                    storage_reader=reader,
                    planner=planner,
                    process_group=group.process_group,
                    no_dist=group.process_group is None,
                )
            except dcp.CheckpointException as error:
                # DCP raises this exception, a BaseException, on all ranks.
                text = f"{self.path} cannot be loaded: {failures_of(error)}"
                raise CheckpointError(text) from error

    def _read_metadata(self, *arguments: Any, **options: Any) -> Any:
        """Return the index, which `__init__` has read."""
        return self.index


def _refuse_object(item: Any, value: Any) -> None:
    """Raise CheckpointError in place of unpickling a saved object."""
    raise CheckpointError(f"{item.dest_index.fqn} is not a tensor")


class IndexUnpickler(pickle._Unpickler):
    """Reads the index of a DCP checkpoint, and accepts only a few harmless classes.

    It extends the unpickler that is written in Python, since the usual one, written in C, does not
    allow overriding the BUILD opcode.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of that name if it is ALLOWED; raise UnpicklingError otherwise.

        The error shows at most 200 characters of the name, which comes from the file.
        """
        # Python 3.13 pickles a path as pathlib._local.PosixPath.
        module = module.removesuffix("._local")
        if f"{module}.{name}" not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!a:.200}")
        return getattr(importlib.import_module(module), name)

    def load_build(self) -> None:
        """Set attributes of an object; refuse to change a class or function, which others use."""
        # The top of the stack has the attributes; the entry below it is the object to change.
        if isinstance(self.stack[-2], type | types.FunctionType):
            raise pickle.UnpicklingError("it changes a class")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)  # pyright: ignore

    dispatch[pickle.BUILD[0]] = load_build
