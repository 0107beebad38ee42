"""Find a checkpoint and read its tensors into live ones, by any number of ranks.

No code from a checkpoint runs: torch.load gets `weights_only=True`, and the index of DCP
(torch.distributed.checkpoint) an unpickler that knows the names of DCP's own classes only. Of a
checkpoint nothing is opened but the files that its verified manifest names.
"""

import collections
import contextlib
import io
import logging
import pathlib
import pickle
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException

from ..distributed import Group, parallel
from ..errors import RankError, UserError
from . import MANIFEST, CheckpointError, step_name
from .manifest import data_of, open_plain, verify
from .paths import Place, checkpoints_of, listing, local_copy, located, published
from .tensors import flat

log = logging.getLogger(__name__)
WHOLE_FILE = "state.pt"
DCP_INDEX = ".metadata"
SAFETENSORS = ".safetensors"
NOTE = "note"
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


class Form(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Parts:
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


class OneFile:
    """Tensors in one file, of `torch.save` or of safetensors, mapped into memory, not read yet."""

    def __init__(self, path: Place) -> None:
        self.path = path
        with reading(path):
            load = load_safetensors if path.suffix == SAFETENSORS else load_torch
            with local_copy(path) as file:
                self.tensors = {printable(name): tensor for name, tensor in load(file)}
        self.forms = {
            name: Form(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()
        }

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, of sharded ones the parts that are here."""
        for name, target in targets.items():
            if name not in self.tensors:
                raise CheckpointError(f"there is no {name} in what was saved")
            source = self.tensors[name]
            if source.shape != target.shape:  # copying would repeat a smaller one
                shapes = f"is {list(source.shape)}, wanted {list(target.shape)}"
                raise CheckpointError(f"{name} {shapes}")
            target.copy_(parallel.like(source, target))


class IndexUnpickler(pickle._Unpickler):  # the one in Python: of that in C BUILD has no method
    """Reads the index of a DCP checkpoint, which consists of a few harmless classes."""

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

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


class Files(filesystem.FileSystem):
    """Opens files of a checkpoint for DCP."""

    def concat_path(self, path: Place, suffix: str) -> Place:
        """A file in a folder."""
        return path / suffix

    def create_stream(self, path: Place, mode: str) -> BinaryIO:
        """Open for reading."""
        return open_plain(path)


class PartsReader(dcp.FileSystemReader):
    """DCP's reader, of an index that was read before."""

    def __init__(self, path: Place, index: metadata.Metadata) -> None:
        super().__init__("")
        self.path, self.index, self.fs = path, index, Files()

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The index."""
        return self.index

    def _slice_file(self, file: BinaryIO, info: Any) -> BinaryIO:
        part = super()._slice_file(file, info)
        return io.BytesIO(part.read()) if info.length <= SMALL else part


def read_index(path: Place, files: Iterable[str]) -> metadata.Metadata:
    """The index of a directory of DCP, without objects: DCP would unpickle those.

    UnpicklingError when it refers to anything but `files`, or asks for a class of somebody else's.
    """
    with open_plain(path / DCP_INDEX) as file:
        index = IndexUnpickler(file).load()
    if odd := {info.relative_path for info in index.storage_data.values()} - {*files}:
        raise pickle.UnpicklingError(f"{DCP_INDEX} points to {odd.pop()!a:.200}")
    index.state_dict_metadata = {
        name: entry
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, metadata.TensorStorageMetadata)
    }
    return index


def load_torch(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file of torch.save; only files older than the zip format are not mapped."""
    mapped = zipfile.is_zipfile(path)
    return flat(torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))


def load_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file of safetensors, and its own note as one more (see transfer.py)."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            yield name, file.get_tensor(name)
        if note := (file.metadata() or {}).get(NOTE):
            yield NOTE, torch.frombuffer(bytearray(note.encode()), dtype=torch.uint8)


def open_tensors(path: Place, manifest: dict[str, Any]) -> Parts | OneFile:
    """Open what `find_tensors` has found."""
    if path.is_file():
        return OneFile(path)
    folder, files = data_of(path, manifest), manifest.get("files")
    if files and WHOLE_FILE in files:
        return OneFile(folder / WHOLE_FILE)
    return Parts(folder, listing(folder) if files is None else files)


def printable(name: str) -> str:
    """A name as it is; UnpicklingError if it would break the line in which it is printed."""
    if not name.isprintable():
        raise pickle.UnpicklingError(f"{name!a:.200} is no name for a tensor")
    return name


@contextlib.contextmanager
def reading(path: Place, verb: str = "reading") -> Iterator[None]:
    """Give all that libraries raise, some of it no `Exception`, one type and one line."""
    doing = f"{verb} {path}"
    try:
        yield
    except (UserError, RankError):
        raise
    except OSError as error:
        raise CheckpointError(f"{doing} failed: {error}") from error
    except Exception as error:  # a file that is something else can fail in any way
        text = f"{error}".rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        raise CheckpointError(f"{doing} was refused: {type(error).__name__}: {text}") from error
    except CheckpointException as error:  # what DCP has collected from the ranks
        rank, (cause, _) = next(iter(error.failures.items()))
        text = f"{doing} failed on rank {rank}: {type(cause).__name__}: {cause}"
        failed = CheckpointError(text)
        failed.agreed = True
        raise failed from error


def find_tensors(where: Path, step: int | None = None) -> tuple[Place, dict[str, Any]]:
    """A checkpoint as by `find_checkpoint`, or something from elsewhere, with {} for a manifest.

    That is a file of torch.save or safetensors, or a bare directory of DCP: none can be verified.
    """
    where = located(where)
    if not where.exists():
        raise UserError(f"there is nothing at {where}")
    bare = (where / DCP_INDEX).exists() and not (where / MANIFEST).exists()
    if where.is_file() or bare:
        log.warning("%s has no manifest: whether it is whole cannot be verified", where)
        return where, {}
    return find_checkpoint(where, step)


def find_checkpoint(where: Place, step: int | None = None) -> tuple[Place, dict[str, Any]]:
    """Verify and pick a checkpoint to read from: a run's newest good one, or one by step.

    `where` may also be a checkpoint itself. Nothing is changed: a run may be writing to it.
    """
    directory = checkpoints_of(where)
    if (where / MANIFEST).exists():
        candidates = [where]
    elif step is not None:
        candidates = [directory / step_name(step)]
    else:
        candidates = published(directory)[::-1]
    for path in candidates:
        manifest, problems = verify(path)
        if not problems:
            return path, manifest
        if path.exists():  # else it was pruned meanwhile
            log.warning("DAMAGED CHECKPOINT %s: %s", path, "; ".join(problems))
    there = ", ".join(str(int(path.name[5:])) for path in published(directory))
    hint = f"there are those of steps {there}" if there else "train first"
    wanted = f"good checkpoint of step {step}" if step is not None else "good checkpoint"
    raise UserError(f"there is no {wanted} in {where}: {hint}")
