"""For losses that compare samples of the whole batch, such as CLIP's: gather features of all ranks.

The loss of a rank is the sum over its own samples, each compared with all samples. Then the sums of
all ranks add up to the loss of the global batch, and so do their gradients.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .loss import Gathered


def gather_with_gradients(features: Tensor) -> tuple[Tensor, int]:
    """Gather features [samples, ...] of all ranks, [all samples, ...]; collective.

    Also returns the index at which this rank's own samples begin. The ranks may have different
    numbers of samples. Gradients flow back to the features of every rank. The host waits for the
    device once. A loss like this needs its whole batch at a time: the run refuses micro-batches.
    """
    Gathered.used = True
    if not dist.is_initialized():
        return features, 0
    rank = dist.get_rank()
    sizes = features.new_zeros(dist.get_world_size(), dtype=torch.int64)
    # A rank that repeats the first sample of the batch must not give it to the others once more.
    own = features[:0] if Gathered.is_padding else features
    sizes[rank] = len(own)
    dist.all_reduce(sizes)
    counts: list[int] = sizes.tolist()
    first = 0 if Gathered.is_padding else sum(counts[:rank])
    return _Gather.apply(own, counts), first


class _Gather(torch.autograd.Function):
    """Concatenates the features of all ranks; backward adds up what all ranks do with them."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, counts: list[int]) -> Tensor:
        """Return the features of all ranks, one after the other."""
        ctx.counts = counts
        # All ranks have to send as many samples: the shorter ones are filled up.
        padded = features.new_zeros(max(counts), *features.shape[1:])
        padded[: len(features)] = features
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded)
        return torch.cat([each[:count] for each, count in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of this rank's features: what all ranks found for them."""
        # A sum in float32, since many ranks add to it.
        total = gradient.float().contiguous()
        dist.all_reduce(total)
        rank = dist.get_rank()
        first = sum(ctx.counts[:rank])
        return total[first : first + ctx.counts[rank]].to(gradient.dtype), None
