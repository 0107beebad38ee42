"""Checkpoints as one `torch.save` file, gathered on rank 0 while training waits.

The simplest thing to open elsewhere: `torch.load("state.pt")["model"]`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed import Group, parallel
from ..files import naming
from . import WHOLE_FILE
from .storage import StorageConfig
from .tensors import Tensors, nested, refuse_nan


@dataclass(frozen=True)
class CheckpointConfig(StorageConfig):
    """Saved whole, by rank 0."""


class Writer:
    """Saves in the loop; every rank continues when the checkpoint is published."""

    staged_bytes = 0
    failed = False
    prepared = True  # it needs no buffers

    def __init__(
        self, config: CheckpointConfig, group: Group, model: nn.Module, device: torch.device
    ) -> None:
        self.group, self.model = group, model
        self.staged: Tensors = {}

    def prepare(self, tensors: Tensors) -> None:
        """There are no buffers to allocate."""

    def begin(self, tensors: Tensors, job: Callable[..., None], *arguments: Any) -> None:
        """Do the job, which calls `complete` and `write`, while training waits."""
        self.staged = tensors
        try:
            job(*arguments)
        finally:
            self.staged = {}  # an optimizer may replace its tensors, and these would stay

    def complete(self) -> None:
        """Check what is to be written; CheckpointError for a NaN."""
        refuse_nan(self.staged, self.model)

    def write(self, folder: Path) -> list[str]:
        """Write the tensors; the names of this rank's files. Collective."""
        return write_tensors(folder, self.staged, self.group)

    def wait_until_staged(self) -> None:
        """Nothing to wait for."""

    def settle(self) -> None:
        """Nothing is in flight after a save that waits."""

    def close(self) -> None:
        """Nothing runs in the background."""


def write_tensors(folder: Path, tensors: Tensors, group: Group) -> list[str]:
    """Write all tensors into one file, on rank 0; the names of this rank's files. Collective."""
    gathered: Tensors = {}
    error: Exception | None = None
    for name, tensor in tensors.items():
        # One by one, so that only rank 0 has the whole tensors in memory. An error waits for the
        # block: the other ranks gather on.
        try:
            whole = parallel.full_tensor(tensor)
            if group.is_first:
                gathered[name] = whole.cpu()
        except Exception as raised:
            error = raised
    names: list[str] = []
    with group.together():
        if error is not None:
            raise error
        if group.is_first:
            path = folder / WHOLE_FILE
            with naming(path), path.open("wb") as file:
                torch.save(nested(gathered), file)
            names = [WHOLE_FILE]
    return names
