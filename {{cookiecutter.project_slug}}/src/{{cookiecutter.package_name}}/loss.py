"""A loss as sums, the means of these, and whether a step is bad."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from .errors import UserError


class LossSum(NamedTuple):
    """Sums over a batch, not means, so that accumulation and uneven ranks are exact."""

    total: torch.Tensor  # sum of the losses, the scalar to differentiate
    count: torch.Tensor | int  # the divisor of `total`: tokens, or images, in the batch
    # Further sums, whose means are reported: over `count`, or as in (sum, count of its own).
    metrics: dict[str, Any]


def returned(value: object, kind: type, what: str) -> None:
    """UserError unless one of your functions returned a value of this kind."""
    if not isinstance(value, kind):
        raise UserError(f"{what}: expected {kind.__name__}, not {type(value).__name__}")


def check_model(model: nn.Module) -> nn.Module:
    """The model; UserError, by name, for parameters that cannot be trained here."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            way_out = "state its sizes in build_model (model.py), or call the model there once"
            raise UserError(f"{name} is of a lazy module, without sizes so far: {way_out}")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(f"{name}.weight has sparse gradients: make it with sparse=False")
    return model


def loss_vector(loss: LossSum) -> torch.Tensor:
    """Sum and count of the loss, then of each metric; detached, float32, on the loss's device."""
    total = loss.total.detach().float()
    values = [total, loss.count]
    for metric in loss.metrics.values():
        values += metric if isinstance(metric, tuple) else (metric, loss.count)
    # new_full is a kernel; a tensor made on the host would be waited for.
    tensors = [v if isinstance(v, torch.Tensor) else total.new_full((), v) for v in values]
    return torch.stack([tensor.detach().float() for tensor in tensors])


def judge_step(
    sums: torch.Tensor, norm: torch.Tensor, ranks: int, clip: float
) -> tuple[torch.Tensor | float, torch.Tensor | float, torch.Tensor | bool]:
    """The factor for the gradients, their norm before clipping, and whether the step is bad.

    The gradients are of summed losses, averaged over the ranks; `sums` holds the total and the
    count over all ranks. A step is bad when its loss or gradient is not finite.
    """
    # The results are scalars on the device, so that the host need not wait for them; on a CPU plain
    # numbers, since an operator on a scalar tensor costs ten times as much.
    if sums.device.type == "cpu":
        total, count, *_ = sums.tolist()
        count, size = count or math.nan, norm.item()
    else:
        total, count, size = sums[0], sums[1], norm
    scale = ranks / count
    size = size * scale
    judged = size + total
    bad = (judged - judged) != 0  # inf - inf and nan - nan are nan
    if clip:
        factor = clip / (size + 1e-6)
        scale *= factor.clamp(max=1.0) if isinstance(factor, torch.Tensor) else min(factor, 1.0)
    return scale, size, bad


def means(sums: list[float], names: Iterable[str]) -> dict[str, float]:
    """Mean loss and metrics from a sum of loss vectors, read from the device."""
    named = zip(("loss", *names), sums[::2], sums[1::2], strict=True)
    return {name: total / count if count else math.nan for name, total, count in named}
