"""Checkpoints by torch.distributed.checkpoint, every rank its part, while training waits.

They load into any number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..distributed import Group
from .dcp_writer import DcpSaver, share_of, write_tensors
from .publish import Write
from .storage import StorageConfig
from .tensors import Tensors, refuse_nan

__all__ = ["CheckpointConfig", "Writer", "write_tensors"]


@dataclass(frozen=True)
class CheckpointConfig(StorageConfig):
    """Saved in parts, by all ranks at once."""

    threads: int = 0
    """Files that each rank writes at a time (0: one for each 32 MB, up to 4)"""


class Writer:
    """Saves in the loop; every rank goes on when the checkpoint is published."""

    stages = False
    staged_bytes = 0
    failed = False

    def __init__(
        self, config: CheckpointConfig, group: Group, model: nn.Module, device: torch.device
    ) -> None:
        self.group, self.model = group, model
        self.saver = DcpSaver(group, config.threads)

    def save(self, tensors: Tensors, publish: Callable[[Write], object]) -> None:
        """Save the tensors; `publish` publishes what the function given to it writes."""
        part = share_of(tensors, self.group.rank, self.group.size)
        self.group.agree(lambda: refuse_nan(part, self.model))
        publish(lambda folder: self.saver.write(folder, part))

    def before_optimizer_step(self) -> None:
        """Nothing to wait for."""

    def settle(self) -> None:
        """Nothing is in flight after a save that waits."""

    def close(self) -> None:
        """Nothing runs in the background."""
