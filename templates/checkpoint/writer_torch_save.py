"""Write checkpoints as one `torch.save` file, gathered on rank 0 while training waits.

Such a file is easy to open without this project: `torch.load("state.pt")["model"]`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed import Group, parallel
from ..files import naming
from . import WHOLE_FILE
from .storage import StorageConfig
from .tensors import Job, Tensors, nested, refuse_nan


@dataclass(frozen=True)
class CheckpointConfig(StorageConfig):
    """Settings of checkpoints, which rank 0 writes as one file."""


class Writer:
    """Saves in the training loop, which continues once the checkpoint is published."""

    # This writer has no host buffers, so it needs no preparation. `failed` is never true, since
    # `begin` itself raises the error of a failed save.
    staged_bytes = 0
    prepared = True
    failed = False

    def __init__(
        self, config: CheckpointConfig, group: Group, model: nn.Module, device: torch.device
    ) -> None:
        self.group = group
        self.model = model
        # The tensors to write during a save; otherwise {}.
        self.staged: Tensors = {}

    def prepare(self, tensors: Tensors) -> None:
        """Do nothing, since there are no buffers to allocate."""

    def begin(self, tensors: Tensors, job: Job, step: int, facts: dict[str, Any]) -> None:
        """Run `job(step, facts)`, which calls `complete` and `write`, while training waits."""
        self.staged = tensors
        try:
            job(step, facts)
        finally:
            # An optimizer may replace its tensors later. A reference here would keep the old ones
            # in memory.
            self.staged = {}

    def complete(self) -> None:
        """Check the tensors; there are no copies to complete.

        Raises CheckpointError for a NaN in any tensor, or an infinity in a trained weight.
        """
        refuse_nan(self.staged, self.model)

    def write(self, folder: Path) -> list[str]:
        """Write the tensors and return the names of this rank's files; collective.

        An error on any rank is raised on all of them.
        """
        return write_tensors(folder, self.staged, self.group)

    def wait_until_staged(self) -> None:
        """Do nothing, since no save is in flight."""

    def settle(self) -> None:
        """Do nothing, since no save is in flight."""

    def close(self) -> None:
        """Do nothing, since nothing runs in the background."""


def write_tensors(folder: Path, tensors: Tensors, group: Group) -> list[str]:
    """Write all tensors into one file, on rank 0; return the names of this rank's files.

    Collective; an error on any rank is raised on all of them.
    """
    gathered: Tensors = {}
    error: Exception | None = None
    for name, tensor in tensors.items():
        # Tensors are gathered one by one, so that only rank 0 has all of them in memory. After an
        # error this rank keeps gathering, since the other ranks wait for it in each gathering. It
        # raises the error below.
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
