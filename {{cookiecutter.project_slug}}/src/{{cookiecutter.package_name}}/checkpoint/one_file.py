"""Read the tensors of files of torch.save or of safetensors; no code in them runs."""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..distributed import Group, parallel
from ..errors import UserError
from .manifest import reading
from .tensors import check_shapes, flat

SAFETENSORS = ".safetensors"


class OneFile:
    """Tensors in one file, of `torch.save` or of safetensors, or in a folder of the latter.

    `forms` are the mapped tensors by name, which `rename` may change, given all of them.
    """

    def __init__(self, path: Path, rename: Any = dict) -> None:
        self.path = path
        with reading(path):
            files = sorted(path.glob(f"*{SAFETENSORS}")) if path.is_dir() else [path]
            pairs = [pair for file in files for pair in load_file(file)]
            if len(tensors := dict(pairs)) < len(pairs):
                raise UserError(f"{path} has tensors of the same name in several files: give one")
            self.forms = rename(tensors)

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy into live tensors, of sharded ones the parts that are here; a collective call."""

        def copy() -> None:
            check_shapes(self.forms, targets)
            for name, target in targets.items():
                target.copy_(parallel.shard_like(self.forms[name], target))

        group.agree(copy)


def load_file(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file; only those of torch.save before its zip format are not mapped."""
    if path.suffix == SAFETENSORS:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                yield name, file.get_tensor(name)
        return
    mapped = zipfile.is_zipfile(path)
    yield from flat(torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))
