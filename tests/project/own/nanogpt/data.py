"""Tokens in memory, cut into (x, y) as nanoGPT does."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class DataConfig:
    """A melody of tokens."""

    block_size: int = 32


@dataclass(frozen=True)
class Spec:
    """What the model must know."""

    vocab_size: int
    fingerprint: str


class Stretches:
    """Stretches of tokens and of those that follow."""

    def __init__(self, tokens: Tensor, block_size: int) -> None:
        self.tokens, self.block_size = tokens, block_size

    def __len__(self) -> int:
        """Number of stretches."""
        return (len(self.tokens) - 1) // self.block_size

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """A batch {"x": [n, block_size], "y": [n, block_size]}."""
        places = torch.tensor(ids)[:, None] * self.block_size + torch.arange(self.block_size)
        return {"x": self.tokens[places], "y": self.tokens[places + 1]}


def build_datasets(config: "Config") -> tuple[Stretches, Stretches, Spec]:
    """Training and validation data."""
    tokens = torch.arange(2000).pow(2) % 61
    size = config.data.block_size
    return Stretches(tokens, size), Stretches(tokens[:500], size), Spec(61, f"squares by {size}")
