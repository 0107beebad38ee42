"""Checkpoints by torch.distributed.checkpoint (DCP): each rank writes its part.

Training continues. Staging copies this rank's part into host buffers; it overlaps with the
next forward and backward, which only read parameters, and must be over before the optimizer changes
them. A thread then writes, hashes and publishes, over a process group of its own. One save is in
flight at a time; a failure waits in `failed` until the loop's control word has carried it to every
rank.

Added here to DCP's own `save`: an even division of what several ranks hold alike, errors of writer
threads, which DCP loses, and a cache of plans for each run, where DCP keeps one for the process.
"""

import contextlib
import io
import logging
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
    """Saved in parts, by all ranks at once, while training continues."""

    threads: int = 0
    """Files that each rank writes at a time (0: one for each 32 MB, up to 4)"""


log = logging.getLogger(__name__)
LONG = 1.0  # seconds of waiting that are worth a warning
# numpy does not know every dtype, but only bits are moved.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Writer:
    """Saves in the background; `save` returns before the checkpoint is published.

    The host buffers (pinned for CUDA) are allocated in the second step and live as long as the
    run: the first touch of fresh memory costs fifty times the copy. On a CPU the thread copies; on
    CUDA the copies are queued at once, on a stream of their own.
    """

    def __init__(
        self, config: CheckpointConfig, group: Group, model: nn.Module, device: torch.device
    ) -> None:
        self.group, self.model, self.device = group, model, device
        self.saver = DcpSaver(group, config.threads)
        self.buffers: Tensors = {}
        self.prepared = False
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.event: torch.Event | None = None
        self.staged: Future[None] | None = None
        self.writing: Future[None] | None = None
        self.waited, self.warned = 0.0, False  # for the save before, in seconds
        # Without this the thread would work on GPU 0.
        begin = (lambda: torch.cuda.set_device(device)) if self.stream else None
        self.thread = ThreadPoolExecutor(1, "checkpoint", begin)

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed, as far as this rank knows by now."""
        return bool(self.writing and self.writing.done() and self.writing.exception())

    @property
    def staged_bytes(self) -> int:
        """What the host buffers take."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def save(self, tensors: Tensors, publish: Callable[[Write], object]) -> None:
        """Start to save the tensors; `publish` publishes what the function given to it writes."""
        if self.waited > LONG and self.group.rank == 0 and not self.warned:
            self.warned = True  # once: metrics.jsonl has it each time
            text = "training waited %.1f s for the save before to end: raise --checkpoint.every"
            log.warning(text, self.waited)
        copies, copy = self._stage(share_of(tensors, self.group.rank, self.group.size))
        staged = self.staged = self.thread.submit(copy)

        def complete() -> None:
            staged.result()
            if self.event is not None:
                self.event.synchronize()
            refuse_nan(copies, self.model)

        def write() -> None:
            self.group.agree(complete)  # before DCP's collectives, where a missing rank would hang
            publish(lambda folder: self.saver.write(folder, copies))

        self.writing = self.thread.submit(write)

    def before_optimizer_step(self, tensors: Callable[[], Tensors]) -> None:
        """Wait until the tensors may change; `tensors` gives all that will be saved, or {} yet."""
        if not self.prepared and (known := tensors()):
            self.prepared = True
            part = share_of(known, self.group.rank, self.group.size)
            likes = {name: parallel.local_part(value) for name, value in part.items()}
            self.buffers = self.buffers or in_blocks(likes, pinned=bool(self.stream))
        if self.staged is not None:
            self.staged.exception()  # raised by `write`
            if self.event is not None:  # holds back what the device does next, not the host
                torch.cuda.current_stream(self.device).wait_event(self.event)
            self.staged = None

    def settle(self) -> None:
        """Wait for the save in flight; raises what it raised."""
        if self.writing is not None:
            writing, self.writing, self.staged = self.writing, None, None
            started = time.perf_counter()
            writing.result()
            self.waited = time.perf_counter() - started

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown()

    def _stage(self, part: Tensors) -> tuple[Tensors, Callable[[], None]]:
        """Copies of `part`, of which some are complete only after the returned function.

        The model's buffers are copied at once, since the next forward changes them.
        """
        parameters = {f"model.{name}" for name, _ in self.model.named_parameters()}
        copies: Tensors = {}
        targets, sources = [], []
        forms = {name: (buffer.shape, buffer.dtype) for name, buffer in self.buffers.items()}
        likes = {name: parallel.local_part(value).detach() for name, value in part.items()}
        if new := {n: t for n, t in likes.items() if forms.get(n) != (t.shape, t.dtype)}:
            self.buffers |= in_blocks(new, pinned=bool(self.stream))
        for name, source in likes.items():
            buffer = self.buffers[name]
            if name.startswith("model.") and name not in parameters:
                # On CUDA in the order of the current stream, hence before the next forward.
                buffer.copy_(source, non_blocking=bool(self.stream))
            else:
                targets.append(buffer)
                sources.append(source)
            copies[name] = parallel.with_local_part(part[name], buffer)

        def copy_on_one_core() -> None:
            # By numpy, which takes one thread and releases Python's lock. A torch copy on a second
            # thread would start a second pool of OpenMP threads; with more of them than cores,
            # every later step of training is slower (by a third on two cores).
            for target, source in zip(targets, sources, strict=True):
                kind = BITS[source.itemsize]
                target.view(kind).numpy()[...] = source.view(kind).numpy()

        if self.device.type == "cpu":
            return copies, copy_on_one_core
        if self.stream is None:  # a device without streams to order a second thread by
            torch._foreach_copy_(targets, sources)
            return copies, lambda: None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            self.event = self.stream.record_event()
        return copies, lambda: None


def in_blocks(tensors: Tensors, pinned: bool) -> Tensors:
    """Host tensors like these, in a few blocks of memory; the allocation of each takes long.

    The pinned allocator rounds up to powers of two, so blocks have such sizes.
    """
    parts: Tensors = {}
    left = sorted(tensors.items(), key=lambda item: -item[1].nbytes)
    while left:
        most = sum(tensor.nbytes + 64 for _, tensor in left)
        bits = max(20, most.bit_length() - 1, (left[0][1].nbytes - 1).bit_length())
        block = torch.empty(1 << bits, dtype=torch.uint8, pin_memory=pinned)
        place, later = 0, []
        for name, like in left:
            if place + like.nbytes > block.nbytes:
                later.append((name, like))
            else:
                parts[name] = part_of(block, place, like)
                place += -(-like.nbytes // 64) * 64
        left = later
    return parts


def part_of(block: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor like `like` in a block of bytes, by numpy with a storage of its own size.

    DCP would first copy one that is only a part of a storage.
    """
    part = torch.from_numpy(block.numpy()[place : place + like.nbytes])
    return part.view(like.dtype).view(like.shape)


# {% include "checkpoint/dcp_saver.py" %}
