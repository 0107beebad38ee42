"""A module in torchvision's style: batch statistics, a frozen stem, logits out."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from .loss import LossSum

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec


@dataclass(frozen=True)
class ModelConfig:
    """A residual network."""

    width: int = 8


PRESETS = {"default": {}, "tiny": {"train.micro_batch_size": 4}}


class BasicBlock(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, width, height, width]."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """Images in, logits out."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(BasicBlock(width), BasicBlock(width))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, classes] of images [batch, 3, height, width]."""
        x = self.layer1(F.relu(self.bn1(self.conv1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """The model, its stem frozen as for fine-tuning."""
    model = ResNet(config.model.width, spec.classes)
    model.conv1.requires_grad_(False)
    return model


def compute_loss(model: nn.Module, batch: list[Tensor]) -> LossSum:
    """Loss of a collated batch of (image, label)."""
    images, labels = batch
    total = F.cross_entropy(model(images).float(), labels, reduction="sum")
    return LossSum(total, len(labels), {})


def blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The residual blocks."""
    return model.layer1
