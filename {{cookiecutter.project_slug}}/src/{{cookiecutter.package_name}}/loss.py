"""A loss as sums over a batch, the means of these sums, and the check for a bad step."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from .errors import UserError


class LossSum(NamedTuple):
    """Sums over a batch, not means, so that accumulation and uneven ranks are exact."""

    # The sum of the losses, a scalar to differentiate.
    total: torch.Tensor
    # The divisor of `total`: the tokens, or images, in the batch.
    count: torch.Tensor | int
    # More sums, whose means are reported. A tensor is divided by `count`, a pair (sum, divisor) by
    # its own divisor.
    metrics: dict[str, Any]


def require_type(value: object, kind: type, what: str) -> None:
    """Check that one of your functions returned a value of this type (UserError)."""
    if not isinstance(value, kind):
        raise UserError(f"{what}: expected {kind.__name__}, not {type(value).__name__}")


def check_model(model: nn.Module) -> nn.Module:
    """Return the model; UserError for a parameter that cannot be trained here, by its name."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            way_out = "state its sizes in build_model (model.py), or call the model there once"
            raise UserError(f"{name} is of a lazy module, without sizes so far: {way_out}")
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.sparse:
            raise UserError(f"{name}.weight has sparse gradients: make it with sparse=False")
    return model


def loss_vector(loss: LossSum) -> torch.Tensor:
    """Stack sum and count of the loss, then of each metric: float32, detached, on its device."""
    total = loss.total.detach().float()
    values = [total, loss.count]
    for metric in loss.metrics.values():
        if isinstance(metric, tuple):
            values += metric
        else:
            values += [metric, loss.count]
    tensors: list[torch.Tensor] = []
    for value in values:
        # `new_full` fills the number in on the device. A tensor that is made on the host would have
        # to be copied there, and the copy waited for.
        if not isinstance(value, torch.Tensor):
            value = total.new_full((), value)
        tensors.append(value.detach().float())
    return torch.stack(tensors)


def judge_step(
    sums: torch.Tensor, norm: torch.Tensor, ranks: int, clip: float
) -> tuple[torch.Tensor | float, torch.Tensor | float, torch.Tensor | bool]:
    """Return the factor for the gradients, their norm before clipping, and whether the step is bad.

    The gradients are of summed losses, averaged over the ranks; `sums` holds the total and the
    count over all ranks. A step is bad when its loss or gradient is not finite.
    """
    # On a GPU the results stay scalar tensors, since reading one would make the host wait for the
    # step. On a CPU there is nothing to wait for, and an operation on a scalar tensor takes ten
    # times as long as one on a number.
    if sums.device.type == "cpu":
        total, count, *_ = sums.tolist()
        size = norm.item()
        # Without a sample the step is bad, as it is on a GPU, where 1 / 0 is not an error.
        if not count:
            count = math.nan
    else:
        total, count, size = sums[0], sums[1], norm
    # From the mean over ranks of summed losses to the mean over samples.
    scale = ranks / count
    size = size * scale
    # The sum is finite only if both the loss and the gradient are. Then the difference is 0;
    # otherwise it is nan, since inf - inf and nan - nan are nan.
    judged = size + total
    bad = (judged - judged) != 0
    if clip:
        factor = clip / (size + 1e-6)
        if isinstance(factor, torch.Tensor):
            factor = factor.clamp(max=1.0)
        else:
            factor = min(factor, 1.0)
        scale *= factor
    return scale, size, bad


def means(sums: list[float], names: Iterable[str]) -> dict[str, float]:
    """Compute the mean loss and metrics from a sum of loss vectors, read from the device."""
    result: dict[str, float] = {}
    for name, total, count in zip(("loss", *names), sums[::2], sums[1::2], strict=True):
        result[name] = total / count if count else math.nan
    return result
