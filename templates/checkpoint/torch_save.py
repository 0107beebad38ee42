"""Checkpoints as one `torch.save` file, gathered on rank 0 while training waits.

The simplest thing to open elsewhere: `torch.load("state.pt")["model"]`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..distributed import Group, parallel
from ..files import naming
from . import WHOLE_FILE
from .paths import Place
from .publish import Write
from .storage import StorageConfig
from .tensors import Tensors, nested, refuse_nan


@dataclass(frozen=True)
class CheckpointConfig(StorageConfig):
    """Saved whole, by rank 0."""


class Writer:
    """Saves in the loop; every rank continues when the checkpoint is published."""

    staged_bytes = 0
    failed = False

    def __init__(
        self, config: CheckpointConfig, group: Group, model: nn.Module, device: torch.device
    ) -> None:
        self.group, self.model = group, model

    def save(self, tensors: Tensors, publish: Callable[[Write], object]) -> None:
        """Save the tensors; `publish` publishes what the function given to it writes."""
        self.group.agree(lambda: refuse_nan(tensors, self.model))
        publish(lambda folder: write_tensors(folder, tensors, self.group))

    def before_optimizer_step(self, tensors: Callable[[], Tensors]) -> None:
        """Nothing to wait for."""

    def settle(self) -> None:
        """Nothing is in flight after a save that waits."""

    def close(self) -> None:
        """Nothing runs in the background."""


def write_tensors(folder: Place, tensors: Tensors, group: Group) -> list[str]:
    """Write all tensors into one file, on rank 0; the names of this rank's files."""
    gathered: Tensors = {}
    for name, tensor in tensors.items():  # one by one: whole tensors are in memory on rank 0 only
        whole = parallel.full_tensor(tensor)
        if group.rank == 0:
            gathered[name] = whole.cpu()
    if group.rank != 0:
        return []
    path = folder / WHOLE_FILE
    with naming(path), path.open("wb") as file:
        torch.save(nested(gathered), file)
    return [WHOLE_FILE]
