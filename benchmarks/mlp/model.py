"""A perceptron in place of the rendered model: the least a step can be, or as large as wanted."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from .loss import LossSum

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec


@dataclass(frozen=True)
class ModelConfig:
    """A perceptron."""

    layers: int = 1
    width: int = 64


PRESETS: dict[str, dict[str, Any]] = {"default": {}}


def perceptron(features: int, classes: int, layers: int, width: int) -> nn.Sequential:
    """Linear layers with ReLU between them; also what the peers train."""
    sizes = [features, *[width] * layers]
    hidden = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """The model."""
    return perceptron(spec.features, spec.classes, config.model.layers, config.model.width)


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> LossSum:
    """Cross entropy of a batch of (features, labels)."""
    features, labels = batch
    total = F.cross_entropy(model(features), labels, reduction="sum")
    return LossSum(total, labels.numel(), {})


def blocks(model: nn.Module) -> Iterable[nn.Module]:
    """None that repeats."""
    return []
