"""Write sharded checkpoints with torch.distributed.checkpoint (DCP) in the background.

A save first copies this rank's tensors into host buffers (staging.py). The copies overlap with the
next forward and backward, which only read parameters, and end before the optimizer changes them. A
thread then writes, hashes and publishes, using its own process group. Only one save is in flight at
a time. A save that fails on one rank fails on all of them. The loop sees `failed` and sends it to
all ranks with the flags of `Stop.poll`; then all of them call `settle`, which raises the error.
"""

import logging
import math
import time
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
from .tensors import Job, Tensors, refuse_nan

log = logging.getLogger(__name__)
# Warn if training waits longer than this for a save (seconds).
LONG_WAIT = 1.0


@dataclass(frozen=True)
class CheckpointConfig(StorageConfig):
    """Settings of sharded checkpoints, which all ranks write at once while training continues."""

    threads: int = 0
    """Files that each rank writes in parallel (0: one per 32 MB, up to 4)."""


def steps_of_a_save(steps: int, seconds: float, waited: float) -> int:
    """Return how many training steps take as long as a save that made training wait.

    The save took `seconds`, since the next one starts when it is published. In this time `steps`
    steps were trained, and training waited for `waited` seconds.
    """
    training = max(seconds - waited, 1e-3)
    return math.ceil(steps * seconds / training)


class Writer:
    """Saves in the background; `begin` returns before the checkpoint is published."""

    def __init__(
        self, config: CheckpointConfig, group: Group, model: nn.Module, device: torch.device
    ) -> None:
        self.group = group
        self.every = config.every
        self.model = model
        self.device = device
        self.saver = DcpSaver(group, config.threads)
        self.buffers = HostBuffers(model, device)
        # Whether the buffers are allocated.
        self.prepared = False
        # The staged tensors of the current or last save, and the result of `buffers.finish`, which
        # completes their copies.
        self.staged: Tensors = {}
        self.copied: Future[None] | None = None
        # Whether the optimizer must still wait for the copies; it waits once per save.
        self.must_wait = False
        # The save in flight.
        self.writing: Future[None] | None = None
        # Seconds that training waited for the last save, and whether a warning was logged.
        self.waited = 0.0
        self.warned = False
        # The start of the last save, and its step.
        self.began = time.perf_counter()
        self.step = 0
        self.thread = ThreadPoolExecutor(1, "checkpoint", self.buffers.begin_thread)

    @property
    def failed(self) -> bool:
        """Return whether the save in flight is known to have failed on this rank."""
        if self.writing is None or not self.writing.done():
            return False
        return self.writing.exception() is not None

    @property
    def staged_bytes(self) -> int:
        """Return the bytes of the host buffers."""
        return self.buffers.size

    def prepare(self, tensors: Tensors) -> None:
        """Allocate this rank's buffers before the first save, since that is slow."""
        self.prepared = True
        self.buffers.allocate(divided(tensors, self.group))

    def begin(self, tensors: Tensors, job: Job, step: int, facts: dict[str, Any]) -> None:
        """Start copying the tensors, then run `job(step, facts)` in the thread.

        The job calls `complete` and `write`. `settle` must have returned before.
        """
        now = time.perf_counter()
        if self.waited > LONG_WAIT and self.group.is_first and not self.warned:
            every = steps_of_a_save(step - self.step, now - self.began, self.waited)
            # The last save of a run may come early: then the interval is long enough.
            if every > self.every > 0:
                # Warn once per run; metrics.jsonl has each wait.
                self.warned = True
                text = (
                    "training waited %.1f s for the previous save: raise --checkpoint.every to %d "
                    "or more"
                )
                log.warning(text, self.waited, every)
        self.began = now
        self.step = step
        # `copy` allocates the buffers that are missing, so that `prepare` need not be called.
        self.prepared = True
        self.staged = self.buffers.copy(divided(tensors, self.group))
        self.copied = self.thread.submit(self.buffers.finish)
        self.must_wait = True
        self.writing = self.thread.submit(job, step, facts)

    def complete(self) -> None:
        """Wait until the copies are complete, and check them.

        Raises CheckpointError for a NaN, or for an infinity in a trained weight.
        """
        if self.copied is not None:
            self.copied.result()
        refuse_nan(self.staged, self.model)

    def write(self, folder: Path) -> list[str]:
        """Write the copies and return the names of this rank's files; collective."""
        return self.saver.write(folder, self.staged)

    def wait_until_staged(self) -> None:
        """Let the optimizer's next step wait for the copies: on the device with CUDA, else here."""
        if not self.must_wait:
            return
        self.must_wait = False
        if self.buffers.event is not None:
            # The device waits for the copies before its next work; the host does not wait.
            torch.cuda.current_stream(self.device).wait_event(self.buffers.event)
        elif self.copied is not None:
            # This only waits. If the copies failed, `complete` raises the error, in the thread.
            self.copied.exception()

    def settle(self) -> None:
        """Wait for the save in flight, and raise its error if it failed; sets `waited`."""
        if self.writing is not None:
            writing = self.writing
            self.writing = None
            self.must_wait = False
            started = time.perf_counter()
            writing.result()
            self.waited = time.perf_counter() - started

    def close(self) -> None:
        """Wait until the thread has done its work, and stop it."""
        self.thread.shutdown()
