"""An exponential moving average of the weights (EMA), kept with the optimizer's state.

So checkpoints have it, sharded as the weights are, and a resumed run continues it.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from .distributed import parallel

EMA = "ema"


def keep_average(optimizer: torch.optim.Optimizer) -> None:
    """From now on, let averages follow the weights at each step, by the groups' "ema_decay"."""
    for group in optimizer.param_groups:
        group["ema_decay"] = 0.0  # the schedule sets it
    optimizer.register_step_post_hook(lambda optimizer, *_: _follow(optimizer))


@torch.no_grad()
def _follow(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.grad is not None]
        for p in trained:
            if EMA not in optimizer.state[p]:  # begins with the weights after the first step
                optimizer.state[p][EMA] = p.detach().clone()
        weights = [parallel.local_part(p) for p in trained]
        averages = [parallel.local_part(optimizer.state[p][EMA]) for p in trained]
        if weights:
            bad = getattr(optimizer, "found_inf", None)  # a step that changes nothing (a tensor)
            part = (1 - group["ema_decay"]) * (1 if bad is None else 1 - bad)
            changes = torch._foreach_sub(weights, averages)
            torch._foreach_mul_(changes, part)
            torch._foreach_add_(averages, changes)


@contextlib.contextmanager
def averaged_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give the model the averages in place of its weights; what has none keeps its weight."""
    # Its buffers (batch statistics) stay as they are.
    _exchange(model, optimizer)
    try:
        yield
    finally:
        _exchange(model, optimizer)


@torch.no_grad()
def _exchange(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.state_dict()  # lets go what FSDP has gathered, which would be the other weights
    for p, state in optimizer.state.items():
        if EMA in state:
            weight, average = parallel.local_part(p), parallel.local_part(state[EMA])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
