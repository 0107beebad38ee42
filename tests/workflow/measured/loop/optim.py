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

BATCH_SIZE = 16
VALIDATION_SAMPLES = 256


@dataclass(frozen=True)
class OptimConfig(ScheduleConfig):
    """The optimizer, and the schedule of its rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer; muon updates the matrices of the blocks, AdamW everything else."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    """Momentum of Muon."""
    clip: float = 1.0
    """Gradient norm to clip to (0: off)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in (self.beta1, self.beta2, self.momentum)):
            raise UserError("optim: betas and momentum must be in [0, 1)")
        if min(self.weight_decay, self.clip) < 0:
            raise UserError("optim: weight-decay and clip must be >= 0")


# Layers whose matrix is several, one above the other; Muon takes each by itself.
FUSED = {"qkv": 3}
TOGETHER = 1 << 22  # values of the matrices that are orthogonalised at once


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters; matrices decay, biases and norms do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UserError("the model has no trainable parameter")
    hidden: dict[nn.Parameter, int] = {}  # the matrices of the blocks, and how many each is made of
    for block in blocks(model) if config.name == "muon" else ():
        for name, p in block.named_parameters():
            if p.ndim == 2 and p.is_floating_point():
                hidden[p] = FUSED.get(name.removesuffix(".weight").rpartition(".")[2], 1)
    rest = [p for p in trainable if p not in hidden]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim >= 2]},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    for parts in sorted({*hidden.values()}):
        chosen = [p for p in trainable if hidden.get(p) == parts]
        groups.append({"params": chosen, "matrices": parts})
    groups = [group for group in groups if group["params"]]
    rates = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2)}
    rates |= {"weight_decay": config.weight_decay}
    if hidden:
        return Muon(groups, **rates, momentum=config.momentum)
    return torch.optim.AdamW(groups, **rates, fused=have_one_kernel(trainable))


def have_one_kernel(parameters: list[Any]) -> bool:
    """Whether AdamW can update them all at once (fused)."""
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)


class Muon(torch.optim.Optimizer):
    """Muon for the groups whose parameters are "matrices" (so many in each); AdamW for the others.

    A matrix changes by its momentum with all singular values near one (Jordan et al., 2024:
    kellerjordan.github.io/posts/muon), at the size of AdamW's updates (Liu et al., 2025: arXiv
    2502.16982), so that rate and weight decay of AdamW fit both. One rank works each matrix out.
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
        own = {"momentum": momentum, "matrices": 0}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **own}
        super().__init__(params, defaults)
        fused = have_one_kernel([p for group in self.param_groups for p in group["params"]])
        self.adamw = torch.optim.AdamW(self.param_groups, fused=fused)  # it shares the groups
        self._step_supports_amp_scaling = fused  # a step with `found_inf` set changes nothing

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take a step on the gradients that are there."""
        found_inf = getattr(self, "found_inf", None)
        setattr(self.adamw, "found_inf", found_inf)  # noqa: B010 - which its type does not declare
        self.adamw.state = self.state
        self.adamw.param_groups = [g for g in self.param_groups if not g["matrices"]]
        self.adamw.step()
        for group in self.param_groups:
            matrices = [p for p in group["params"] if group["matrices"] and p.grad is not None]
            if matrices:
                self._step_matrices(matrices, group, found_inf)

    def _step_matrices(
        self, matrices: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        for p in (each for each in matrices if not self.state[each]):
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        weights = [parallel.local_part(p) for p in matrices]
        gradients = [parallel.local_part(p.grad) for p in matrices if p.grad is not None]
        momenta = [parallel.local_part(self.state[p]["momentum_buffer"]) for p in matrices]
        rate: Any = group["lr"]
        if found_inf is not None:  # the rest stays as it is, but without waiting for the device
            rate = rate * (1.0 - found_inf)
            for gradient, momentum in zip(gradients, momenta, strict=True):
                torch.where(found_inf.bool(), momentum, gradient, out=gradient)
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov's
        if torch.get_float32_matmul_precision() == "medium":  # of the products of all layers
            updates = [update.bfloat16() for update in updates]
        work = partial(orthogonalized, parts=group["matrices"])
        results = parallel.divide_work(list(updates), matrices, work)
        # Cast once to the weights' dtype: in mixed ones each matrix would be a kernel of its own.
        updates = [update.to(w.dtype) for update, w in zip(results, weights, strict=True)]
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(weights, updates)


def orthogonalized(matrices: list[Tensor], parts: int = 1) -> list[Tensor]:
    """The nearest matrices with equal singular values, roughly, at 0.2 a value (AdamW's size).

    Five steps of a Newton-Schulz iteration, whose coefficients bring singular values of 0.001 to 1
    into 0.7 ... 1.2 (Jordan et al., 2024). Of each matrix, `parts` of its rows by themselves.
    """
    results = [part for matrix in matrices for part in matrix.tensor_split(parts)]
    alike: dict[tuple[int, int], list[int]] = {}  # small ones of a shape cost as little as one
    for place, (rows, columns) in enumerate(part.shape for part in results):
        alike.setdefault((min(rows, columns), max(rows, columns)), []).append(place)
    for (short, long), places in alike.items():
        count = max(1, TOGETHER // (short * long))
        for some in (places[at : at + count] for at in range(0, len(places), count)):
            given = [results[place] for place in some]
            x = torch.stack([m if m.shape == (short, long) else m.T for m in given])
            x /= x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-15)  # smaller squares would be zeros
            for _ in range(5):
                square = x @ x.mT
                square = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
                x = torch.baddbmm(x, square, x, beta=3.4445)
            x *= 0.2 * long**0.5
            for place, m, result in zip(some, given, x, strict=True):
                results[place] = result if m.shape == result.shape else result.T
    return [torch.cat(results[at : at + parts]) for at in range(0, len(results), parts)]
