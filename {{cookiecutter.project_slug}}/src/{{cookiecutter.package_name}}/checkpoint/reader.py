"""Find a checkpoint and read its tensors into live ones, by any number of ranks.

No code from a checkpoint runs: torch.load gets `weights_only=True` (for directories of DCP see
dcp_reader.py). Of a checkpoint only the files that its verified manifest names are opened.
"""

import contextlib
import logging
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from safetensors import safe_open

from ..distributed import Group, parallel
from ..errors import RankError, UserError
from . import MANIFEST, CheckpointError, step_name
from .manifest import Part, data_of, read_once, verify
from .paths import Place, checkpoints_of, listing, local_copy, located, open_regular, published
from .tensors import flat

log = logging.getLogger(__name__)
WHOLE_FILE = "state.pt"
DCP_INDEX = ".metadata"
SAFETENSORS = ".safetensors"
NOTE = "note"
Pair = tuple[torch.Tensor, torch.Tensor]  # one that was saved, and the live one


class Source(Protocol):
    """Tensors that can be read. `forms` gives their shapes and dtypes by name, as tensors."""

    path: Place
    forms: dict[str, torch.Tensor]
    verified: set[str]
    """The files that this rank has verified while it read them."""

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, of sharded ones the parts that are here; a collective call."""


class OneFile(Source):
    """Tensors in one file, of `torch.save` or of safetensors; `forms` are the mapped tensors."""

    def __init__(self, path: Place, entry: dict[str, Any] | None = None) -> None:
        """`entry`: its entry in a manifest, if `read` is to verify it."""
        self.path, self.entry = path, entry
        self.verified: set[str] = set()
        with reading(path):
            load = load_safetensors if path.suffix == SAFETENSORS else load_torch
            with local_copy(path) as file:
                if entry and file != path:  # what was fetched from a store is what is loaded
                    read_once(file, entry)
                    self.entry, self.verified = None, {path.name}
                self.forms = {printable(name): tensor for name, tensor in load(file)}

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, of sharded ones the parts that are here; a collective call."""
        group.agree(lambda: self._read(self._pairs(targets), first=group.rank == 0))

    def _pairs(self, targets: Mapping[str, torch.Tensor]) -> list[Pair]:
        pairs = []
        for name, target in targets.items():
            if (source := self.forms.get(name)) is None:
                raise CheckpointError(f"there is no {name} in what was saved")
            if source.shape != target.shape:  # copying would repeat a smaller one
                shapes = f"{list(source.shape)}, wanted {list(target.shape)}"
                raise CheckpointError(f"{name} is {shapes}")
            pairs.append((source, target))
        return pairs

    def _read(self, wanted: list[Pair], first: bool) -> None:
        """Copy what is mapped; or read the file in place of its pages, verified by one rank."""
        if not self.entry:
            for source, target in wanted:
                target.copy_(parallel.like(source, target))
            return
        storages: dict[Any, list[Pair]] = {}
        for pair in wanted:
            storages.setdefault(place_of(pair[0]), []).append(pair)

        def copy(pairs: list[Pair], part: memoryview) -> None:
            for source, target in pairs:
                target.copy_(parallel.like(with_data(source, part), target))

        with reading(self.path):
            with open_regular(self.path) as file:
                begin = data_start(file)
            places = [place for place in map(place_of, self.forms.values()) if place[1]]
            lowest = min(start for start, _ in places)
            parts = [
                Part(begin + start - lowest, length, memory_for(pairs) or partial(copy, pairs))
                for (start, length), pairs in storages.items()
                if length
            ]
            entry = self.entry if first else None
            read_once(self.path, entry, parts, ahead=first and torch.get_num_threads() > 1)
        self.verified |= {self.path.name} if first else set()


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the storage of a tensor is in memory, and its length in bytes."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def memory_for(pairs: list[Pair]) -> memoryview | None:
    """The memory of a live tensor, if the bytes of its saved one can be read right into it."""
    (saved, live), *others = pairs
    if others or type(live.data) is not torch.Tensor or live.device.type != "cpu":
        return None
    if (saved.shape, saved.dtype) != (live.shape, live.dtype):
        return None
    # Their bytes in this order are all that their storages hold.
    plain = not any(it.is_conj() or it.is_neg() or not it.is_contiguous() for it in (saved, live))
    if not plain or saved.untyped_storage().nbytes() != live.nbytes:
        return None
    return live.detach().view(-1).view(torch.uint8).numpy().data


def data_start(file: IO[bytes]) -> int:
    """Where in a file of torch.save, a zip archive, the bytes of its first storage begin."""
    with zipfile.ZipFile(file) as archive:
        records = [r for r in archive.infolist() if "/data/" in r.filename and r.file_size]
    header = min(record.header_offset for record in records)
    file.seek(header + 26)
    return header + 30 + sum(struct.unpack("<HH", file.read(4)))  # lengths of name and extra field


def with_data(form: torch.Tensor, part: memoryview) -> torch.Tensor:
    """A tensor like `form`, whose storage is a part of a file."""
    storage = torch.frombuffer(part, dtype=torch.uint8).untyped_storage()
    place = form.storage_offset(), form.size(), form.stride()
    return form.detach().set_(storage, *place)


def load_torch(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file of torch.save; only files older than the zip format are not mapped."""
    if tarfile.is_tarfile(path):  # the oldest format, for which torch makes a temporary folder
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


def open_tensors(path: Place, manifest: dict[str, Any], hashing: bool = False) -> Source:
    """Open a checkpoint that is verified; or, `hashing`, one whose files reading verifies.

    Files that it needs nothing of are left to the caller then (`verify_files`).
    """
    if path.is_file():
        return OneFile(path)
    folder, files = data_of(path, manifest), manifest.get("files")
    if files and WHOLE_FILE in files:
        return OneFile(folder / WHOLE_FILE, files[WHOLE_FILE] if hashing else None)
    from .dcp_reader import Parts

    return Parts(folder, listing(folder) if files is None else files, hashing)


def printable(name: str) -> str:
    """A name as it is; UnpicklingError if it would break the line in which it is printed."""
    if not name.isprintable():
        raise pickle.UnpicklingError(f"{name!a:.200} is no name for a tensor")
    return name


@contextlib.contextmanager
def reading(path: Place, verb: str = "reading") -> Iterator[None]:
    """Give all that libraries raise one type and one line."""
    doing = f"{verb} {path}"
    try:
        yield
    except (UserError, RankError):
        raise
    except OSError as error:
        raise CheckpointError(f"{doing} failed: {error}") from error
    except Exception as error:  # a file that is something else can fail in any way
        reason = f"{error}".rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        text = f"{doing} was refused: {type(error).__name__}: {reason}"
        raise CheckpointError(text) from error


def find_checkpoint(where: Place, step: int | None = None) -> tuple[Place, dict[str, Any]]:
    """Verify and pick a checkpoint to read from: a run's newest good one, or one by step.

    `where` may also be a checkpoint, or a file of torch.save or safetensors, or a bare directory of
    DCP, which cannot be verified: their manifest is {}. Nothing is changed: a run may be writing.
    """
    where = located(where)
    if not where.exists():
        raise UserError(f"there is nothing at {where}")
    is_checkpoint = (where / MANIFEST).exists()
    if where.is_file() or ((where / DCP_INDEX).exists() and not is_checkpoint):
        log.warning("%s has no manifest: whether it is whole cannot be verified", where)
        return where, {}
    directory = checkpoints_of(where)
    candidates = published(directory)[::-1] if step is None else [directory / step_name(step)]
    for path in [where] if is_checkpoint else candidates:
        manifest, problems = verify(path)
        if not problems:
            return path, manifest
        if path.exists():  # else it was pruned meanwhile
            log.warning("DAMAGED CHECKPOINT %s: %s", path, "; ".join(problems))
    there = ", ".join(str(int(path.name[5:])) for path in published(directory))
    hint = f"there are steps {there}" if there else "train first"
    wanted = f"good checkpoint of step {step}" if step is not None else "good checkpoint"
    raise UserError(f"there is no {wanted} in {where}: {hint}")
