"""Stage a save: copy this rank's tensors to host buffers, from which a thread writes them.

The buffers (pinned for CUDA) are reused for the whole run, since the first use of fresh memory
takes fifty times longer than the copy itself. On CUDA, an event marks the end of the copies, and
the streams and the thread wait as follows:

1. the copy stream waits for the training stream, whose last step wrote the tensors;
2. before the optimizer steps, the training stream waits for the event;
3. before the thread reads the buffers, it waits on the host for the event.

On a CPU the thread itself makes the copies, and the training loop waits for them before the
optimizer steps (`wait_until_staged` in writer.py).
"""

import math

import torch
from torch import nn

from ..distributed import parallel
from .tensors import Tensors

# NumPy lacks some dtypes of torch, such as bfloat16. A copy only moves bits, so it may use any
# dtype of the same size. This maps the number of bytes per element to such a dtype.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# In a block, each tensor begins at a multiple of this number of bytes.
CACHE_LINE = 64
# The smallest block has 2 ** 20 bytes (1 MB).
SMALLEST_BLOCK = 20


class HostBuffers:
    """Buffers on the host for the tensors of a save.

    The training loop calls `copy`, which starts the copies. The thread then calls `finish`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.buffers: Tensors = {}
        # On a CPU, the pairs of target and source that `finish` has to copy.
        self.to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []
        # On CUDA, the stream that makes the copies, and the event that marks their end.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.event: torch.Event | None = None

    @property
    def size(self) -> int:
        """Return the bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def allocate(self, tensors: Tensors) -> None:
        """Allocate a buffer for each tensor that has no buffer of its shape and dtype yet."""
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
        forward, which may change them. All other tensors are changed only by the optimizer, which
        waits for the copies.

        Each rank copies for itself. An error here, such as too little memory, ends this rank's
        process; an error of a later copy is raised by `finish`.
        """
        self.allocate(tensors)
        # A tied parameter is listed under all its names, as in state_dict().
        named = self.model.named_parameters(remove_duplicate=False)
        parameters = {f"model.{name}" for name, _ in named}
        copies: Tensors = {}
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, tensor in tensors.items():
            source = parallel.local_part(tensor).detach()
            target = self.buffers[name]
            copies[name] = parallel.with_local_part(tensor, target)
            if name.startswith("model.") and name not in parameters:
                # This is a registered buffer of the model. On CUDA the training stream makes the
                # copy. The next forward is queued on the same stream, so it comes later.
                target.copy_(source, non_blocking=self.stream is not None)
            else:
                later.append((target, source))

        targets = [target for target, _ in later]
        sources = [source for _, source in later]
        if self.device.type == "cpu":
            # `finish` copies these, in the writer's thread.
            self.to_copy = later
        elif self.stream is None:
            # On other devices there is no stream for which the writer's thread could wait, so copy
            # at once.
            torch._foreach_copy_(targets, sources)
        else:
            # This stream first waits for the training stream, so the event also means that the
            # registered buffers have been copied.
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                if targets:
                    torch._foreach_copy_(targets, sources, non_blocking=True)
                self.event = self.stream.record_event()
        return copies

    def finish(self) -> None:
        """Complete the copies, in the thread: wait for CUDA, or copy on a CPU."""
        if self.event is not None:
            self.event.synchronize()
        # NumPy copies on one core and releases the GIL. A torch copy in this thread would start a
        # second OpenMP pool. There would then be more threads than cores, which would slow down
        # every later training step (by a third on two cores).
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

    The size of a block is a power of two, since torch's pinned allocator would round up any other
    size. It is the largest power of two that does not exceed the size of all remaining tensors. But
    a block has at least 1 MB, and room for the largest tensor. Tensors are placed from the largest
    to the smallest. Those that do not fit into the block are left for the next one.
    """
    placed: Tensors = {}
    remaining = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    while remaining:
        total = sum(tensors[name].nbytes + CACHE_LINE for name in remaining)
        largest = tensors[remaining[0]].nbytes
        # The largest exponent with 2 ** exponent <= total, and the smallest one with
        # 2 ** exponent >= largest.
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
    """Return a tensor with the shape and dtype of `like`, which begins at byte `start` of a block.

    A torch view of the block would be smaller than its storage, and DCP would clone such a tensor.
    A tensor made from a NumPy view has a storage of exactly its size, in the memory of the block.
    """
    part = torch.from_numpy(block.numpy()[start : start + like.nbytes])
    return part.view(like.dtype).view(like.shape)
