"""The optimizer: yours to change."""

from dataclasses import dataclass

import torch
from torch import nn

from .errors import UserError
from .schedule import ScheduleConfig

# The default of --train.global-batch-size and --train.micro-batch-size. The learning rate below is
# tuned for it.
BATCH_SIZE = 64
# The default of --train.validate-samples (0: all).
VALIDATION_SAMPLES = 0


@dataclass(frozen=True)
class OptimConfig(ScheduleConfig):
    """AdamW, and the schedule of its rate."""

    learning_rate: float = 2e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay, relative to the learning rate."""
    beta1: float = 0.9
    """Decay of AdamW's mean of the gradients, per step."""
    beta2: float = 0.95
    """Decay of AdamW's mean of the squared gradients, per step."""
    clip: float = 1.0
    """Gradient norm to clip to (0: off)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise UserError("optim: betas must be in [0, 1)")
        if min(self.weight_decay, self.clip) < 0:
            raise UserError("optim: weight-decay and clip must be >= 0")


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW for the trainable parameters. Weight decay skips biases and norms."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UserError("the model has no trainable parameter")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # A fused AdamW updates all parameters with one kernel, which cannot update complex parameters.
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in trainable)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=fused)
