"""The optimizer and its schedule: yours to change."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from .errors import UserError

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, a linear warm-up, a cosine decay."""

    learning_rate: float = 1e-3
    """The highest rate of the schedule."""
    scaling: Literal["none", "sqrt", "linear"] = "none"
    """Scale the learning rate with train.global-batch-size / base-batch-size: by the square root
    (usual for Adam) or linearly (usual for SGD). The number of processes has no effect."""
    base_batch_size: int = 256
    """The global batch that `learning_rate` was tuned for."""
    warmup_steps: int = 20
    final_fraction: float = 0.1
    """The schedule ends at this fraction of the learning rate."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    """Gradients are scaled down to this norm (0: never)."""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf or self.clip < 0 or self.warmup_steps < 0:
            raise UserError("optim: learning-rate must be > 0, clip and warmup-steps >= 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.weight_decay >= 0):
            raise UserError("optim: betas must be in [0, 1), weight-decay >= 0")
        if self.base_batch_size < 1:
            raise UserError("--optim.base-batch-size must be at least 1")


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; matrices decay, biases and norms do not.

    The learning rate of a group is the schedule's times its "rate_factor" (default: 1).
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UserError("the model has no trainable parameter")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=trainable[0].device.type in ("cpu", "cuda"),  # one kernel for all parameters
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, config: "Config", step: int) -> None:
    """Set the learning rate of each group for optimizer step `step`, counted from 0."""
    rate = learning_rate(config.optim, step, config.train.steps, config.train.global_batch_size)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)


def learning_rate(config: OptimConfig, step: int, steps: int, batch_size: int) -> float:
    """The rate of optimizer step `step`, counted from 0, of a run of `steps`."""
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.scaling]
    highest = config.learning_rate * (batch_size / config.base_batch_size) ** power
    if step < config.warmup_steps:
        return highest * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return highest * (config.final_fraction + (1 - config.final_fraction) * cosine)
