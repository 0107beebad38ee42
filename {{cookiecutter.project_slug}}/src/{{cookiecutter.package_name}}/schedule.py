"""Compute the learning rate and the EMA decay of each step."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from .errors import UserError

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule (a linear warm-up, then a decay), and EMA of the weights."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the decay to the final learning rate; wsd stays at the peak, then falls linearly."""
    warmup_steps: int = 20
    """Number of steps over which the learning rate rises linearly to its peak."""
    final_fraction: float = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak (wsd, cosine and linear)."""
    decay_share: float = 0.2
    """wsd: the rate falls in this last fraction of the steps after the warm-up."""
    ema: float = 0.0
    """EMA decay per step, such as 0.999 (0: off); use it with `infer` or `export` --weights ema."""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise UserError("--optim.learning-rate must be finite and > 0")
        if self.warmup_steps < 0:
            raise UserError("--optim.warmup-steps must be >= 0")
        if not 0 <= self.final_fraction <= 1:
            raise UserError("--optim.final-fraction must be in [0, 1], such as 0.1 for 10%")
        if not 0 < self.decay_share <= 1:
            raise UserError("--optim.decay-share must be in (0, 1]")
        if not 0 <= self.ema < 1:
            raise UserError("--optim.ema must be in [0, 1)")


def set_schedule(optimizer: torch.optim.Optimizer, config: "Config", step: int) -> None:
    """Set the learning rate and the EMA decay for a step (counted from 0).

    A group's learning rate is the schedule's, multiplied by its "rate_factor" (default: 1).
    """
    rate = learning_rate(config.optim, step, config.train.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)
        # A smaller decay at the start keeps the first weights from dominating the average, as in
        # TensorFlow's ExponentialMovingAverage with `num_updates`.
        if "ema_decay" in group:
            group["ema_decay"] = min(config.optim.ema, (1 + step) / (10 + step))


def learning_rate(config: ScheduleConfig, step: int, steps: int) -> float:
    """Compute the learning rate of a step (counted from 0) in a run of `steps`."""
    # The first step has a small rate instead of 0, and the last step of the warm-up has the peak.
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    # `progress` is 0 in the first step after the warm-up, and would be 1 in the step after the run.
    # The maximum avoids a division by 0 if a run has no steps after its warm-up.
    decay_steps = max(1, steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    # `height` falls from 1 (the peak) to 0 (the final rate).
    if config.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.schedule == "linear":
        height = 1 - progress
    elif config.schedule == "wsd":
        # 1 until the last `decay_share` of the steps, then linear to 0.
        height = min(1.0, (1 - progress) / config.decay_share)
    else:
        height = 1.0
    final = config.final_fraction
    return config.learning_rate * (final + (1 - final) * height)
