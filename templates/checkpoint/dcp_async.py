"""Checkpoints by torch.distributed.checkpoint, written while training goes on.

Staging copies this rank's part into host buffers; it overlaps with the next forward and backward,
which only read parameters, and must be over before the optimizer changes them. The upload (write,
hash, publish) runs on a thread and a process group of its own. One save is in flight at a time; a
failure waits in `failed` until the loop's control word has carried it to every rank. How it is
published is told in checkpoint/publish.py, how it is read in checkpoint/reader.py.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..distributed.parallel import agree_on_buffers
from .checkpointer import Recovery, share_of
from .publish import RetentionConfig
from .reader import Tensors
from .staging import Stager
from .writing import write_shards


@dataclass(frozen=True)
class CheckpointConfig(RetentionConfig):
    """Saved in shards, by all ranks at once, behind the back of training."""

    threads: int = 1
    """Files that each rank writes in parallel."""


class Checkpointer(Recovery):
    """Saves behind training; `save` returns before the checkpoint is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.staged_by = self.world.size
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
        self.publish(step, write, copies, validation_loss)
