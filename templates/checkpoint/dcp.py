"""Checkpoints by torch.distributed.checkpoint, every rank its part, while training waits.

They load into any number of ranks. How a checkpoint is published is told in checkpoint/publish.py,
how it is read in checkpoint/reader.py.
"""

from dataclasses import dataclass

from ..distributed.parallel import agree_on_buffers
from .checkpointer import Recovery, share_of
from .publish import RetentionConfig
from .writing import write_shards


@dataclass(frozen=True)
class CheckpointConfig(RetentionConfig):
    """Saved in parts, by all ranks at once."""

    threads: int = 1
    """Files that each rank writes in parallel."""


class Checkpointer(Recovery):
    """Saves in the loop; every rank goes on when the checkpoint is published."""

    def _save(self, step: int, validation_loss: float | None) -> None:
        agree_on_buffers(self.model, self.world)
        part = share_of(self.tensors(), self.world.rank, self.world.size)
        threads = self.snapshots.retention.threads
        self.publish(
            step,
            lambda folder: write_shards(folder, part, self.group, threads),
            part,
            validation_loss,
        )
        self.last_saved = step
