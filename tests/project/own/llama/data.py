"""A dataset in Hugging Face's style: dictionaries, padded, with a mask and ignored labels."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class Spec:
    """What the model must know."""

    vocabulary: int
    fingerprint: str


class Sentences(Dataset[dict[str, Tensor]]):
    """Padded sentences."""

    def __init__(self, count: int, length: int, first: int) -> None:
        self.count, self.length, self.first = count, length, first

    def __len__(self) -> int:
        """Number of sentences."""
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sentence: input_ids, attention_mask, labels, each [length]."""
        input_ids = (self.first + index + torch.arange(self.length)) % 17
        attention_mask = (torch.arange(self.length) < 4 + index % 8).long()
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


@dataclass(frozen=True)
class DataConfig:
    """Counting, modulo the vocabulary, in sentences of different lengths."""

    samples: int = 64
    length: int = 12


def build_datasets(config: "Config") -> tuple[Sentences, Sentences, Spec]:
    """Training and validation data."""
    count, length = config.data.samples, config.data.length
    spec = Spec(17, f"{count} sentences of {length}")
    return Sentences(count, length, 0), Sentences(16, length, 5), spec
