"""Checkpoints as one `torch.save` file, gathered on rank 0 while training waits.

The simplest thing to open elsewhere: `torch.load("state.pt")["model"]`. How a checkpoint is
published is told in checkpoint/publish.py, how it is read in checkpoint/reader.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.tensor import DTensor

from ..distributed.parallel import agree_on_buffers
from .checkpointer import Recovery
from .publish import RetentionConfig
from .reader import WHOLE_FILE, Tensors
from .writing import write_whole


@dataclass(frozen=True)
class CheckpointConfig(RetentionConfig):
    """Saved whole, by rank 0."""


class Checkpointer(Recovery):
    """Saves in the loop; every rank goes on when the checkpoint is published."""

    def _save(self, step: int, validation_loss: float | None) -> None:
        agree_on_buffers(self.model, self.world)

        def write(directory: Path) -> list[str]:
            gathered = dict(self._gather(self.tensors()))
            if self.world.rank != 0:
                return []
            write_whole(directory / WHOLE_FILE, gathered)
            return [WHOLE_FILE]

        self.publish(step, write, self.tensors(), validation_loss)
        self.last_saved = step

    def _gather(self, tree: Tensors) -> Iterator[tuple[str, object]]:
        """Whole tensors in host memory on rank 0, one after the other; None on the other ranks."""
        for key, value in tree.items():
            if isinstance(value, dict):
                yield key, dict(self._gather(value))
                continue
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            yield key, whole.cpu() if self.world.rank == 0 else None
