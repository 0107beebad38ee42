"""Copies of what a background save writes, taken while training goes on."""

from collections.abc import Callable

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from .checkpointer import local_part, nest
from .reader import Tensors, walk


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


def copy_on_one_core(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy by numpy, which takes one thread and lets go of Python's lock.

    A torch copy on a second thread would start a second pool of OpenMP threads; with more of them
    than cores, every later step of training is slower (by a third on two cores).
    """
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    for target, source in zip(targets, sources, strict=True):
        kind = bits[source.itemsize]  # numpy does not know every dtype, but only bits are moved
        np.copyto(target.view(kind).numpy(), source.view(kind).numpy())
