"""How much of a gradient is noise, which says how large a batch is worth its samples."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from ..checkpoint.manifest import published
from ..checkpoint.paths import checkpoints_of
from ..checkpoint.reader import find_checkpoint
from ..checkpoint.transfer import load_weights
from ..device import move
from ..distributed import Group
from ..errors import RankError, UserError
from ..model import compute_loss
from ..sampling import Loader, shares
from ..train import State


def go_to_the_run(state: State) -> None:
    """Take the weights of the run's newest checkpoint, if it has any that fit."""
    directory = state.config.directory
    with contextlib.suppress(UserError, RankError):
        if published(checkpoints_of(directory)):
            path, manifest = find_checkpoint(directory, None)
            load_weights(path, state.model, None, Group(), strict=True)
            state.step = manifest["step"]


def gradient_norms(state: State, batches: int = 16) -> tuple[float, float, int, int]:
    """Of gradients of small batches, all at the present weights: how long they are, and their mean.

    Returns the mean of the squared norms, the squared norm of the mean, the samples in each small
    batch and the number of these.
    """
    source, whole = state.loader.source, state.config.train.global_batch_size
    pieces = next(n for n in (4, 2, 1) if whole % n == 0)
    batches = max(2, min(batches, len(source.dataset) // whole))
    loader = Loader(source.dataset, source.order, shares(whole, whole // pieces, 0, 1))
    loader.seek(state.step)
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    total, squares = [torch.zeros_like(p) for p in parameters], 0.0
    for _ in range(batches):
        for batch in loader.next():
            loss = compute_loss(state.module, move(batch, state.world.device))
            gradients = torch.autograd.grad(
                loss.total / loss.count, parameters, materialize_grads=True, allow_unused=True
            )
            squares += squared_norm(gradients)
            torch._foreach_add_(total, gradients)
    count = batches * pieces
    return squares / count, squared_norm(total) / count**2, whole // pieces, count


def squared_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Of all of them together."""
    return float(torch.stack(torch._foreach_norm(list(tensors))).double().square().sum())


def noise_scale(squares: float, square_of_mean: float, samples: int, count: int) -> dict[str, Any]:
    """The gradient noise scale in samples, from what `gradient_norms` returns.

    The sum of the variances of a sample's gradient over the squared norm of the true gradient
    (McCandlish et al., 2018, "simple" noise scale), each without bias. Where the mean of all
    gradients is mostly noise itself, "value" is None: it is then above "seen", the samples seen.
    """
    variance = (squares - square_of_mean) * count / (count - 1)
    signal = square_of_mean - variance / count
    resolved = signal > square_of_mean / 2
    return {"value": samples * variance / signal if resolved else None, "seen": samples * count}
