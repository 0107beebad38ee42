"""A recommender: tables of users and items, and a small network on top."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from .loss import LossSum

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec


@dataclass(frozen=True)
class ModelConfig:
    """Tables and a network."""

    width: int = 8


PRESETS: dict[str, dict[str, Any]] = {
    "default": {
        "train.steps": 600,
        "train.global_batch_size": 64,
        "train.micro_batch_size": 64,
        "train.validate_every": 20,
        "optim.learning_rate": 0.01,
        "optim.schedule": "constant",
    },
    "tiny": {"train.steps": 40},
}


class Recommender(nn.Module):
    """Scores [batch] of a batch of pairs."""

    def __init__(self, width: int, users: int, items: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)
        self.network = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Log odds that a user likes an item."""
        product = self.users(batch["users"]) * self.items(batch["items"])
        return product.sum(1) + self.network(product).squeeze(1)


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """The model."""
    return Recommender(config.model.width, spec.users, spec.items)


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    """The loss of a batch."""
    labels = batch["labels"].float()
    total = F.binary_cross_entropy_with_logits(model(batch), labels, reduction="sum")
    return LossSum(total, len(labels), {})


def blocks(model: nn.Module) -> Iterable[nn.Module]:
    """There are none."""
    return []
