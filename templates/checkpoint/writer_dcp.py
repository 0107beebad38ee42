"""Write sharded checkpoints with torch.distributed.checkpoint (DCP) while training waits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed import Group
from .dcp import DcpSaver, divided
from .dcp import write_tensors as write_tensors
from .storage import StorageConfig
from .tensors import Job, Tensors, refuse_nan


@dataclass(frozen=True)
class CheckpointConfig(StorageConfig):
    """Settings of sharded checkpoints, which all ranks write at once."""

    threads: int = 0
    """Files that each rank writes in parallel (0: one per 32 MB, up to 4)."""


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
        # The tensors that this rank writes during a save; otherwise {}.
        self.staged: Tensors = {}
        self.saver = DcpSaver(group, config.threads)

    def prepare(self, tensors: Tensors) -> None:
        """Do nothing, since there are no buffers to allocate."""

    def begin(self, tensors: Tensors, job: Job, step: int, facts: dict[str, Any]) -> None:
        """Run `job(step, facts)`, which calls `complete` and `write`, while training waits."""
        self.staged = divided(tensors, self.group)
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
        return self.saver.write(folder, self.staged)

    def wait_until_staged(self) -> None:
        """Do nothing, since `begin` has completed the save."""

    def settle(self) -> None:
        """Do nothing, since `begin` has completed the save."""

    def close(self) -> None:
        """Do nothing, since nothing runs in the background."""
