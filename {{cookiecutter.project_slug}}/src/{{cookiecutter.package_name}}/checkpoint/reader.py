"""Find a checkpoint and read its tensors into live ones, by any number of ranks.

No code from a checkpoint runs: torch.load gets `weights_only=True` (for directories of DCP see
dcp_reader.py). Of a checkpoint only the files that its verified manifest names are opened.
"""

import contextlib
import logging
import pickle
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from ..distributed import Group, parallel
from ..errors import RankError, UserError
from . import MANIFEST, CheckpointError, step_name
from .manifest import data_of, verify
from .paths import Place, checkpoints_of, listing, local_copy, located, published
from .tensors import flat

log = logging.getLogger(__name__)
WHOLE_FILE = "state.pt"
DCP_INDEX = ".metadata"
SAFETENSORS = ".safetensors"
NOTE = "note"


class Form(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source:
    """Tensors that can be read, by name; `forms` has what is known of them before."""

    path: Place
    forms: dict[str, Form]

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, of sharded ones the parts that are here; a collective call."""
        raise NotImplementedError


class OneFile(Source):
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


def load_torch(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file of torch.save; only files older than the zip format are not mapped."""
    if tarfile.is_tarfile(path):  # the oldest format: torch would unpack what it holds
        raise pickle.UnpicklingError("it is a tar archive")
    mapped = zipfile.is_zipfile(path)
    return flat(torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))


def load_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file of safetensors, and its own note as one more (see transfer.py)."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            yield name, file.get_tensor(name)
        if note := (file.metadata() or {}).get(NOTE):
            yield NOTE, torch.frombuffer(bytearray(note.encode()), dtype=torch.uint8)


def read_new(source: Source, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors of those names into new memory of this process."""
    with reading(source.path):
        forms = ((name, source.forms[name]) for name in names)
        tensors = {name: torch.empty(form.shape, dtype=form.dtype) for name, form in forms}
    source.read(tensors, Group())
    return tensors


def open_tensors(path: Place, manifest: dict[str, Any]) -> Source:
    """Open what `find_tensors` has found."""
    if path.is_file():
        return OneFile(path)
    folder, files = data_of(path, manifest), manifest.get("files")
    if files and WHOLE_FILE in files:
        return OneFile(folder / WHOLE_FILE)
    from .dcp_reader import Parts

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
        raise CheckpointError(f"{doing} was refused: {brief(error)}") from error
    except BaseException as error:  # DCP's CheckpointException: what it has collected from ranks
        if not hasattr(error, "failures"):
            raise
        rank, (cause, _) = next(iter(error.failures.items()))
        failed = CheckpointError(f"{doing} failed on rank {rank}: {brief(cause)}")
        failed.agreed = True
        raise failed from error


def brief(error: BaseException) -> str:
    """The type of an error and the line of its message that gives the reason."""
    text = f"{error}".rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"


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
