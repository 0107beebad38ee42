"""Checkpoints as one `torch.save` file, gathered on rank 0 while training waits.

The simplest thing to open elsewhere: `torch.load("state.pt")["model"]`. How a checkpoint is
published and verified is told in engine/snapshots.py, how it is read in engine/state.py.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from .engine.snapshots import RetentionConfig
from .engine.state import WHOLE_FILE, Recovery, Tensors, agree_on_buffers


@dataclass(frozen=True)
class CheckpointConfig(RetentionConfig):
    """Saved whole, by rank 0."""


class Checkpointer(Recovery):
    """Saves in the loop; every rank returns when the checkpoint is published."""

    failed = False  # a failed save raises at once, on every rank

    def save(self, step: int, validation_loss: float | None = None) -> None:
        """Publish a checkpoint of `step`; SnapshotError, on every rank, when any rank failed."""
        if step == self.last_saved:
            return
        started = time.perf_counter()
        agree_on_buffers(self.model, self.world)

        def write(directory: Path) -> list[str]:
            gathered = dict(self._gather(self.tensors()))
            if self.world.rank != 0:
                return []
            torch.save(gathered, directory / WHOLE_FILE)
            return [WHOLE_FILE]

        try:
            self.publish(step, write, validation_loss)
            self.last_saved = step
        finally:
            self.blocked_seconds += time.perf_counter() - started

    def before_optimizer_step(self) -> None:
        """Nothing is in flight between steps."""

    def settle(self) -> None:
        """Nothing is in flight after a save."""

    def close(self) -> None:
        """Nothing is left to stop."""

    def _gather(self, tree: Tensors) -> Iterator[tuple[str, object]]:
        """Whole tensors in host memory on rank 0, one after the other; None on the other ranks."""
        for key, value in tree.items():
            if isinstance(value, dict):
                yield key, dict(self._gather(value))
                continue
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            yield key, whole.cpu() if self.world.rank == 0 else None
