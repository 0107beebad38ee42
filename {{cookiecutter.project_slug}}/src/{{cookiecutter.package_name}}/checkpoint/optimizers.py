"""What any optimizer keeps, found without knowing which one it is, and how it is stepped."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import UserError
from .reader import Tensors

GROUPS = "param_groups."  # by place: what an optimizer keeps in its groups


def optimizer_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """What an optimizer keeps: names, the dictionaries it is in, and the keys that count there.

    That is its state of each parameter, and numbers that it writes into its groups (as some count
    their steps there), but no settings: those are in the signature of its class.
    """
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            yield name, state, [key for key, value in state.items() if value is not None]
    settings = {*inspect.signature(type(optimizer)).parameters, "lr", "initial_lr", "rate_factor"}
    for place, group in enumerate(optimizer.param_groups):
        numbers = {k: v for k, v in group.items() if isinstance(v, int | float | torch.Tensor)}
        if own := [k for k, v in numbers.items() if k not in settings and not isinstance(v, bool)]:
            yield f"{GROUPS}{place}", group, own


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state by parameter name; plain numbers in it come as scalar tensors."""
    return {
        name: {key: as_tensor(holder[key], f"{name} {key}") for key in keys}
        for name, holder, keys in optimizer_parts(model, optimizer)
    }


def as_tensor(value: Any, what: str) -> torch.Tensor:
    """A tensor as it is, a number as a scalar; UserError for anything else."""
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, int | float):
        raise UserError(f"optimizer state can be tensors and numbers; {what} is a {type(value)}")
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer allocate its state, by a step that changes nothing worth keeping."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)
    optimizer.zero_grad(set_to_none=True)


def step_unless(bad: torch.Tensor | bool, optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer unless `bad` is set.

    Fused optimizers decide on the device, by what gradient scalers use; others make the host wait.
    """
    if isinstance(bad, torch.Tensor) and getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = bad.float()
        optimizer.step()
    elif not bad:
        optimizer.step()
