"""Staging: copies of this rank's tensors in host buffers, which a thread then writes.

The buffers (pinned for CUDA) live as long as the run, since the first touch of fresh memory costs
fifty times the copy. Which stream waits for which, on CUDA:

1. the copying stream waits for the training stream, whose last step wrote the tensors;
2. the training stream waits, before the optimizer steps, for the event that ends the copies;
3. the thread waits for that event on the host, before it reads the buffers.

On a CPU the thread itself copies.
"""

import math

import torch
from torch import nn

from ..distributed import parallel
from .tensors import Tensors

# numpy does not know every dtype. A copy only moves bits, so a dtype of the same size will do.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
CACHE_LINE = 64
# The smallest block has 2 ** 20 bytes.
SMALLEST_BLOCK = 20


class HostBuffers:
    """Buffers on the host for the tensors of a save: `copy`, then `finish` in the thread."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.buffers: Tensors = {}
        # Targets and sources that `finish` has to copy, on a CPU.
        self.to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []
        # The stream of the copies, and the event that ends them, on CUDA.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.event: torch.Event | None = None

    @property
    def size(self) -> int:
        """Return the bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def allocate(self, tensors: Tensors) -> None:
        """Make buffers for tensors that have none of their shape and dtype."""
        missing: Tensors = {}
        for name, tensor in tensors.items():
            local = parallel.local_part(tensor)
            buffer = self.buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
                missing[name] = local
        if missing:
            self.buffers |= in_blocks(missing, pinned=self.stream is not None)

    def copy(self, tensors: Tensors) -> Tensors:
        """Begin to copy; returns the copies, which are complete after `finish`.

        The model's buffers are copied at once, since the next forward changes them.
        """
        self.allocate(tensors)
        parameters = {f"model.{name}" for name, _ in self.model.named_parameters()}
        copies: Tensors = {}
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, tensor in tensors.items():
            source = parallel.local_part(tensor).detach()
            target = self.buffers[name]
            copies[name] = parallel.with_local_part(tensor, target)
            if name.startswith("model.") and name not in parameters:
                # On CUDA the training stream copies it, and so does that before the next forward.
                target.copy_(source, non_blocking=self.stream is not None)
            else:
                later.append((target, source))

        targets = [target for target, _ in later]
        sources = [source for _, source in later]
        if self.device.type == "cpu":
            self.to_copy = later
        elif self.stream is None:
            # This device has no streams by which a second thread could wait.
            torch._foreach_copy_(targets, sources)
        else:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                if targets:
                    torch._foreach_copy_(targets, sources, non_blocking=True)
                self.event = self.stream.record_event()
        return copies

    def finish(self) -> None:
        """Complete the copies, on the thread: wait for the device, or copy them here."""
        if self.event is not None:
            self.event.synchronize()
        # numpy copies on one core and releases Python's lock. A torch copy on a second thread would
        # start a second pool of OpenMP threads; with more of them than cores, every later step of
        # training is slower (by a third on two cores).
        for target, source in self.to_copy:
            bits = BITS[source.itemsize]
            target.view(bits).numpy()[...] = source.view(bits).numpy()
        self.to_copy = []

    def begin_thread(self) -> None:
        """Set the device of a new thread, which would otherwise work on GPU 0."""
        if self.stream is not None:
            torch.cuda.set_device(self.device)


def in_blocks(tensors: Tensors, pinned: bool) -> Tensors:
    """Make host tensors like these, in a few blocks of memory, since each allocation takes long.

    The pinned allocator rounds a block up to a power of two, so blocks have such sizes: at least
    1 MB, at least the largest tensor, and at most what is left to place, so that all but the last
    one are full. Each block takes the largest tensors that still fit.
    """
    placed: Tensors = {}
    left = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    while left:
        total = sum(tensors[name].nbytes + CACHE_LINE for name in left)
        largest = tensors[left[0]].nbytes
        # The power of two that is at most `total`, and the one that is at least `largest`.
        below_total = total.bit_length() - 1
        above_largest = (largest - 1).bit_length()
        exponent = max(SMALLEST_BLOCK, below_total, above_largest)
        block = torch.empty(1 << exponent, dtype=torch.uint8, pin_memory=pinned)
        used = 0
        too_large: list[str] = []
        for name in left:
            like = tensors[name]
            if used + like.nbytes > block.nbytes:
                too_large.append(name)
            else:
                placed[name] = part_of(block, used, like)
                # The next one starts at a multiple of a cache line.
                used += math.ceil(like.nbytes / CACHE_LINE) * CACHE_LINE
        left = too_large
    return placed


def part_of(block: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `like` whose memory is a part of a block of bytes.

    numpy gives it a storage of its own size. If the block were its storage, DCP would copy it.
    """
    part = torch.from_numpy(block.numpy()[start : start + like.nbytes])
    return part.view(like.dtype).view(like.shape)
