"""Checkpoints by torch.distributed.checkpoint (DCP): each rank writes its part; training continues.

A save first copies this rank's part into host buffers (staging.py). That overlaps with the next
forward and backward, which only read parameters, and must be over before the optimizer changes
them. A thread then writes, hashes and publishes, over a process group of its own. One save is in
flight at a time; a failure waits in `failed` until the loop's control word has carried it to every
rank.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed import Group
from .dcp import DcpSaver, divided
from .dcp import write_tensors as write_tensors
from .staging import HostBuffers
from .storage import StorageConfig
from .tensors import Tensors, refuse_nan


@dataclass(frozen=True)
class CheckpointConfig(StorageConfig):
    """Saved in parts, by all ranks at once, while training continues."""

    threads: int = 0
    """Files that each rank writes at a time (0: one for each 32 MB, up to 4)"""


log = logging.getLogger(__name__)
LONG = 1.0  # seconds of waiting that are worth a warning


class Writer:
    """Saves in the background; `begin` returns before the checkpoint is published."""

    def __init__(
        self, config: CheckpointConfig, group: Group, model: nn.Module, device: torch.device
    ) -> None:
        self.group, self.model, self.device = group, model, device
        self.saver = DcpSaver(group, config.threads)
        self.buffers = HostBuffers(model, device)
        self.prepared = False
        self.staged: Tensors = {}
        self.copied: Future[None] | None = None  # of the save in flight, or of the last one
        # From `begin` until the optimizer has waited once.
        self.must_wait = False
        self.writing: Future[None] | None = None
        self.waited, self.warned = 0.0, False  # for the save before, in seconds
        self.thread = ThreadPoolExecutor(1, "checkpoint", self.buffers.begin_thread)

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed, as far as this rank knows by now."""
        return bool(self.writing and self.writing.done() and self.writing.exception())

    @property
    def staged_bytes(self) -> int:
        """What the host buffers take."""
        return self.buffers.size

    def prepare(self, tensors: Tensors) -> None:
        """Allocate the buffers for what this rank will write, which takes long, before a save."""
        self.prepared = True
        self.buffers.allocate(divided(tensors, self.group))

    def begin(self, tensors: Tensors, job: Callable[..., None], *arguments: Any) -> None:
        """Begin to copy the tensors; then do the job, which calls `complete` and `write`."""
        if self.waited > LONG and self.group.is_first and not self.warned:
            self.warned = True  # once: metrics.jsonl has it each time
            text = "training waited %.1f s for the save before to end: raise --checkpoint.every"
            log.warning(text, self.waited)
        self.staged = self.buffers.copy(divided(tensors, self.group))
        self.copied = self.thread.submit(self.buffers.finish)
        self.must_wait = True
        self.writing = self.thread.submit(job, *arguments)

    def complete(self) -> None:
        """Wait until the copies are whole, and check them; CheckpointError for a NaN."""
        if self.copied is not None:
            self.copied.result()
        refuse_nan(self.staged, self.model)

    def write(self, folder: Path) -> list[str]:
        """Write the copies; the names of this rank's files. Collective."""
        return self.saver.write(folder, self.staged)

    def wait_until_staged(self) -> None:
        """Wait until the optimizer may change the tensors."""
        if not self.must_wait:
            return
        self.must_wait = False
        if self.buffers.event is not None:
            # What the device does next waits for the copies; the host does not.
            torch.cuda.current_stream(self.device).wait_event(self.buffers.event)
        elif self.copied is not None:
            self.copied.exception()  # waits; `complete` raises it

    def settle(self) -> None:
        """Wait for the save in flight; raises what it raised."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            self.must_wait = False
            started = time.perf_counter()
            writing.result()
            self.waited = time.perf_counter() - started

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown()
