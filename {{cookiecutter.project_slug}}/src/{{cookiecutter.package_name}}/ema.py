"""Keep an exponential moving average of the weights (EMA), in the optimizer's state.

Checkpoints save the average with this state, sharded like the weights, and a resumed run continues
it.
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
    """Make the optimizer update the averages after each step, by the ema_decay of each group."""
    for group in optimizer.param_groups:
        # A placeholder: the schedule sets the decay before each step.
        group["ema_decay"] = 0.0
    optimizer.register_step_post_hook(_update_averages)


@torch.no_grad()
def _update_averages(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Move each average towards its weights, without collectives or waiting for the device."""
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.grad is not None]
        if not trained:
            continue
        for p in trained:
            # The average begins with the weights after the first step.
            if EMA not in optimizer.state[p]:
                # In half precision, small changes of an average would be rounded away.
                dtype = torch.promote_types(p.dtype, torch.float32)
                optimizer.state[p][EMA] = p.detach().to(dtype, copy=True)
        weights = [parallel.local_part(p) for p in trained]
        averages = [parallel.local_part(optimizer.state[p][EMA]) for p in trained]
        fraction = 1 - group["ema_decay"]
        # This hook also runs after a bad step that a fused optimizer has skipped on the device
        # (run/bad_steps.py). Such a step must not change the averages either. `found_inf` is 1
        # then, and stays on the device, since reading it would make the host wait.
        is_bad = getattr(optimizer, "found_inf", None)
        if is_bad is not None:
            fraction = fraction * (1 - is_bad)
        changes = torch._foreach_sub(weights, averages)
        torch._foreach_mul_(changes, fraction)
        torch._foreach_add_(averages, changes)


@contextlib.contextmanager
def averaged_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace the model's weights by their averages inside the `with` block.

    Buffers (batch statistics) stay as they are, and so do weights that have no average.
    """
    # Each weight with its average. Where their dtypes are equal, the two swap their values.
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    # Copies of weights in half precision, by their index in `pairs`. These weights do not swap with
    # their float32 averages, since that would round the averages.
    copies: dict[int, torch.Tensor] = {}
    for p, state in optimizer.state.items():
        if EMA in state:
            pairs.append((parallel.local_part(p).detach(), parallel.local_part(state[EMA])))
    free_gathered(model)
    for i, (weight, average) in enumerate(pairs):
        old_weight = weight.clone()
        weight.copy_(average)
        if average.dtype == weight.dtype:
            # Complete the swap, so that `old_weight` can be freed before the next pair.
            average.copy_(old_weight)
        else:
            copies[i] = old_weight
    try:
        yield
    finally:
        free_gathered(model)
        for i, (weight, average) in enumerate(pairs):
            if i in copies:
                weight.copy_(copies[i])
            else:
                # Swap back: after the first swap, `weight` holds the averaged values.
                averaged = weight.clone()
                weight.copy_(average)
                average.copy_(averaged)


def free_gathered(model: nn.Module) -> None:
    """Free weights that FSDP has gathered for the last forward.

    Otherwise the next forward would use these old values instead of the changed weights.
    """
    # The result is not needed. A hook of FSDP, which runs before state_dict(), frees the weights.
    model.state_dict()
