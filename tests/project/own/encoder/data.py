"""Padded sequences, cut at random places by torch, NumPy and Python, for a whole batch at once."""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class DataConfig:
    """Counting sequences."""

    samples: int = 96


@dataclass(frozen=True)
class Spec:
    """What the model must know."""

    vocabulary: int
    fingerprint: str


class Sequences:
    """Sequences, padded with 0."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, 20, (count, 12), generator=generator)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.tokens)

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """A batch {"tokens": [n, 12], "padding": [n, 12], "labels": [n]}."""
        tokens = self.tokens[ids].clone()
        lengths = torch.randint(4, 13, (len(ids),)) - random.randrange(2) - np.random.randint(2)
        padding = torch.arange(12) >= lengths[:, None]
        return {
            "tokens": tokens.masked_fill(padding, 0),
            "padding": padding,
            "labels": tokens[:, 0],
        }


def build_datasets(config: "Config") -> tuple[Sequences, Sequences, Spec]:
    """Training and validation data."""
    count = config.data.samples
    return Sequences(count, 1), Sequences(16, 2), Spec(20, f"{count} sequences")
