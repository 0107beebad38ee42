"""Images of different sizes, each with none to three labelled boxes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class DataConfig:
    """Noise."""

    samples: int = 64


@dataclass(frozen=True)
class Spec:
    """What the model must know."""

    fingerprint: str


class Images:
    """Noise, the same for the same id."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        """Number of images."""
        return self.count

    def sample(self, i: int) -> tuple[Tensor, dict[str, Tensor]]:
        """An image [1, height, width] and its boxes."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + i)
        boxes = int(torch.randint(0, 4, (), generator=generator))
        height, width = torch.randint(6, 12, (2,), generator=generator).tolist()
        image = torch.rand(1, height, width, generator=generator)
        labels = torch.randint(0, 3, (boxes,), generator=generator)
        return image, {"boxes": torch.rand(boxes, 4, generator=generator), "labels": labels}

    def __getitems__(self, ids: list[int]) -> tuple[list[Tensor], list[Any]]:
        """A batch: a list of images and a list of their boxes."""
        samples = [self.sample(i) for i in ids]
        return [image for image, _ in samples], [target for _, target in samples]


def build_datasets(config: "Config") -> tuple[Images, Images, Spec]:
    """Training and validation data."""
    count = config.data.samples
    return Images(count, 1), Images(16, 2), Spec(f"{count} images")
