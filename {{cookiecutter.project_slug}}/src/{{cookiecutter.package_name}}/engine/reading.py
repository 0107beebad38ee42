"""Reading checkpoints back without trusting them, into whatever holds the tensors now.

No byte is unpickled outside an allow-list, and only files that the verified manifest names are
opened. Tensors are copied into the live ones, whole or sharded, so that any world size and any
parallelism can read what another has written.
"""

import contextlib
import io
import logging
import pathlib
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

from . import UserError
from .control import HostGroup
from .manifest import SnapshotError, published, step_name, verify

log = logging.getLogger(__name__)
WHOLE_FILE = "state.pt"
DCP_INDEX = ".metadata"
Tensors = dict[str, Any]  # nested: {"model": {name: tensor}, "optimizer": {name: {key: tensor}}}


def read_into(path: Path, manifest: dict[str, Any], tensors: Tensors, group: HostGroup) -> None:
    """Copy a verified checkpoint into live tensors, each rank the parts it holds."""
    with as_snapshot_errors("reading"):
        if WHOLE_FILE in manifest["files"]:
            copy_tree(load_whole(path, "cpu"), tensors)
            return
        dcp.load(
            tensors,
            storage_reader=SafeReader(path, names=manifest["files"].keys()),
            planner=TensorsOnly(),
            process_group=group.group,
            no_dist=not group.group,
        )


def load_whole(path: Path, where: str) -> dict[str, Any]:
    """What one `torch.save` file holds: tensors, mapped into memory rather than read."""
    return torch.load(path / WHOLE_FILE, mmap=True, weights_only=True, map_location=where)


@contextlib.contextmanager
def as_snapshot_errors(doing: str) -> Iterator[None]:
    """Give what DCP raises, which no `except Exception` would catch, a name and one line."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise SnapshotError(f"{doing} was refused: {error}") from error
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        text = f"{doing} failed on rank {rank}: {type(cause).__name__}: {cause}"
        raise SnapshotError(text) from error


def saved_names(path: Path, manifest: dict[str, Any]) -> set[str]:
    """Names of all tensors in a verified checkpoint, as in "model.norm.weight"."""
    with as_snapshot_errors("reading"):
        if WHOLE_FILE in manifest["files"]:
            return {".".join(keys) for keys, _ in walk(load_whole(path, "meta"))}
        return set(SafeReader(path, manifest["files"].keys()).read_metadata().state_dict_metadata)


def walk(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The tensors of a nested dictionary, each with the keys that lead to it."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from walk(value, (*path, key))
    else:
        yield path, tree


def copy_tree(source: dict[str, Any], target: dict[str, Any]) -> None:
    """Copy tensors between nested dictionaries, of sharded ones the parts that are here."""
    for key, value in target.items():
        if isinstance(value, dict):
            copy_tree(source[key], value)
        elif isinstance(value, DTensor):
            placed = distribute_tensor(
                source[key], value.device_mesh, value.placements, src_data_rank=None
            )
            value.copy_(placed)
        else:
            value.copy_(source[key])


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


def find_checkpoint(where: Path, step: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Verify and pick a checkpoint to read from: a run directory's newest good one, or one by step.

    `where` may also be a checkpoint itself. Nothing is changed: a run may be writing beside us.
    """
    if (where / "manifest.json").exists():
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
    wanted = f"good checkpoint of step {step}" if step is not None else "good checkpoint"
    raise UserError(f"there is no {wanted} in {where}: train first, or see what `verify` says")


def load_weights(where: Path, model: nn.Module, step: int | None, group: HostGroup) -> str:
    """Load weights alone into a model, leaving out what only one side has; says what was done.

    UserError when a tensor has another shape or when nothing fits.
    """
    path, manifest = group.from_first(lambda: find_checkpoint(where, step))
    saved = manifest["identity"]["parameters"]
    ours = model.state_dict()
    common = {name: tensor for name, tensor in ours.items() if name in saved}
    for name, tensor in common.items():
        if saved[name][:-1] != list(tensor.shape):
            raise UserError(f"{path}: {name} is {saved[name][:-1]}, wanted {list(tensor.shape)}")
    if not common:
        raise UserError(f"{path} and this model have no parameter name in common")
    read_into(path, manifest, {"model": common}, group)
    text = f"{len(common)} tensors from {path}"
    if missing := ours.keys() - saved.keys():
        text += f"; not there, left as they were: {', '.join(sorted(missing))}"
    if unexpected := saved.keys() - ours.keys():
        text += f"; there but not wanted: {', '.join(sorted(unexpected))}"
    return text
