"""A dataset in torchvision's style: one (image, label) at a time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class DataConfig:
    """Coloured noise."""

    samples: int = 64


class Noise(Dataset[tuple[Tensor, int]]):
    """Images whose class is their brightest channel."""

    def __init__(self, count: int, seed: int) -> None:
        self.images = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """An image [3, 8, 8] and its label."""
        image = self.images[index]
        return image, int(image.mean(dim=(1, 2)).argmax())


@dataclass(frozen=True)
class Spec:
    """What the model must know."""

    classes: int
    fingerprint: str


def build_datasets(config: "Config") -> tuple[Noise, Noise, Spec]:
    """Training and validation data."""
    return Noise(config.data.samples, 1), Noise(16, 2), Spec(3, f"noise {config.data.samples}")
