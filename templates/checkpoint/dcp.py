"""Checkpoints by torch.distributed.checkpoint, every rank its part, while training waits.

Loads into any number of ranks. How a checkpoint is published and verified is told in
engine/snapshots.py, how it is read in engine/state.py.
"""

import time
from dataclasses import dataclass

from .engine.snapshots import RetentionConfig
from .engine.state import Recovery, agree_on_buffers, share_of, write_shards


@dataclass(frozen=True)
class CheckpointConfig(RetentionConfig):
    """Saved in shards, by all ranks at once."""

    threads: int = 1
    """Files that each rank writes in parallel."""


class Checkpointer(Recovery):
    """Saves in the loop; every rank returns when the checkpoint is published."""

    failed = False  # a failed save raises at once, on every rank

    def save(self, step: int, validation_loss: float | None = None) -> None:
        """Publish a checkpoint of `step`; SnapshotError, on every rank, when any rank failed."""
        if step == self.last_saved:
            return
        started = time.perf_counter()
        agree_on_buffers(self.model, self.world)
        part = share_of(self.tensors(), self.world.rank, self.world.size)
        threads = self.snapshots.retention.threads
        try:
            self.publish(
                step,
                lambda directory: write_shards(directory, part, self.group, threads),
                validation_loss,
            )
            self.last_saved = step
        finally:
            self.blocked_seconds += time.perf_counter() - started

    def before_optimizer_step(self) -> None:
        """Nothing is in flight between steps."""

    def settle(self) -> None:
        """Nothing is in flight after a save."""

    def close(self) -> None:
        """Nothing is left to stop."""
