"""Checkpoints by torch.distributed.checkpoint (DCP): each rank writes its part.

Training waits meanwhile.

Added here to DCP's own `save`: an even division of what several ranks hold alike, errors of writer
threads, which DCP loses, and a cache of plans for each run, where DCP keeps one for the process.
"""

import contextlib
import io
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from ..distributed import Group, parallel
from ..files import naming
from . import DCP_INDEX, CheckpointError
from .publish import Write
from .storage import StorageConfig
from .tensors import Tensors, nested, refuse_nan


@dataclass(frozen=True)
class CheckpointConfig(StorageConfig):
    """Saved in parts, by all ranks at once."""

    threads: int = 0
    """Files that each rank writes at a time (0: one for each 32 MB, up to 4)"""


class Writer:
    """Saves in the loop; every rank continues when the checkpoint is published."""

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

    def before_optimizer_step(self, tensors: Callable[[], Tensors]) -> None:
        """Nothing to wait for."""

    def settle(self) -> None:
        """Nothing is in flight after a save that waits."""

    def close(self) -> None:
        """Nothing runs in the background."""


# {% include "checkpoint/dcp_saver.py" %}
