"""What a background save needs: copies of the state, and a thread that uploads them."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ..distributed import parallel
from .tensors import Path, Tensors, nest, walk

Upload = Callable[[Tensors, Callable[[], None]], None]


class Background:
    """Copies tensors into host buffers, and works on the copies in a thread, one save at a time.

    The buffers (pinned for CUDA) live as long as the run, because the first touch of fresh memory
    costs fifty times the copy. On a CPU the thread copies; on CUDA the copies are queued at once,
    on a stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[Path, torch.Tensor] = {}
        cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if cuda else None
        self.event: torch.cuda.Event | None = None
        self.staged: threading.Event | None = None
        self.upload: Future[None] | None = None
        self.thread = ThreadPoolExecutor(
            1,
            thread_name_prefix="checkpoint",
            initializer=torch.cuda.set_device if cuda else None,  # else it starts on GPU 0
            initargs=(device,) if cuda else (),
        )

    @property
    def failed(self) -> bool:
        """Whether the upload in flight has failed by now."""
        return bool(self.upload and self.upload.done() and self.upload.exception())

    def start(self, part: Tensors, parameters: set[str], upload: Upload) -> None:
        """Run `upload(copies, complete)` in the thread; the copies are whole after `complete()`.

        `part` must not change before `wait_for_copies` has returned, but for the model's buffers
        (all that is not in `parameters`): they are copied now, since the next forward changes them.
        """
        copies, copy = self._stage(part, parameters)
        staged = self.staged = threading.Event()

        def complete() -> None:
            try:
                copy()
            finally:
                staged.set()
            if self.event is not None:
                self.event.synchronize()

        self.upload = self.thread.submit(upload, copies, complete)

    def wait_for_copies(self) -> float:
        """Wait until the tensors may change; the seconds that it took."""
        if self.staged is None:
            return 0.0
        started = time.perf_counter()
        self.staged.wait()
        if self.event is not None:  # holds back what the device does next, not the host
            torch.cuda.current_stream(self.device).wait_event(self.event)
        self.staged = None
        return time.perf_counter() - started

    def settle(self) -> None:
        """Wait for the upload in flight; raises what it raised."""
        if self.upload is not None:
            upload, self.upload, self.staged = self.upload, None, None
            upload.result()

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown()

    def _stage(self, part: Tensors, parameters: set[str]) -> tuple[Tensors, Callable[[], None]]:
        """Copies of `part`, of which some are complete only after the returned function."""
        copies, targets, sources = [], [], []
        for path, value in walk(part):
            source = parallel.local_part(value).detach()
            buffer = self._buffer(path, source)
            if path[0] == "model" and path[1] not in parameters:
                # On CUDA in the order of the current stream, hence before the next forward.
                buffer.copy_(source, non_blocking=bool(self.stream))
            else:
                targets.append(buffer)
                sources.append(source)
            copies.append((path, parallel.with_local_part(value, buffer)))
        if self.device.type == "cpu":
            return nest(copies), lambda: copy_on_one_core(targets, sources)
        if self.stream is None:  # a device without streams to order a second thread by
            torch._foreach_copy_(targets, sources)
            return nest(copies), lambda: None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            self.event = self.stream.record_event()
        return nest(copies), lambda: None

    def _buffer(self, path: Path, source: torch.Tensor) -> torch.Tensor:
        buffer = self.buffers.get(path)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=bool(self.stream))
            self.buffers[path] = buffer
        return buffer


def copy_on_one_core(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy by numpy, which takes one thread and releases Python's lock.

    A torch copy on a second thread would start a second pool of OpenMP threads; with more of them
    than cores, every later step of training is slower (by a third on two cores).
    """
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    for target, source in zip(targets, sources, strict=True):
        kind = bits[source.itemsize]  # numpy does not know every dtype, but only bits are moved
        np.copyto(target.view(kind).numpy(), source.view(kind).numpy())
