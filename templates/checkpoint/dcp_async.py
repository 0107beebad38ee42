"""Checkpoints by torch.distributed.checkpoint, written while training goes on.

Staging copies this rank's part into host buffers; it overlaps with the next forward and backward,
which only read parameters, and must be over before the optimizer changes them. The upload (write,
hash, publish) runs on a thread and a process group of its own. One save is in flight at a time; a
failure waits in `failed` until the loop's control word has carried it to every rank. How it is
published is told in engine/snapshots.py, how it is read in engine/reading.py.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .engine.metrics import warn_if_host_memory_is_short
from .engine.reading import walk
from .engine.snapshots import RetentionConfig
from .engine.state import (
    Recovery,
    Tensors,
    agree_on_buffers,
    copy_on_one_core,
    local_part,
    model_tensors,
    nest,
    share_of,
    write_shards,
)


@dataclass(frozen=True)
class CheckpointConfig(RetentionConfig):
    """Saved in shards, by all ranks at once, behind the back of training."""

    threads: int = 1
    """Files that each rank writes in parallel."""


class Checkpointer(Recovery):
    """Saves behind training; `save` returns before the checkpoint is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        part = share_of({"model": model_tensors(self.model)}, self.world.rank, self.world.size)
        weights = sum(local_part(tensor).nbytes for _, tensor in walk(part))
        warn_if_host_memory_is_short(3 * weights)  # AdamW keeps two moments beside each weight
        self.stager = Stager(self.world.device)
        cuda = self.world.device.type == "cuda"  # a new thread would start on GPU 0
        self.uploader = ThreadPoolExecutor(
            1,
            thread_name_prefix="checkpoint",
            initializer=torch.cuda.set_device if cuda else None,
            initargs=(self.world.device,) if cuda else (),
        )
        self.upload: Future[None] | None = None
        self.staged: threading.Event | None = None

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed, as far as this rank knows by now."""
        return bool(self.upload and self.upload.done() and self.upload.exception())

    def before_optimizer_step(self) -> None:
        """Wait until the parameters and the optimizer's state have been copied."""
        if self.staged is not None:
            started = time.perf_counter()
            self.staged.wait()
            self.stager.hold_back_current_stream()
            self.staged = None
            self.blocked_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Wait until the last checkpoint is published, and stop the uploading thread."""
        try:
            super().close()
        finally:
            self.uploader.shutdown()

    def _save(self, step: int, validation_loss: float | None) -> None:
        agree_on_buffers(self.model, self.world)
        part = share_of(self.tensors(), self.world.rank, self.world.size)
        parameters = {name for name, _ in self.model.named_parameters()}
        copies, copy = self.stager.begin(part, parameters)
        self.staged = threading.Event()
        self.upload = self.uploader.submit(
            self._upload, step, copies, copy, self.staged, validation_loss
        )
        self.last_saved = step

    def _settle(self) -> None:
        if self.upload is not None:
            upload, self.upload, self.staged = self.upload, None, None
            try:
                upload.result()
            except BaseException:
                self.last_saved = None
                raise

    def _upload(
        self,
        step: int,
        copies: Tensors,
        copy: Callable[[], None],
        staged: threading.Event,
        validation_loss: float | None,
    ) -> None:
        def stage() -> None:
            try:
                copy()
            finally:
                staged.set()
            self.stager.wait()

        def write(directory: Path) -> list[str]:
            threads = self.snapshots.retention.threads
            return write_shards(directory, copies, self.group, threads)

        self.group.agree(stage)  # before DCP's own collectives, where a missing rank would hang
        self.publish(step, write, validation_loss)


class Stager:
    """Copies tensors into host buffers that live as long as the run (pinned for CUDA).

    Kept, because the first touch of fresh memory costs fifty times the copy. On a CPU the copying
    is done by the uploading thread; on CUDA it is queued on a stream of its own at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[tuple[str, ...], torch.Tensor] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.event: torch.cuda.Event | None = None

    def begin(self, part: Tensors, parameters: set[str]) -> tuple[Tensors, Callable[[], None]]:
        """Copy now what the next forward may change (model buffers); the rest is for `copy()`.

        Returns the copies, complete once `copy` has run and `wait` has returned.
        """
        copies, targets, sources = [], [], []
        for path, value in walk(part):
            source = local_part(value).detach()
            buffer = self.buffers.get(path)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=bool(self.stream))
                self.buffers[path] = buffer
            if path[0] == "model" and path[1] not in parameters:
                # On CUDA in the order of the current stream, hence before the next forward.
                buffer.copy_(source, non_blocking=bool(self.stream))
            else:
                targets.append(buffer)
                sources.append(source)
            if isinstance(value, DTensor):
                buffer = DTensor(buffer, value._spec, requires_grad=False)
            copies.append((path, buffer))

        def copy() -> None:
            if self.device.type == "cpu":
                copy_on_one_core(targets, sources)
            elif targets:
                torch._foreach_copy_(targets, sources, non_blocking=bool(self.stream))

        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                copy()
                self.event = self.stream.record_event()
        elif self.device.type != "cpu":
            copy()  # a device without streams to order a second thread by
        on_a_thread = copy if self.device.type == "cpu" else lambda: None
        return nest(copies), on_a_thread

    def hold_back_current_stream(self) -> None:
        """Make what is queued from now on wait for the copies, without stopping the host."""
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        """Wait until the copies are there."""
        if self.event is not None:
            self.event.synchronize()
