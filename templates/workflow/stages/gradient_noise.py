"""The gradient noise scale: how large a batch is worth its samples, and what to try."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from ..checkpoint.reader import find_checkpoint
from ..checkpoint.transfer import load_weights
from ..device import move
from ..distributed import Group
from ..errors import RankError, UserError
from ..model import compute_loss
from ..sampling import shares
from ..train import State


def load_newest(state: State) -> None:
    """Take the weights of the run's newest checkpoint, if it has one that fits."""
    with contextlib.suppress(UserError, RankError):
        path, manifest = find_checkpoint(state.config.directory)
        load_weights(path, state.model, None, Group(), strict=True)
        state.step = manifest["step"]


def gradient_norms(state: State, batches: int) -> tuple[float, float, int, int]:
    """Norms of gradients of small batches, all at the present weights.

    Returns the mean of the squared norms, the squared norm of the mean gradient, the samples in
    each small batch and the number of these.
    """
    batch_size = state.config.train.global_batch_size
    pieces = next(n for n in (4, 2, 1) if batch_size % n == 0)
    plan = shares(batch_size, batch_size // pieces, 0, 1)
    batches = max(2, min(batches, len(state.loader.source.dataset) // batch_size))
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    total, squares = [torch.zeros_like(p) for p in parameters], 0.0
    for step in range(state.step, state.step + batches):
        for batch in state.loader.of(step, plan):
            loss = compute_loss(state.module, move(batch, state.world.device))
            gradients = torch.autograd.grad(
                loss.total / loss.count, parameters, materialize_grads=True, allow_unused=True
            )
            squares += squared_norm(gradients)
            torch._foreach_add_(total, gradients)
    count = batches * pieces
    return squares / count, squared_norm(total) / count**2, batch_size // pieces, count


def squared_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Of all of them together."""
    return float(torch.stack(torch._foreach_norm(list(tensors))).double().square().sum())


def noise_scale(squares: float, square_of_mean: float, samples: int, count: int) -> dict[str, Any]:
    """The gradient noise scale in samples, from what `gradient_norms` returns.

    The sum of the variances of a sample's gradient over the squared norm of the true gradient
    (McCandlish et al., 2018, "simple" noise scale), each without bias. If the mean of all gradients
    is mostly noise itself, "value" is None: it is then above "seen", the samples seen.
    """
    variance = (squares - square_of_mean) * count / (count - 1)
    signal = square_of_mean - variance / count
    resolved = signal > square_of_mean / 2
    return {"value": samples * variance / signal if resolved else None, "seen": samples * count}


def advice_on_batch(batch: int, ranks: int, one: dict[str, Any]) -> str:
    """Whether to change the learning rate with more ranks, and when a larger batch stops paying."""
    text = f"learning rate: leave it, the global batch is {batch} on any number of ranks"
    if not (noise := one["noise_scale"]):
        return text
    value, larger = noise["value"], batch * ranks
    scale = f"above {noise['seen']}"
    if value is not None:
        larger, scale = min(larger, int(value)), f"about {value:.{0 if value >= 10 else 1}f}"
    text += f". The gradient noise scale at step {noise['step']} is {scale} samples: "
    if larger > batch:
        rule = "linear" if one["nature"]["optimizer"] == "SGD" else "sqrt"
        text += f"larger batches pay up to there. To try: --train.global-batch-size {larger} "
        text += f"--optim.scaling {rule} --optim.base-batch-size {batch}"
    else:
        text += f"a larger batch than {batch} would bring little"
    return f"{text}. It grows while the loss falls: measure again later in the run"
