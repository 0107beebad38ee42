"""Pairs of two kinds of features that belong together."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class DataConfig:
    """None: the pairs are made up."""


@dataclass(frozen=True)
class Spec:
    """The data."""

    fingerprint: str = "pairs"


class Pairs:
    """Each text is a linear function of its image."""

    def __init__(self, seed: int, size: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.images = torch.randn(size, 8, generator=drawn)
        way = torch.randn(8, 6, generator=torch.Generator().manual_seed(7))
        self.texts = self.images @ way

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "texts": self.texts[index]}


def build_datasets(config: "Config") -> tuple[Pairs, Pairs, Spec]:
    """Return pairs to train on and others to validate on."""
    return Pairs(1, 64), Pairs(2, 24), Spec()
