"""A loss as sums over a batch, the means of these sums, and checks for bad steps and values."""

import logging
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn

from .errors import UserError

log = logging.getLogger(__name__)


class LossSum(NamedTuple):
    """Sums over a batch. Unlike means, sums of batches of different sizes add up exactly."""

    # The sum of the losses, a scalar tensor with a gradient.
    total: torch.Tensor
    # The number of losses in `total`, such as the number of tokens or images in the batch.
    count: torch.Tensor | int
    # Further sums by name, whose means are reported. A single sum is divided by `count`. The sum in
    # a pair (sum, divisor) is divided by that divisor.
    metrics: dict[str, Any]


class Gathered:
    """Flags of this process for a loss that compares samples of all ranks (gather.py)."""

    # Whether compute_loss has called `gather_with_gradients`.
    used = False
    # Whether this rank has no samples for this forward, and instead processes a copy of the batch's
    # first sample at weight 0.
    is_padding = False


RETURNED = "what compute_loss (model.py) returns"
SUM_OF_LOSSES = "the sum of the losses of the batch"
COUNTED = "how many losses the total adds up (tokens, images)"


def require_type(value: object, kind: type, what: str) -> None:
    """Raise UserError unless `value`, which one of your functions returned, has this type."""
    if not isinstance(value, kind):
        raise UserError(f"{what}: expected {kind.__name__}, not {type(value).__name__}")


def check_whole_batch(micro_batches: int, validate_batch_size: int) -> None:
    """Raise UserError if a loss compares all samples of a batch, but gets only some at a time."""
    if not Gathered.used:
        return
    problem = "compute_loss compares all samples of a batch (gather_with_gradients), but"
    if micro_batches > 1:
        raise UserError(
            f"{problem} a rank has its samples in {micro_batches} micro-batches: raise "
            "--train.micro-batch-size, or use more ranks"
        )
    if validate_batch_size:
        raise UserError(
            f"{problem} --train.validate-batch-size lets a validation compare fewer or more of "
            "them: leave it at 0"
        )


def check_loss(loss: Any, is_trained: bool = True) -> None:
    """Raise UserError if compute_loss returned something wrong; does not wait for the device.

    `is_trained` is False if the loss was computed without gradients.
    """
    require_type(loss, LossSum, RETURNED)
    if not isinstance(loss.total, torch.Tensor):
        kind = type(loss.total).__name__
        raise UserError(f"{RETURNED}: the total is a {kind}: wanted a tensor, {SUM_OF_LOSSES}")
    device = loss.total.device
    check_number(loss.total, "the total", device)
    if loss.total.dtype in (torch.bfloat16, torch.float16):
        kind = str(loss.total.dtype).removeprefix("torch.")
        raise UserError(
            f"{RETURNED}: the total is {kind}, which rounds a large sum: compute the loss from "
            "logits.float()"
        )
    if is_trained and not loss.total.requires_grad:
        raise UserError(
            f"{RETURNED}: the total has no gradient: wanted {SUM_OF_LOSSES}, as the model gave it, "
            "without .detach(), .item(), torch.tensor(...) or torch.no_grad()"
        )
    check_number(loss.count, "the count", device)
    is_on_host = not isinstance(loss.count, torch.Tensor) or loss.count.device.type == "cpu"
    if is_on_host:
        check_count(float(loss.count))
    if not isinstance(loss.metrics, dict):
        kind = type(loss.metrics).__name__
        raise UserError(f"{RETURNED}: the metrics are a {kind}: wanted a dict, maybe an empty one")
    for name, metric in loss.metrics.items():
        if not isinstance(name, str):
            raise UserError(f"{RETURNED}: a metric is named {name!r}: wanted text")
        if not isinstance(metric, tuple):
            check_number(metric, f"the metric {name!r}", device)
            continue
        if len(metric) != 2:
            raise UserError(
                f"{RETURNED}: the metric {name!r} is a tuple of {len(metric)}: wanted a sum, or a "
                "pair of a sum and its divisor"
            )
        check_number(metric[0], f"the sum of the metric {name!r}", device)
        check_number(metric[1], f"the divisor of the metric {name!r}", device)


def check_number(value: object, what: str, device: torch.device) -> None:
    """Raise UserError unless a value is a real number, or a tensor of one number on `device`."""
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, Real):
            wanted = "a number or a tensor of one number"
            raise UserError(f"{RETURNED}: {what} is a {type(value).__name__}: wanted {wanted}")
        return
    problem = ""
    if value.ndim > 0:
        problem = f"has the shape {tuple(value.shape)}: wanted one number, the sum (.sum())"
    elif value.is_complex():
        problem = "is complex: wanted a real number"
    elif value.device != device:
        problem = f"is on {value.device}, the total on {device}: wanted a number, or a tensor there"
    if problem:
        raise UserError(f"{RETURNED}: {what} {problem}")


def check_count(count: float) -> None:
    """Raise UserError if no batch can have this count."""
    # A count of 0 is valid: a micro-batch may have only images without a box.
    if not 0 <= count < math.inf:
        raise UserError(f"{RETURNED}: the count is {count:g}: wanted {COUNTED}")


def check_counted(sums: torch.Tensor) -> None:
    """Raise UserError if a whole batch has a loss but a count of 0; `sums` is its loss vector.

    This is checked only on a CPU, since reading sums on a GPU would make the host wait. On a GPU
    `judge_step` finds that such a step is bad, so it is skipped.
    """
    if sums.device.type != "cpu":
        return
    total, count, *_ = sums.tolist()
    # A batch with nothing to predict has a count of 0 and a loss of 0, which is not a mistake. A
    # loss of NaN is not an error here either: nan > 0 is False, and `judge_step` finds the NaN.
    if count == 0 and abs(total) > 0:
        raise UserError(f"{RETURNED}: the count of a whole batch is 0: wanted {COUNTED}")


def check_model(model: Any) -> None:
    """Raise UserError unless build_model returned a module that the loop can train."""
    require_type(model, nn.Module, "what build_model (model.py) returns")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            way_out = "state its sizes in build_model (model.py), or call the model there once"
            raise UserError(f"{name} is of a lazy module, without sizes so far: {way_out}")
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.sparse:
            raise UserError(f"{name}.weight has sparse gradients: make it with sparse=False")


def check_blocks(blocks: Any) -> None:
    """Raise UserError unless `blocks` (model.py) returned a list of modules that can be called."""
    advice = "return a list of the layers, as in [*model.layers]"
    if not isinstance(blocks, Iterable):
        raise UserError(f"blocks (model.py) returns {type(blocks).__name__}: {advice}")
    for block in blocks:
        # A ModuleList or ModuleDict is never called, so it cannot be compiled, recomputed or
        # sharded.
        if not isinstance(block, nn.Module) or isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise UserError(f"blocks (model.py) returns a {type(block).__name__} in it: {advice}")


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise UserError if the loop cannot step this optimizer.

    Logs a warning if a trainable parameter is not in the optimizer.
    """
    require_type(optimizer, torch.optim.Optimizer, "what build_optimizer (optim.py) returns")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("LBFGS computes a loss several times a step: use another one (optim.py)")
    stepped: set[nn.Parameter] = set()
    for group in optimizer.param_groups:
        stepped.update(group["params"])
    forgotten = [n for n, p in model.named_parameters() if p.requires_grad and p not in stepped]
    if forgotten:
        log.warning(
            "%d trainable parameters are not in the optimizer, such as %s: they stay as they are, "
            "but cost the time and memory of their gradients. Freeze them with "
            "requires_grad_(False) in build_model, or give them to the optimizer",
            len(forgotten),
            forgotten[0],
        )


def loss_vector(loss: LossSum) -> torch.Tensor:
    """Return the vector [total, count, sum of metric 1, divisor of metric 1, ...] of a loss.

    The vector is float32, detached, and on the device of the loss.
    """
    total = loss.total.detach().float()
    values = [total, loss.count]
    for metric in loss.metrics.values():
        if isinstance(metric, tuple):
            values += metric
        else:
            values += [metric, loss.count]
    tensors: list[torch.Tensor] = []
    for value in values:
        # `new_full` creates the tensor on the device. A tensor that is created on the host would
        # have to be copied to the device, and the host would wait for the copy.
        if not isinstance(value, torch.Tensor):
            value = total.new_full((), value)
        tensors.append(value.detach().float())
    return torch.stack(tensors)


def judge_step(
    sums: torch.Tensor, norm: torch.Tensor, ranks: int, clip: float
) -> tuple[torch.Tensor | float, torch.Tensor | float, torch.Tensor | bool]:
    """Return the factor for the gradients, their norm before clipping, and whether the step is bad.

    The gradients are those of each rank's sum of losses, averaged over the ranks, and `norm` is the
    norm of this average. Multiplied by the returned factor, they become the gradients of the mean
    loss, clipped to the norm `clip` (0: no clipping). The returned norm is that of the gradients of
    the mean loss. `sums` is the loss vector, summed over the ranks. A step is bad if its loss or
    gradient is not finite.
    """
    # On a GPU the values stay scalar tensors, since reading one would make the host wait for the
    # step. On a CPU the values become numbers: there is nothing to wait for, and an operation on a
    # scalar tensor takes ten times longer. `size` is `norm`, as a number or as a tensor.
    if sums.device.type == "cpu":
        total, count, *_ = sums.tolist()
        size = norm.item()
        # A step with a count of 0 is bad. On a GPU a division by 0 gives inf, and the check below
        # finds that the result is not finite. Python would raise an error, so divide by nan.
        if not count:
            count = math.nan
    else:
        total, count, size = sums[0], sums[1], norm
    # Times `ranks`, the mean over the ranks is the sum over the ranks. Divided by `count`, this sum
    # is the mean over all losses.
    scale = ranks / count
    size = size * scale
    # `judged` is finite only if both the loss and the gradient are. Then `judged - judged` is 0.
    # Otherwise it is nan, since inf - inf and nan - nan are nan, and nan != 0 is True. Unlike
    # `isfinite`, this works both for numbers and for tensors.
    judged = size + total
    bad = (judged - judged) != 0
    # Clip like torch.nn.utils.clip_grad_norm_.
    if clip:
        factor = clip / (size + 1e-6)
        if isinstance(factor, torch.Tensor):
            factor = factor.clamp(max=1.0)
        else:
            factor = min(factor, 1.0)
        scale *= factor
    return scale, size, bad


def means(sums: list[float], names: Iterable[str]) -> dict[str, float]:
    """Compute the mean loss and metrics from a sum of loss vectors that was read from the device.

    Raises UserError if the count of the loss is negative. `check_loss` cannot find a negative count
    on a GPU, where it does not read counts.
    """
    count_of_loss = sums[1]
    # A count of NaN is not an error here: it gives a mean of NaN. So `check_count`, which refuses a
    # NaN, is called only for a negative count.
    if count_of_loss < 0:
        check_count(count_of_loss)
    result: dict[str, float] = {}
    # In a loss vector each sum is followed by its count.
    for name, total, count in zip(("loss", *names), sums[::2], sums[1::2], strict=True):
        result[name] = total / count if count else math.nan
    return result
