"""Find a checkpoint and read its tensors into live ones, by any number of ranks.

No code from a checkpoint runs: torch.load gets `weights_only=True` (for directories of DCP see
dcp_reader.py). Of a checkpoint only the files that its verified manifest names are opened.
"""

import logging
import pickle
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from ..distributed import Group, parallel
from ..errors import UserError
from . import DCP_INDEX, MANIFEST, WHOLE_FILE, step_name
from .manifest import data_of, reading, verify
from .paths import (
    Place,
    checkpoints_of,
    fetch,
    listing,
    local_folder,
    located,
    published,
)
from .tensors import check_shapes, flat, printable

log = logging.getLogger(__name__)
SAFETENSORS = ".safetensors"


class Source(Protocol):
    """Tensors that can be read. `forms` gives their shapes and dtypes by name, as tensors."""

    path: Path
    forms: dict[str, torch.Tensor]

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, of sharded ones the parts that are here; a collective call."""


class OneFile(Source):
    """Tensors in one file, of `torch.save` or of safetensors; `forms` are the mapped tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            load = load_safetensors if path.suffix == SAFETENSORS else load_torch
            self.forms = {printable(name): tensor for name, tensor in load(path)}

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, of sharded ones the parts that are here; a collective call."""

        def copy() -> None:
            check_shapes(self.forms, targets)
            for name, target in targets.items():
                target.copy_(parallel.shard_like(self.forms[name], target))

        group.agree(copy)


def load_torch(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file of torch.save; only files older than the zip format are not mapped."""
    if tarfile.is_tarfile(path):  # the oldest format, for which torch makes a temporary folder
        raise pickle.UnpicklingError("it is a tar archive")
    mapped = zipfile.is_zipfile(path)
    return flat(torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))


def load_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file of safetensors."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            yield name, file.get_tensor(name)


def open_tensors(path: Place, manifest: dict[str, Any]) -> Source:
    """Open a checkpoint that is verified; or, with manifest {}, a file or directory of tensors."""
    if path.is_file():
        fetch(file := local_folder(path.parent) / path.name)
        return OneFile(file)
    folder, files = local_folder(data_of(path, manifest)), manifest.get("files")
    for name in () if files else listing(path):
        fetch(folder / name)
    if files and WHOLE_FILE in files:
        return OneFile(folder / WHOLE_FILE)
    from .dcp_reader import DcpDirectory  # DCP takes a while to import

    return DcpDirectory(folder, files or listing(folder))


def find_checkpoint(
    where: Place, step: int | None = None, group: Group | None = None
) -> tuple[Place, dict[str, Any]]:
    """Verify and pick a checkpoint to read from: a run's newest good one, or one by step.

    `where` may also be a checkpoint, or a file of torch.save or safetensors, or a bare directory of
    DCP, which cannot be verified: their manifest is {}. Nothing is changed: a run may be writing.
    """
    group, where = group or Group(), located(where)

    def candidates() -> tuple[list[Place], bool]:
        if not where.exists():
            raise UserError(f"there is nothing at {where}")
        if (where / MANIFEST).exists():
            return [where], True
        if where.is_file() or (where / DCP_INDEX).exists():
            return [where], False
        directory = checkpoints_of(where)
        steps = published(directory)[::-1] if step is None else [directory / step_name(step)]
        return steps, True

    paths, have_manifests = group.from_first(candidates)
    if not have_manifests:
        log.warning("%s has no manifest: whether it is whole cannot be verified", where)
        return paths[0], {}
    for path in paths:
        manifest, problems = verify(path, group)
        if not problems:
            return path, manifest
        if path.exists():  # else it was pruned meanwhile
            log.warning("DAMAGED CHECKPOINT %s: %s", path, "; ".join(problems))
    there = ", ".join(str(int(path.name[5:])) for path in published(checkpoints_of(where)))
    hint = f"there are steps {there}" if there else "train first"
    wanted = f"good checkpoint of step {step}" if step is not None else "good checkpoint"
    raise UserError(f"there is no {wanted} in {where}: {hint}")
