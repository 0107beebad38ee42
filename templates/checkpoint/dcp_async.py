"""Checkpoints by torch.distributed.checkpoint, written while training goes on.

Staging copies this rank's part into host buffers; it overlaps with the next forward and backward,
which only read parameters, and must be over before the optimizer changes them. A thread then
writes, hashes and publishes, over a process group of its own. One save is in flight at a time; a
failure waits in `failed` until the loop's control word has carried it to every rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..distributed import Group
from .background import Background
from .parts import write_tensors
from .publish import Write
from .storage import StorageConfig
from .tensors import Tensors, refuse_nan, share_of

__all__ = ["CheckpointConfig", "Writer", "write_tensors"]


@dataclass(frozen=True)
class CheckpointConfig(StorageConfig):
    """Saved in parts, by all ranks at once, while training goes on."""

    threads: int = 1
    """Files that each rank writes in parallel."""


class Writer:
    """Saves in the background; `save` returns before the checkpoint is published."""

    stages = True

    def __init__(
        self, config: CheckpointConfig, group: Group, model: nn.Module, device: torch.device
    ) -> None:
        self.config, self.group, self.model = config, group, model
        self.background = Background(device)
        self.before_optimizer_step = self.background.wait_for_copies
        self.settle, self.close = self.background.settle, self.background.close

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed, as far as this rank knows by now."""
        return self.background.failed

    def save(self, tensors: Tensors, publish: Callable[[Write], object]) -> None:
        """Start to save the tensors; `publish` publishes what the function given to it writes."""
        part = share_of(tensors, self.group.rank, self.group.size)
        parameters = {name for name, _ in self.model.named_parameters()}

        def write_and_publish(copies: Tensors, complete: Callable[[], None]) -> None:
            def stage() -> None:
                complete()
                refuse_nan(copies, self.model)

            self.group.agree(stage)  # before DCP's own collectives, where a missing rank would hang
            publish(lambda folder: write_tensors(folder, copies, self.group, self.config.threads))

        self.background.start(part, parameters, write_and_publish)
