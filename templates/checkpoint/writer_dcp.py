"""Checkpoints by torch.distributed.checkpoint (DCP): each rank writes its part; training waits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed import Group
from .dcp import DcpSaver, divided
from .dcp import write_tensors as write_tensors
from .storage import StorageConfig
from .tensors import Tensors, refuse_nan


@dataclass(frozen=True)
class CheckpointConfig(StorageConfig):
    """Saved in parts, by all ranks at once."""

    threads: int = 0
    """Files that each rank writes at a time (0: one for each 32 MB, up to 4)"""


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
        self.saver = DcpSaver(group, config.threads)

    def prepare(self, tensors: Tensors) -> None:
        """There are no buffers to allocate."""

    def begin(self, tensors: Tensors, job: Callable[..., None], *arguments: Any) -> None:
        """Do the job, which calls `complete` and `write`, while training waits."""
        self.staged = divided(tensors, self.group)
        try:
            job(*arguments)
        finally:
            self.staged = {}  # an optimizer may replace its tensors, and these would stay

    def complete(self) -> None:
        """Check what is to be written; CheckpointError for a NaN."""
        refuse_nan(self.staged, self.model)

    def write(self, folder: Path) -> list[str]:
        """Write the tensors; the names of this rank's files. Collective."""
        return self.saver.write(folder, self.staged)

    def wait_until_staged(self) -> None:
        """Nothing to wait for."""

    def settle(self) -> None:
        """Nothing is in flight after a save that waits."""

    def close(self) -> None:
        """Nothing runs in the background."""
