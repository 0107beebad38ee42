"""Stage a save: copy this rank's tensors to host buffers, from which a thread writes them.

The buffers (pinned for CUDA) are reused for the whole run, since touching fresh memory costs fifty
times as much as the copy. On CUDA, the streams wait for each other as follows:

1. the copy stream waits for the training stream, whose last step wrote the tensors;
2. before the optimizer steps, the training stream waits for the event after the copies;
3. before it reads the buffers, the thread waits on the host for that event.

On a CPU the thread itself makes the copies, and the host waits for them before the optimizer steps
(`wait_until_staged` in writer.py).
"""

import math

import torch
from torch import nn

from ..distributed import parallel
from .tensors import Tensors

# NumPy lacks some of torch's dtypes. A copy only moves bits, so it can use any dtype with as many
# bytes per element: these.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# Tensors in a block begin at multiples of this (bytes).
CACHE_LINE = 64
# The smallest block has 2 ** 20 bytes.
SMALLEST_BLOCK = 20


class HostBuffers:
    """Buffers on the host for the tensors of a save: `copy`, then `finish` in the thread."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.buffers: Tensors = {}
        # Pairs of target and source that `finish` has to copy, on a CPU.
        self.to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []
        # On CUDA, the stream of the copies, and the event after them.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.event: torch.Event | None = None

    @property
    def size(self) -> int:
        """Return the bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def allocate(self, tensors: Tensors) -> None:
        """Allocate buffers for tensors that do not have one of their shape and dtype."""
        missing: Tensors = {}
        for name, tensor in tensors.items():
            local = parallel.local_part(tensor)
            buffer = self.buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
                missing[name] = local
        if missing:
            self.buffers |= in_blocks(missing, pinned=self.stream is not None)

    def copy(self, tensors: Tensors) -> Tensors:
        """Start copying; return the copies, which are complete after `finish`.

        The model's registered buffers, such as batch statistics, are copied before the next
        forward, which may change them.
        """
        self.allocate(tensors)
        # With all names of tied parameters, as in state_dict().
        named = self.model.named_parameters(remove_duplicate=False)
        parameters = {f"model.{name}" for name, _ in named}
        copies: Tensors = {}
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, tensor in tensors.items():
            source = parallel.local_part(tensor).detach()
            target = self.buffers[name]
            copies[name] = parallel.with_local_part(tensor, target)
            if name.startswith("model.") and name not in parameters:
                # A registered buffer. On CUDA the training stream makes this copy, and so before
                # the next forward.
                target.copy_(source, non_blocking=self.stream is not None)
            else:
                later.append((target, source))

        targets = [target for target, _ in later]
        sources = [source for _, source in later]
        if self.device.type == "cpu":
            self.to_copy = later
        elif self.stream is None:
            # Other devices have no streams for which the thread could wait, so copy at once.
            torch._foreach_copy_(targets, sources)
        else:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                if targets:
                    torch._foreach_copy_(targets, sources, non_blocking=True)
                self.event = self.stream.record_event()
        return copies

    def finish(self) -> None:
        """Complete the copies in the thread: wait for the device, or copy on the CPU."""
        if self.event is not None:
            self.event.synchronize()
        # NumPy copies on one core and releases the GIL. A torch copy in this thread would start a
        # second OpenMP pool; with more threads than cores, every later training step would be
        # slower (by a third on two cores).
        for target, source in self.to_copy:
            bits = BITS[source.itemsize]
            target.view(bits).numpy()[...] = source.view(bits).numpy()
        self.to_copy = []

    def begin_thread(self) -> None:
        """Set the device of a new thread, which would otherwise use GPU 0."""
        if self.stream is not None:
            torch.cuda.set_device(self.device)


def in_blocks(tensors: Tensors, pinned: bool) -> Tensors:
    """Allocate host tensors like these in a few large blocks, since each allocation is slow.

    The sizes of blocks are powers of two, to which torch's pinned allocator would round them up. A
    block is the largest one that is not larger than all remaining tensors together, but it has at
    least 1 MB, and room for the largest tensor. It takes the largest tensors that still fit; the
    rest of it stays unused.
    """
    placed: Tensors = {}
    remaining = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    while remaining:
        total = sum(tensors[name].nbytes + CACHE_LINE for name in remaining)
        largest = tensors[remaining[0]].nbytes
        # The exponents of the powers of two that are at most `total`, and at least `largest`.
        below_total = total.bit_length() - 1
        above_largest = (largest - 1).bit_length()
        exponent = max(SMALLEST_BLOCK, below_total, above_largest)
        block = torch.empty(1 << exponent, dtype=torch.uint8, pin_memory=pinned)
        used = 0
        too_large: list[str] = []
        for name in remaining:
            like = tensors[name]
            if used + like.nbytes > block.nbytes:
                too_large.append(name)
            else:
                placed[name] = part_of(block, used, like)
                # The next tensor starts at a multiple of a cache line.
                used += math.ceil(like.nbytes / CACHE_LINE) * CACHE_LINE
        remaining = too_large
    return placed


def part_of(block: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `like` in the memory of a block, from byte `start` on.

    DCP would clone a tensor that is smaller than its storage, such as a view of the block. A tensor
    made from a NumPy array has a storage of its own size, here in the memory of the block.
    """
    part = torch.from_numpy(block.numpy()[start : start + like.nbytes])
    return part.view(like.dtype).view(like.shape)
