"""Random vectors in memory in place of the rendered data; `Vectors` also serves the peers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class DataConfig:
    """Random vectors with a random class each."""

    samples: int = 65_536
    """Training samples; 64 others are for validation."""
    features: int = 32
    classes: int = 10


@dataclass(frozen=True)
class Spec:
    """What the model has to know of the data, and what identifies it."""

    fingerprint: str
    features: int
    classes: int


class Vectors:
    """Vectors in memory, read a batch at a time."""

    draws = False

    def __init__(self, samples: int, features: int, classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(samples, features, generator=generator)
        self.labels = torch.randint(classes, (samples,), generator=generator)

    def __len__(self) -> int:
        """Number of vectors."""
        return len(self.labels)

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """A batch: (float32 [n, features], int64 [n])."""
        index = torch.tensor(ids)
        return self.features[index], self.labels[index]


def build_datasets(config: "Config") -> tuple[Vectors, Vectors, Spec]:
    """Training and validation vectors."""
    data = config.data
    train = Vectors(data.samples, data.features, data.classes)
    validation = Vectors(64, data.features, data.classes)
    spec = Spec(fingerprint="random vectors", features=data.features, classes=data.classes)
    return train, validation, spec
