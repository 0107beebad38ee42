"""Reading tensors back without trusting where they lie, into whatever holds them now.

No byte is unpickled as Python would, and of a checkpoint only files that the verified manifest
names are opened. Tensors are copied into the live ones, whole or sharded, so that any
world size and any parallelism can read what another has written.
"""

import contextlib
import logging
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

from ..distributed import Group
from ..errors import RankError, UserError
from .archives import fetched, load_tensors
from .manifest import MANIFEST, CheckpointError, data_of, published, step_name, verify
from .publish import checkpoints_of
from .remote import Place, RemotePath, located
from .shards import DCP_INDEX, PlainReader, read_index

log = logging.getLogger(__name__)
WHOLE_FILE = "state.pt"
SAFETENSORS = ".safetensors"
NOTE = "note"
Tensors = dict[str, Any]  # nested: {"model": {name: tensor}, "optimizer": {name: {key: tensor}}}


class Form(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Parts:
    """Tensors in a directory of DCP, by names as in "model.norm.weight"; opens `files` only.

    Their sizes come with them (None: to be looked up), so a rank opens only those that it reads.
    """

    def __init__(self, path: Place, files: Mapping[str, int | None]) -> None:
        self.path = path
        with as_snapshot_errors(f"reading {path}"):
            self.index = read_index(path, files)
            entries = self.index.state_dict_metadata.items()
            self.forms = {
                printable(name): Form(tuple(entry.size), entry.properties.dtype)
                for name, entry in entries
            }

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, each rank the parts that it holds; a collective call."""
        with as_snapshot_errors(f"reading {self.path}"):
            dcp.load(
                dict(targets),
                storage_reader=PlainReader(self.path, self.index),
                process_group=group.group,
                no_dist=not group.group,
            )


class OneFile:
    """Tensors in one file, of `torch.save` or of safetensors, mapped into memory, not read yet."""

    def __init__(self, path: Place) -> None:
        with as_snapshot_errors(f"reading {path}"):
            if path.suffix == SAFETENSORS:
                self.tensors = dict(load_safetensors(path))
            else:
                self.tensors = load_tensors(path)
            self.forms = {
                printable(name): Form(tuple(tensor.shape), tensor.dtype)
                for name, tensor in self.tensors.items()
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
            if isinstance(target, DTensor):
                mesh, placements = target.device_mesh, target.placements
                source = distribute_tensor(source, mesh, placements, src_data_rank=None)
            target.copy_(source)


def printable(name: str) -> str:
    """A name as it is, unless printing it could do harm."""
    if not name.isprintable() or len(name) > 1000:
        raise pickle.UnpicklingError(f"{name!a:.200} is no name for a tensor")
    return name


def load_safetensors(path: Place) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file of safetensors, and its own note as one more (see travel.py)."""
    with fetched(path) as copy, safe_open(copy.name, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            yield name, file.get_tensor(name)
        if note := (file.metadata() or {}).get(NOTE):
            yield NOTE, torch.frombuffer(bytearray(note.encode()), dtype=torch.uint8)


def open_tensors(path: Place, manifest: dict[str, Any]) -> Parts | OneFile:
    """What `find_tensors` has found; without a manifest no file of a directory is ruled out."""
    if path.is_file():
        return OneFile(path)
    folder = data_of(path, manifest)
    if WHOLE_FILE in manifest.get("files", ()):
        return OneFile(folder / WHOLE_FILE)
    if (files := manifest.get("files")) is not None:
        sizes = {name: entry["size"] for name, entry in files.items()}
    else:
        remote = isinstance(path, RemotePath)
        sizes = path.sizes() if remote else dict.fromkeys(os.listdir(path))
    return Parts(folder, sizes)


@contextlib.contextmanager
def as_snapshot_errors(doing: str) -> Iterator[None]:
    """Give what the readers raise, some of it no `Exception`, one name and one line."""
    try:
        yield
    except (UserError, RankError):
        raise
    except OSError as error:
        raise CheckpointError(f"{doing} failed: {error}") from error
    except Exception as error:  # a file that is something else can fail in any way
        text = f"{doing} was refused: {type(error).__name__}: {f'{error}'.partition(chr(10))[0]}"
        raise CheckpointError(text) from error
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        failed = CheckpointError(f"{doing} failed on rank {rank}: {type(cause).__name__}: {cause}")
        failed.agreed = True
        raise failed from error


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

    `where` may also be a checkpoint itself. Nothing is changed: a run may be writing beside us.
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
        if path.exists():  # else it was pruned while we looked
            log.warning("DAMAGED CHECKPOINT %s: %s", path, "; ".join(problems))
    there = ", ".join(str(int(path.name[5:])) for path in published(directory))
    hint = f"there are those of steps {there}" if there else "train first"
    wanted = f"good checkpoint of step {step}" if step is not None else "good checkpoint"
    raise UserError(f"there is no {wanted} in {where}: {hint}")
