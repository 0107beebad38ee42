"""Make buffers that forward changes, such as batch statistics, equal on all ranks."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .world import World

# On a GPU, `agree_on_buffers` looks only once in this many steps for buffers that begin to differ.
LOOK_EVERY = 50


def agree_on_buffers(running: Any, step: int, world: World) -> None:
    """Make RunningBuffers (run/bad_steps.py) equal on all ranks after a step's forwards.

    Collective. Only buffers that differ between ranks are sent. Most do not differ: they never
    change, such as masks, or change alike on all ranks, such as step counters.
    """
    if world.size == 1 or not running.slots:
        return
    tensors = running.tensors()
    if world.device.type == "cpu":
        running.differing = _differing(tensors)
    elif running.differing is None or step % LOOK_EVERY == 0:
        # To read the result of a comparison, the host must wait for the GPU. So compare only at
        # some steps. A buffer that has differed once is sent at every later step.
        known = running.differing or set()
        running.differing = known | _differing(tensors)
    # Floating-point and complex buffers get the mean over the ranks; all others (counts, flags) get
    # rank 0's value.
    to_average: list[Tensor] = []
    to_copy: list[Tensor] = []
    for index in sorted(running.differing):
        tensor = tensors[index]
        if tensor.is_complex():
            # This real view shares the memory of the buffer.
            tensor = torch.view_as_real(tensor)
        if tensor.is_floating_point():
            to_average.append(tensor)
        else:
            to_copy.append(tensor)
    if to_average:
        # Sum in float64, so that the order of summation hardly matters.
        values = torch.cat([tensor.flatten().to(torch.float64) for tensor in to_average])
        dist.all_reduce(values)
        _scatter(values / world.size, to_average)
    if to_copy:
        # All ranks except rank 0 add zeros, so the sum over the ranks is rank 0's values.
        values = torch.cat([tensor.flatten().to(torch.int64) for tensor in to_copy])
        if world.rank != 0:
            values.zero_()
        dist.all_reduce(values)
        _scatter(values, to_copy)


def _differing(tensors: list[Tensor]) -> set[int]:
    """Return the indices of tensors whose bytes differ between ranks; collective."""
    sums = torch.stack([checksum(tensor) for tensor in tensors])
    # One all-reduce finds both extremes: the maximum of the negated sums is the negated minimum.
    extremes = torch.cat([sums, -sums])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    highest, negative_lowest = extremes.chunk(2)
    return set((highest != -negative_lowest).nonzero().flatten().tolist())


def _scatter(values: Tensor, tensors: list[Tensor]) -> None:
    """Copy consecutive parts of `values` into the tensors, in their dtypes (no collective)."""
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, part in zip(tensors, values.split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum, on the tensor's device, that changes if any single bit flips.

    Most other changes of the tensor, such as swapped values, change the checksum, too. It is not
    cryptographic.
    """
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    # View the bytes as rows of 128 integers of 8 bytes; zeros fill the last row.
    padding = -len(content) % 1024
    rows = F.pad(content, (0, padding)).view(torch.int64).view(-1, 128)
    # The result is a weighted sum of the integers modulo 2 ** 64. The weight of an integer is its
    # row's weight plus its column's weight. Row weights are odd and column weights are even, so the
    # sum is odd. A change times an odd weight is never 0 modulo 2 ** 64. Column weights are far
    # apart, so that few integers have the same weight.
    # But first mix the high bits of each integer into lower ones. Otherwise two flipped sign bits
    # would cancel: each would change the sum by 2 ** 63, whatever its weight. The mask clears the
    # 29 copies of the sign bit that `>>` inserts, so that different integers stay different.
    rows = rows ^ ((rows >> 29) & (2**35 - 1))
    row_sums = rows.sum(1)
    column_sums = rows.sum(0)
    row_weights = 2 * torch.arange(len(row_sums), device=tensor.device) + 1
    column_weights = 2_000_006 * torch.arange(128, device=tensor.device)
    return (row_sums * row_weights).sum() + (column_sums * column_weights).sum()


def checksum_of_all(tensors: Iterable[Tensor]) -> int:
    """Return the sum of the checksums of all `tensors`."""
    return sum(int(checksum(tensor)) for tensor in tensors)
