"""An exponential moving average of the weights (EMA), stored in the optimizer's state.

There a checkpoint saves it, sharded as the weights are, and a resumed run continues it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .distributed import parallel

# The key of the average in the optimizer's state of a parameter.
EMA = "ema"


def keep_average(optimizer: torch.optim.Optimizer) -> None:
    """Update an average of the weights after each step from now on, with the groups' ema_decay."""
    for group in optimizer.param_groups:
        # The schedule sets it before each step.
        group["ema_decay"] = 0.0
    optimizer.register_step_post_hook(_update_averages)


@torch.no_grad()
def _update_averages(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Move each average a fraction of the way to its weights; no collective, no wait."""
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.grad is not None]
        if not trained:
            continue
        for p in trained:
            # The average begins with the weights after the first step.
            if EMA not in optimizer.state[p]:
                optimizer.state[p][EMA] = p.detach().clone()
        weights = [parallel.local_part(p) for p in trained]
        averages = [parallel.local_part(optimizer.state[p][EMA]) for p in trained]
        fraction = 1 - group["ema_decay"]
        # A bad step leaves the averages alone. Its flag is a tensor, which the host must not read.
        is_bad = getattr(optimizer, "found_inf", None)
        if is_bad is not None:
            fraction = fraction * (1 - is_bad)
        changes = torch._foreach_sub(weights, averages)
        torch._foreach_mul_(changes, fraction)
        torch._foreach_add_(averages, changes)


@contextlib.contextmanager
def averaged_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Exchange the model's weights for their averages inside the `with` block.

    Weights without an average stay, and so do buffers (batch statistics).
    """
    _exchange(model, optimizer)
    try:
        yield
    finally:
        _exchange(model, optimizer)


@torch.no_grad()
def _exchange(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # FSDP may still hold gathered weights from the last forward. `state_dict` makes it free them,
    # or the next forward would use these and not the exchanged ones.
    model.state_dict()
    for p, state in optimizer.state.items():
        if EMA in state:
            weight = parallel.local_part(p)
            average = parallel.local_part(state[EMA])
            old_weight = weight.clone()
            weight.copy_(average)
            average.copy_(old_weight)
