"""Read the tensors of files of torch.save or of safetensors; no code in them runs."""

import pickle
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from ..distributed import Group, parallel
from .manifest import reading
from .tensors import check_shapes, flat

SAFETENSORS = ".safetensors"


class OneFile:
    """Tensors in one file, of `torch.save` or of safetensors, or in a folder of the latter.

    `forms` are the mapped tensors by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forms: dict[str, torch.Tensor] = {}
        with reading(path):
            for file in sorted(path.glob(f"*{SAFETENSORS}")) if path.is_dir() else [path]:
                load = load_safetensors if file.suffix == SAFETENSORS else load_torch
                self.forms |= load(file)

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
