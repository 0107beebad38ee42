"""Checkpoints by torch.distributed.checkpoint, written while training goes on.

A save has two phases. Staging copies this rank's part into host buffers that are kept for the whole
run; it overlaps with the next forward and backward, which only read parameters, and has to be
over before the optimizer changes them. The upload (writing, hashing, publishing) then runs on a
thread of its own, with a process group of its own. One save is in flight at a time. A failure
waits in `failed` until the loop's control word has carried it to every rank.

How a checkpoint is published and verified is told in engine/snapshots.py, how it is read in
engine/state.py.
"""

import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .engine.control import World
from .engine.snapshots import RetentionConfig, SnapshotError
from .engine.state import (
    Recovery,
    Tensors,
    agree_on_buffers,
    model_tensors,
    share_of,
    write_shards,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointConfig(RetentionConfig):
    """Saved in shards, by all ranks at once, behind the back of training."""

    threads: int = 1
    """Files that each rank writes in parallel."""


class Checkpointer(Recovery):
    """Saves behind training; `save` returns before the checkpoint is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        warn_if_memory_is_short({"model": model_tensors(self.model)}, self.world)
        self.stager = Stager(self.world.device)
        self.uploader = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.upload: Future[None] | None = None
        self.staged: threading.Event | None = None

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed, as far as this rank knows by now."""
        return bool(self.upload and self.upload.done() and self.upload.exception())

    def save(self, step: int, validation_loss: float | None = None) -> None:
        """Start a save of `step`, after the one before is published (SnapshotError if it failed).

        The optimizer must not step before `before_optimizer_step()` has returned.
        """
        if step == self.last_saved:
            return
        self.settle()
        started = time.perf_counter()
        agree_on_buffers(self.model, self.world)
        part = share_of(self.tensors(), self.world.rank, self.world.size)
        parameters = {name for name, _ in self.model.named_parameters()}
        copies, copy = self.stager.begin(part, parameters)
        self.staged = threading.Event()
        self.upload = self.uploader.submit(
            self._upload, step, copies, copy, self.staged, validation_loss
        )
        self.last_saved = step
        self.blocked_seconds += time.perf_counter() - started

    def before_optimizer_step(self) -> None:
        """Wait until the parameters and the optimizer's state have been copied."""
        if self.staged is not None:
            started = time.perf_counter()
            self.staged.wait()
            self.stager.order_before_current_stream()
            self.staged = None
            self.blocked_seconds += time.perf_counter() - started

    def settle(self) -> None:
        """Wait for the save in flight; SnapshotError, on every rank, if it failed."""
        self.before_optimizer_step()
        upload, self.upload = self.upload, None
        if upload is not None:
            started = time.perf_counter()
            try:
                upload.result()
            except SnapshotError:
                self.last_saved = None
                raise
            finally:
                self.blocked_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Settle, and stop the uploading thread."""
        try:
            self.settle()
        finally:
            self.uploader.shutdown()

    def _upload(
        self,
        step: int,
        copies: Tensors,
        copy: Any,
        staged: threading.Event,
        validation_loss: float | None,
    ) -> None:
        problem = None
        try:
            copy()
        except Exception as error:
            problem = SnapshotError(f"copying to host memory failed: {error}")
        finally:
            staged.set()
        self.stager.wait()

        def write(directory: Path) -> list[str]:
            if problem:
                raise problem
            threads = self.snapshots.retention.threads
            return write_shards(directory, copies, self.group, threads)

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

    def begin(self, part: Tensors, parameters: set[str]) -> tuple[Tensors, Any]:
        """Copy now what the next forward may change (model buffers); the rest is for `copy()`.

        Returns the copies, complete once `copy` has run, and that function.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def twin(path: tuple[str, ...], value: Any) -> Any:
            if isinstance(value, dict):
                return {key: twin((*path, key), item) for key, item in value.items()}
            local = value.to_local() if isinstance(value, DTensor) else value
            local = local.detach()
            buffer = self.buffers.get(path)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                pin = self.stream is not None
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=pin)
                self.buffers[path] = buffer
            if path[0] == "model" and path[1] not in parameters:
                # In the order of the current stream, hence before the next forward.
                buffer.copy_(local, non_blocking=True)
            else:
                pairs.append((buffer, local))
            if isinstance(value, DTensor):
                return DTensor(buffer, value._spec, requires_grad=False)
            return buffer

        copies = twin((), part)
        targets, sources = [list(side) for side in zip(*pairs, strict=True)] or ([], [])
        if not targets:  # more ranks than tensors
            return copies, lambda: None
        if self.stream is None:
            return copies, lambda: torch._foreach_copy_(targets, sources)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            self.event = self.stream.record_event()
        return copies, lambda: None

    def order_before_current_stream(self) -> None:
        """Make what is queued from now on wait for the copies, without stopping the host."""
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        """Wait until the copies are there."""
        if self.event is not None:
            self.event.synchronize()


def warn_if_memory_is_short(tensors: Tensors, world: World) -> None:
    """Compare what staging will take with the host memory that is free, before training starts."""
    part = share_of(tensors, world.rank, world.size)["model"].values()
    weights = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in part)
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = 3 * weights * on_this_host  # AdamW keeps two moments beside each weight
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) << 10
    except (OSError, StopIteration, ValueError):
        return  # this system does not say
    if needed > 0.8 * free:
        log.warning(
            "staging checkpoints will take about %.1f GB of host memory here, %.1f GB are free: "
            "spread the run over more machines or save synchronously",
            needed / 1e9,
            free / 1e9,
        )
