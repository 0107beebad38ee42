"""Gather features of all ranks, for losses that compare the whole batch, such as CLIP.

Let a rank's loss be the sum over its own samples, each compared with all samples. Then the sums of
all ranks, and their gradients, add up to those of the global batch.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .loss import Gathered


def gather_with_gradients(features: Tensor) -> tuple[Tensor, int]:
    """Gather features [samples, ...] of all ranks into [all samples, ...]; collective.

    Also returns the index of this rank's first sample in the result. Ranks may have different
    numbers of samples. Gradients flow back to the features of every rank. The host waits once for
    the device. A loss that gathers needs the whole batch at once, so a run that would split each
    rank's samples into several micro-batches ends with an error.
    """
    # The run reads this after the first call of compute_loss (`check_whole_batch` in loss.py).
    Gathered.used = True
    if not dist.is_initialized():
        return features, 0
    rank = dist.get_rank()
    sizes = features.new_zeros(dist.get_world_size(), dtype=torch.int64)
    # A rank without samples processes a copy of the batch's first sample. Leave the copy out, so
    # that this sample is not gathered twice.
    own = features[:0] if Gathered.is_padding else features
    sizes[rank] = len(own)
    # Each rank has set only its own entry, so the sum has the entries of all ranks.
    dist.all_reduce(sizes)
    counts: list[int] = sizes.tolist()
    # The original of such a copy is the first sample of the result.
    first = 0 if Gathered.is_padding else sum(counts[:rank])
    return _Gather.apply(own, counts), first


class _Gather(torch.autograd.Function):
    """Concatenates the features of all ranks; backward sums their gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, counts: list[int]) -> Tensor:
        """Return the features of all ranks, in rank order."""
        ctx.counts = counts
        # all_gather needs the same shape on all ranks, so pad shorter features with zeros.
        padded = features.new_zeros(max(counts), *features.shape[1:])
        padded[: len(features)] = features
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded)
        without_padding = [each[:count] for each, count in zip(gathered, counts, strict=True)]
        return torch.cat(without_padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of this rank's features, summed over all ranks."""
        # Sum in float32: in half precision, a sum over many ranks would be rounded too much.
        total = gradient.float().contiguous()
        dist.all_reduce(total)
        rank = dist.get_rank()
        first = sum(ctx.counts[:rank])
        return total[first : first + ctx.counts[rank]].to(gradient.dtype), None
