"""Reading tensors back without trusting where they lie, into whatever holds them now.

No byte is unpickled outside an allow-list, and of a checkpoint only files that the verified
manifest names are opened. Tensors are copied into the live ones, whole or sharded, so that any
world size and any parallelism can read what another has written.
"""

import contextlib
import io
import logging
import os
import pathlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

from . import UserError
from .control import HostGroup, RankError
from .manifest import MANIFEST, SnapshotError, published, step_name, verify

log = logging.getLogger(__name__)
WHOLE_FILE = "state.pt"
DCP_INDEX = ".metadata"
SAFETENSORS = ".safetensors"
NOTE = "note"
Tensors = dict[str, Any]  # nested: {"model": {name: tensor}, "optimizer": {name: {key: tensor}}}


class Form(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Parts:
    """Tensors in a directory of DCP, by names as in "model.norm.weight"; opens `files` only."""

    def __init__(self, path: Path, files: Iterable[str]) -> None:
        self.path, self.files = path, frozenset(files)
        with as_snapshot_errors("reading"):
            entries = SafeReader(path, self.files).read_metadata().state_dict_metadata
        self.forms = {
            name: Form(tuple(entry.size), entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }

    def read(self, targets: Mapping[str, torch.Tensor], group: HostGroup) -> None:
        """Copy into live tensors, each rank the parts that it holds; a collective call."""
        with as_snapshot_errors("reading"):
            dcp.load(
                dict(targets),
                storage_reader=SafeReader(self.path, self.files),
                planner=TensorsOnly(),
                process_group=group.group,
                no_dist=not group.group,
            )


class OneFile:
    """Tensors in one file, of `torch.save` or of safetensors, mapped into memory, not read yet."""

    def __init__(self, path: Path) -> None:
        with as_snapshot_errors(f"reading {path}"):
            if path.suffix == SAFETENSORS:
                self.tensors = dict(load_safetensors(path))
            else:
                self.tensors = dict(flat(load_whole(path)))
        self.forms = {name: Form(tuple(t.shape), t.dtype) for name, t in self.tensors.items()}

    def read(self, targets: Mapping[str, torch.Tensor], group: HostGroup) -> None:
        """Copy into live tensors, of sharded ones the parts that are here."""
        for name, target in targets.items():
            source = self.tensors[name]
            if isinstance(target, DTensor):
                mesh, placements = target.device_mesh, target.placements
                source = distribute_tensor(source, mesh, placements, src_data_rank=None)
            target.copy_(source)


def load_whole(path: Path) -> Any:
    """What a file of `torch.save` holds, as far as that needs no code to be run."""
    try:
        try:
            return torch.load(path, mmap=True, weights_only=True, map_location="cpu")
        except RuntimeError:  # not of the zip format, which alone can be mapped
            return torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:  # torch's own words advise to load it all the same
        raise pickle.UnpicklingError("it holds more than tensors, or is something else") from error


def load_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file of safetensors, and its own note as one more (see travel.py)."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            yield name, file.get_tensor(name)
        if note := (file.metadata() or {}).get(NOTE):
            yield NOTE, torch.frombuffer(bytearray(note.encode()), dtype=torch.uint8)


def open_tensors(path: Path, manifest: dict[str, Any]) -> Parts | OneFile:
    """What `find_tensors` has found; without a manifest no file of a directory is ruled out."""
    if path.is_file():
        return OneFile(path)
    if WHOLE_FILE in manifest.get("files", ()):
        return OneFile(path / WHOLE_FILE)
    return Parts(path, manifest.get("files") or os.listdir(path))


@contextlib.contextmanager
def as_snapshot_errors(doing: str) -> Iterator[None]:
    """Give what the readers raise, some of it no `Exception`, one name and one line."""
    try:
        yield
    except (OSError, UserError, RankError):
        raise
    except Exception as error:  # a file that is something else can fail in any way
        text = f"{doing} was refused: {type(error).__name__}: {f'{error}'.partition(chr(10))[0]}"
        raise SnapshotError(text) from error
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        text = f"{doing} failed on rank {rank}: {type(cause).__name__}: {cause}"
        raise SnapshotError(text) from error


def walk(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The tensors of a nested dictionary, each with the keys that lead to it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from walk(value, (*path, str(key)))
    elif isinstance(tree, torch.Tensor):
        yield path, tree


def flat(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a nested dictionary by the names that DCP gives them."""
    return ((".".join(path), tensor) for path, tensor in walk(tree))


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, less its trust: it would run any code that a crafted `.metadata` asks for."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        super().__init__(path)
        self.names = frozenset(names)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Read the index through the allow-list; it may point only to files of the manifest."""
        index = MetadataUnpickler(io.BytesIO((Path(self.path) / DCP_INDEX).read_bytes())).load()
        for info in index.storage_data.values():
            if info.relative_path not in self.names or info.transform_descriptors:
                raise pickle.UnpicklingError(f"{DCP_INDEX} points to {info.relative_path!r}")
        index.storage_meta = index.storage_meta or metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class TensorsOnly(dcp.DefaultLoadPlanner):
    """Refuses byte entries: DCP would unpickle them freely, and our checkpoints have none."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Refuse."""
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is not a tensor")


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles the index of a DCP checkpoint and nothing else."""

    allowed = frozenset(
        {
            *((metadata.__name__, name) for name in vars(metadata) if "Meta" in name),
            (metadata.__name__, "_MEM_FORMAT_ENCODING"),
            (metadata.__name__, "TensorProperties"),
            (filesystem.__name__, "_StorageInfo"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """Resolve an allowed global; UnpicklingError for any other."""
        if name == "PosixPath" and module in ("pathlib", "pathlib._local"):
            return pathlib.PosixPath  # Python 3.13 has it elsewhere
        if (module, name) in self.allowed:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{DCP_INDEX} asks for {module}.{name}: refused")


def find_tensors(where: Path, step: int | None = None) -> tuple[Path, dict[str, Any]]:
    """A checkpoint as by `find_checkpoint`, or something from elsewhere, with {} for a manifest.

    That is a file of torch.save or safetensors, or a bare directory of DCP: none can be verified.
    """
    if not where.exists():
        raise UserError(f"there is nothing at {where}")
    bare = (where / DCP_INDEX).exists() and not (where / MANIFEST).exists()
    if where.is_file() or bare:
        log.warning("%s has no manifest: whether it is whole cannot be verified", where)
        return where, {}
    return find_checkpoint(where, step)


def find_checkpoint(where: Path, step: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Verify and pick a checkpoint to read from: a run directory's newest good one, or one by step.

    `where` may also be a checkpoint itself. Nothing is changed: a run may be writing beside us.
    """
    if (where / MANIFEST).exists():
        candidates = [where]
    elif step is not None:
        candidates = [where / "checkpoints" / step_name(step)]
    else:
        candidates = published(where / "checkpoints")[::-1]
    for path in candidates:
        manifest, problems = verify(path)
        if not problems:
            return path, manifest
        if path.exists():  # else it was pruned while we looked
            log.warning("DAMAGED CHECKPOINT %s: %s", path, "; ".join(problems))
    there = ", ".join(str(int(path.name[5:])) for path in published(where / "checkpoints"))
    hint = f"there are those of steps {there}" if there else "train first, or see what is there"
    wanted = f"good checkpoint of step {step}" if step is not None else "good checkpoint"
    raise UserError(f"there is no {wanted} in {where}: {hint}")
