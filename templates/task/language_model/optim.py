"""The optimizer: yours to change. Muon for the matrices of the blocks, AdamW for all else."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .distributed import parallel
from .errors import UserError
from .model import blocks
from .schedule import ScheduleConfig

# The default of --train.global-batch-size and --train.micro-batch-size. The learning rate below is
# tuned for it.
BATCH_SIZE = 16
# The default of --train.validate-samples (0: all).
VALIDATION_SAMPLES = 256


@dataclass(frozen=True)
class OptimConfig(ScheduleConfig):
    """The optimizer, and the schedule of its rate."""

    # Tuned for Muon. With adamw, start with a lower rate, such as 1e-3.
    learning_rate: float = 2e-2
    """Peak learning rate."""
    name: Literal["adamw", "muon"] = "muon"
    """Optimizer; muon updates the matrices of the blocks, AdamW everything else."""
    weight_decay: float = 0.1
    """Decoupled weight decay, relative to the learning rate."""
    beta1: float = 0.9
    """Decay of AdamW's mean of the gradients, per step."""
    beta2: float = 0.95
    """Decay of AdamW's mean of the squared gradients, per step."""
    momentum: float = 0.9
    """Decay of Muon's mean of the gradients, per step."""
    clip: float = 1.0
    """Gradient norm to clip to (0: off)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in (self.beta1, self.beta2, self.momentum)):
            raise UserError("optim: betas and momentum must be in [0, 1)")
        if min(self.weight_decay, self.clip) < 0:
            raise UserError("optim: weight-decay and clip must be >= 0")


# Layers whose weight consists of several matrices, stacked along the rows: here q, k and v. Muon
# updates each of these matrices separately.
FUSED = {"qkv": 3}
# The maximum number of values in the matrices that are orthogonalized at once. In bfloat16 these
# matrices take 64 MB, and the iteration needs about three times this memory.
TOGETHER = 1 << 25


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters. Weight decay skips biases and norms."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UserError("the model has no trainable parameter")
    hidden: dict[nn.Parameter, int] = {}
    if config.name == "muon":
        hidden = hidden_matrices(model)
    rest = [p for p in trainable if p not in hidden]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim >= 2]},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Put all weights that consist of the same number of matrices into one group.
    for count in sorted(set(hidden.values())):
        weights = [p for p in trainable if hidden.get(p) == count]
        groups.append({"params": weights, "matrices": count})
    groups = [group for group in groups if group["params"]]
    if hidden:
        return Muon(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            momentum=config.momentum,
        )
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=supports_fused(trainable),
    )


def hidden_matrices(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the weights that Muon updates, each with the number of matrices in it."""
    # Muon is for matrices that map activations to activations: those of the blocks. AdamW updates
    # all other parameters: biases, norms, and the embedding (also used by the output layer), which
    # is a table with a row for each token.
    hidden: dict[nn.Parameter, int] = {}
    for block in blocks(model):
        for name, p in block.named_parameters():
            if p.ndim == 2 and p.is_floating_point():
                # The layer of "attention.qkv.weight" is "qkv".
                layer = name.removesuffix(".weight").rpartition(".")[2]
                count = FUSED.get(layer, 1)
                # If the rows cannot be divided by `count`, the weight is a single matrix.
                hidden[p] = count if len(p) % count == 0 else 1
    return hidden


def supports_fused(parameters: list[nn.Parameter]) -> bool:
    """Check whether AdamW can update all of these parameters with one kernel (fused=True)."""
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)


class Muon(torch.optim.Optimizer):
    """Muon for groups with "matrices" (the number of matrices in a parameter); AdamW for others.

    The update of a matrix is its momentum with all singular values brought near one (Jordan et al.,
    2024: kellerjordan.github.io/posts/muon). The update is scaled to the size of AdamW's updates
    (Liu et al., 2025: arXiv 2502.16982), so that one learning rate and one weight decay suit both.
    `parallel.divide_work` chooses the rank that computes an update.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "matrices": 0,
        }
        super().__init__(params, defaults)
        parameters: list[nn.Parameter] = []
        for group in self.param_groups:
            parameters += group["params"]
        fused = supports_fused(parameters)
        # AdamW shares the dicts of the groups with this optimizer. The schedule and checkpoints
        # know only this optimizer, and what they write to its groups holds for AdamW, too.
        self.adamw: Any = torch.optim.AdamW(self.param_groups, fused=fused)
        # With this flag, the training loop sets `found_inf` and then calls `step` even in a bad
        # step, whose loss or gradient is not finite. So `step` itself has to skip the update.
        self._step_supports_amp_scaling = fused

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update each parameter that has a gradient; change nothing if `found_inf` is 1.

        If several ranks divide the work and one of them fails, the others wait for its results.
        """
        found_inf = getattr(self, "found_inf", None)
        self.adamw.found_inf = found_inf
        # AdamW keeps its state in `self.state`, and updates only the groups without matrices. Set
        # its two attributes at each step, since load_state_dict() replaces the state and the groups
        # of `self`.
        self.adamw.state = self.state
        self.adamw.param_groups = [g for g in self.param_groups if not g["matrices"]]
        self.adamw.step()
        for group in self.param_groups:
            if group["matrices"]:
                with_gradient = [p for p in group["params"] if p.grad is not None]
                if with_gradient:
                    self._step_matrices(with_gradient, group, found_inf)

    def _step_matrices(
        self, matrices: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        """Update these parameters of a group; each of them has a gradient."""
        for p in matrices:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        weights = [parallel.local_part(p) for p in matrices]
        gradients = [parallel.local_part(p.grad) for p in matrices if p.grad is not None]
        momenta = [parallel.local_part(self.state[p]["momentum_buffer"]) for p in matrices]
        rate: Any = group["lr"]
        if found_inf is not None:
            # `found_inf` is 1 in a bad step, otherwise 0. A bad step must change nothing, but an
            # `if` would wait for the device. So in a bad step the rate becomes zero, and the
            # momentum replaces the gradient: then averaging the two does not change the momentum.
            rate = rate * (1.0 - found_inf)
            is_bad = found_inf.bool()
            for gradient, momentum in zip(gradients, momenta, strict=True):
                torch.where(is_bad, momentum, gradient, out=gradient)
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        # Nesterov momentum: average the gradient with the new momentum once more.
        updates = list(torch._foreach_lerp(gradients, momenta, group["momentum"]))
        # Round to bfloat16 only if torch also rounds all other matrix products ("medium").
        is_rounded = torch.get_float32_matmul_precision() == "medium"
        if is_rounded:
            updates = cast(updates, [torch.bfloat16] * len(updates))
        work = partial(orthogonalized, parts=group["matrices"])
        updates = parallel.divide_work(updates, matrices, work)
        # Cast back to the dtype of the weights. With mixed dtypes, the `_foreach` functions below
        # would start a kernel for each matrix.
        if is_rounded:
            updates = cast(updates, [w.dtype for w in weights])
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(weights, updates)


def cast(tensors: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """Cast each tensor to the dtype at the same index; one kernel casts many tensors."""
    results: list[Tensor] = []
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        results.append(torch.empty_like(tensor, dtype=dtype))
    torch._foreach_copy_(results, tensors)
    return results


def orthogonalized(matrices: list[Tensor], parts: int = 1) -> list[Tensor]:
    """Return each matrix with nearly equal singular values, at the size of AdamW's updates.

    Muon does not need exactly equal values, so a few steps of `newton_schulz` suffice. Each tensor
    in `matrices` is a stack of `parts` matrices, which are orthogonalized separately.
    """
    results = [*matrices]
    # Matrices of the same shape form a batch, which takes no more kernels than a single matrix.
    by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(index)
    for shape, indices in by_shape.items():
        count = max(1, TOGETHER // shape.numel())
        for first in range(0, len(indices), count):
            chunk = indices[first : first + count]
            x = torch.stack([matrices[index] for index in chunk])
            # Separate the parts of each tensor: [tensors * parts, rows of a part, columns].
            x = x.unflatten(1, (parts, -1)).flatten(0, 1)
            _, rows, columns = x.shape
            if rows > columns:
                x = newton_schulz(x.mT).mT.contiguous()
            else:
                x = newton_schulz(x)
            # If all singular values of a matrix are one, the root mean square of its entries is
            # 1 / sqrt(max(rows, columns)). Scale it to 0.2, a typical value of AdamW's updates.
            x *= 0.2 * max(rows, columns) ** 0.5
            # Stack the parts of each tensor again.
            x = x.unflatten(0, (-1, parts)).flatten(1, 2)
            for index, result in zip(chunk, x, strict=True):
                results[index] = result
    return results


def newton_schulz(x: Tensor) -> Tensor:
    """Bring the singular values of wide matrices x [count, rows, columns] near one; overwrite x."""
    # Dividing by the Frobenius norm makes all singular values at most 1. `clamp` avoids a division
    # by zero.
    x /= x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-15)
    # Each step maps a singular value s to 3.4445 s - 4.7750 s^3 + 2.0315 s^5 and keeps the singular
    # vectors. Five steps bring values from 0.002 to 1 into the range 0.68 ... 1.21. The values do
    # not converge to 1: the coefficients are chosen to raise small values fast (Jordan et al.,
    # 2024).
    for _ in range(5):
        square = x @ x.mT
        square = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, square, x, beta=3.4445)
    return x
