"""Which users like which items: pairs with a label, drawn from tastes of four numbers each."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .config import Config

USERS, ITEMS = 60, 40


@dataclass(frozen=True)
class DataConfig:
    """Pairs of a user and an item."""

    pairs: int = 1600


class Pairs:
    """Pairs as batches of users, items and labels."""

    def __init__(self, pairs: Tensor, liked: Tensor) -> None:
        self.pairs, self.liked = pairs, liked

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.pairs)

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """Users [batch], items [batch] and labels [batch]."""
        users, items = self.pairs[ids].unbind(1)
        return {"users": users, "items": items, "labels": self.liked[users, items]}


@dataclass(frozen=True)
class Spec:
    """What the model must know."""

    users: int
    items: int
    fingerprint: str


def build_datasets(config: "Config") -> tuple[Pairs, Pairs, Spec]:
    """Training and validation pairs, none in both."""
    generator = torch.Generator().manual_seed(0)
    users, items = (torch.randn(n, 4, generator=generator) for n in (USERS, ITEMS))
    liked = (users @ items.T > 0).long()
    order = torch.randperm(USERS * ITEMS, generator=generator)
    pairs = torch.stack([order // ITEMS, order % ITEMS], 1)
    train, validation = pairs[: config.data.pairs], pairs[config.data.pairs :]
    spec = Spec(USERS, ITEMS, f"tastes {config.data.pairs}")
    return Pairs(train, liked), Pairs(validation, liked), spec
