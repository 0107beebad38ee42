"""Keep an exponential moving average of the weights (EMA), in the optimizer's state.

So checkpoints save it, sharded like the weights, and a resumed run continues it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .distributed import parallel

# The key of the average in a parameter's optimizer state.
EMA = "ema"


def keep_average(optimizer: torch.optim.Optimizer) -> None:
    """Update the averages after each optimizer step, with the ema_decay of the groups."""
    for group in optimizer.param_groups:
        # The schedule sets the decay before each step.
        group["ema_decay"] = 0.0
    optimizer.register_step_post_hook(_update_averages)


@torch.no_grad()
def _update_averages(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Move each average towards its weights, without collectives and without host syncs."""
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.grad is not None]
        if not trained:
            continue
        for p in trained:
            # The average begins with the weights after the first step. In half precision, the small
            # changes of an average would be rounded away.
            if EMA not in optimizer.state[p]:
                dtype = torch.promote_types(p.dtype, torch.float32)
                optimizer.state[p][EMA] = p.detach().to(dtype, copy=True)
        weights = [parallel.local_part(p) for p in trained]
        averages = [parallel.local_part(optimizer.state[p][EMA]) for p in trained]
        fraction = 1 - group["ema_decay"]
        # A bad step must not change the averages. The flag stays on the device: reading it would
        # make the host wait.
        is_bad = getattr(optimizer, "found_inf", None)
        if is_bad is not None:
            fraction = fraction * (1 - is_bad)
        changes = torch._foreach_sub(weights, averages)
        torch._foreach_mul_(changes, fraction)
        torch._foreach_add_(averages, changes)


@contextlib.contextmanager
def averaged_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace the model's weights by their averages inside the `with` block.

    Weights without an average and buffers (batch statistics) stay as they are.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    # Weights in half precision, by their index in `pairs`. Their averages keep all digits.
    kept: dict[int, torch.Tensor] = {}
    for p, state in optimizer.state.items():
        if EMA in state:
            pairs.append((parallel.local_part(p).detach(), parallel.local_part(state[EMA])))
    free_gathered(model)
    for i, (weight, average) in enumerate(pairs):
        old_weight = weight.clone()
        weight.copy_(average)
        if average.dtype == weight.dtype:
            # A swap needs no memory for a second copy of all weights.
            average.copy_(old_weight)
        else:
            kept[i] = old_weight
    try:
        yield
    finally:
        free_gathered(model)
        for i, (weight, average) in enumerate(pairs):
            if i in kept:
                weight.copy_(kept[i])
            else:
                averaged = weight.clone()
                weight.copy_(average)
                average.copy_(averaged)


def free_gathered(model: nn.Module) -> None:
    """Free weights that FSDP has gathered for the last forward.

    The next forward would use them instead of weights that have changed since.
    """
    model.state_dict()
