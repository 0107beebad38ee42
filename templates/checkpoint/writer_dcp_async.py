"""Write sharded checkpoints with torch.distributed.checkpoint (DCP) in the background.

A save first copies this rank's tensors into host buffers (staging.py). The copies overlap with the
next forward and backward, which only read the parameters. Before the optimizer changes parameters,
it waits for the copies. A thread then writes and hashes the files and publishes the checkpoint,
using its own process group. Only one save is in flight at a time.

A save that fails on one rank fails on all of them, but their threads may notice at different steps.
So the training loop passes `failed` to `Stop.poll`, which sends it to all ranks. After the same
step, all of them call `settle`, which raises the error.
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
    """Return the smallest --checkpoint.every with which training would not have waited for a save.

    The save took `seconds`. Training made `steps` steps after the save began, and then waited for
    `waited` seconds until the save was published.
    """
    # The divisor below must not be zero.
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
        # The staged tensors of the current or last save.
        self.staged: Tensors = {}
        # The future of `buffers.finish`, which completes the copies in the thread.
        self.copied: Future[None] | None = None
        # Whether the optimizer must still wait for the copies; it waits once per save.
        self.must_wait = False
        # The future of the save in flight, which runs in the thread; None if there is none.
        self.writing: Future[None] | None = None
        # Seconds that training waited for the last save.
        self.waited = 0.0
        # Whether a warning about a long wait was logged.
        self.warned = False
        # When the last save began, and its step.
        self.began = time.perf_counter()
        self.step = 0
        # A single thread, so the jobs run one after another, in the order of submission.
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
        """Allocate this rank's buffers ahead of the first save, since allocating is slow."""
        self.prepared = True
        self.buffers.allocate(divided(tensors, self.group))

    def begin(self, tensors: Tensors, job: Job, step: int, facts: dict[str, Any]) -> None:
        """Start copying the tensors, then run `job(step, facts)` in the thread.

        The job calls `complete` and `write`. The caller must first call `settle`, so that no other
        save is in flight.
        """
        now = time.perf_counter()
        if self.waited > LONG_WAIT and self.group.is_first and not self.warned:
            long_enough = steps_of_a_save(step - self.step, now - self.began, self.waited)
            # Do not warn if --checkpoint.every is long enough already. Then this save came early,
            # such as the last save of a run. With --checkpoint.every 0 there is no interval.
            if self.every > 0 and long_enough > self.every:
                # Warn once per run; metrics.jsonl has each wait.
                self.warned = True
                text = (
                    "training waited %.1f s for the previous save: raise --checkpoint.every to %d "
                    "or more"
                )
                log.warning(text, self.waited, long_enough)
        self.began = now
        self.step = step
        # `copy` allocates the buffers that are missing, so `prepare` is not needed any more.
        self.prepared = True
        self.staged = self.buffers.copy(divided(tensors, self.group))
        self.copied = self.thread.submit(self.buffers.finish)
        self.must_wait = True
        self.writing = self.thread.submit(job, step, facts)

    def complete(self) -> None:
        """Check the completed copies, in the thread.

        Raises the error of a failed copy, or CheckpointError for a NaN in any tensor or an infinity
        in a trained weight.
        """
        if self.copied is not None:
            # This raises an error of `buffers.finish`. It does not wait, since the thread ran
            # `buffers.finish` before this job.
            self.copied.result()
        refuse_nan(self.staged, self.model)

    def write(self, folder: Path) -> list[str]:
        """Write the copies and return the names of this rank's files; collective.

        An error on any rank is raised on all of them.
        """
        return self.saver.write(folder, self.staged)

    def wait_until_staged(self) -> None:
        """Make the next optimizer step wait for the copies.

        With CUDA the device waits; otherwise this call waits.
        """
        if not self.must_wait:
            return
        self.must_wait = False
        if self.buffers.event is not None:
            # The device waits for the copies before its next work; the host does not wait.
            torch.cuda.current_stream(self.device).wait_event(self.buffers.event)
        elif self.copied is not None:
            # `exception` only waits. If a copy failed, `complete` raises the error, in the thread.
            self.copied.exception()

    def settle(self) -> None:
        """Wait for the save in flight, and raise its error if it failed; sets `waited`."""
        if self.writing is None:
            return
        # The copies end before the save, so the wait below covers them.
        self.must_wait = False
        started = time.perf_counter()
        # If Ctrl-C interrupts this wait, the save is still in flight, so `writing` is kept.
        error = self.writing.exception()
        self.waited = time.perf_counter() - started
        self.writing = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait until the thread has done its work, and stop it."""
        self.thread.shutdown()
