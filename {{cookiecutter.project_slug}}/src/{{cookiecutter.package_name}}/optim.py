"""The optimizer and its schedule: yours to change."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from .engine import UserError


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, a linear warm-up, a cosine decay."""

    learning_rate: float = 1e-3
    warmup_steps: int = 20
    final_fraction: float = 0.1
    """The schedule ends at this fraction of the learning rate."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    """Gradients are scaled down to this norm (0: never)."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if not 0 < self.learning_rate < math.inf or self.clip < 0 or self.warmup_steps < 0:
            raise UserError("optim: learning-rate must be > 0, clip and warmup-steps >= 0")


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; matrices decay, biases and norms do not."""
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


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0, of a run of `steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * cosine)
