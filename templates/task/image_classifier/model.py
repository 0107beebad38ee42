"""The model: yours to replace. A small residual network with group norm instead of batch norm.

Other modules rely on three functions at the end (`build_model`, `compute_loss`, `blocks`) and on
`ModelConfig` and `PRESETS`. Your model can be any `nn.Module`; it needs no base class of this file.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UserError
from .loss import LossSum

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec


@dataclass(frozen=True)
class ModelConfig:
    """A residual network."""

    layers: int = 4
    """Residual blocks."""
    width: int = 64
    """Channels of each block; must be a multiple of `groups`."""
    groups: int = 8
    """Groups of the group norm layers (unlike batch norm, these do not mix samples)."""
    dropout: float = 0.1
    """Dropout probability (0: off)."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if min(self.layers, self.groups, self.width) < 1 or self.width % self.groups:
            raise UserError("--model.width must be a multiple of --model.groups, none below 1")
        if not 0 <= self.dropout < 1:
            raise UserError("--model.dropout must be in [0, 1)")


# Groups of settings by name, for --preset NAME. A group replaces defaults of the dataclasses.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model.layers": 2,
        "model.width": 16,
        "model.dropout": 0.0,
        "train.steps": 20,
        "train.global_batch_size": 8,
        "train.micro_batch_size": 4,
        "train.log_every": 5,
        "train.validate_every": 10,
        "train.validate_samples": 24,
        "optim.warmup_steps": 5,
        "checkpoint.every": 5,
    },
}


class Block(nn.Module):
    """Two convolutions: they read the normalised residual stream and add to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(config.groups, config.width)
        self.norm2 = nn.GroupNorm(config.groups, config.width)
        self.conv1 = nn.Conv2d(config.width, config.width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(config.width, config.width, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to x [batch, channels, height, width]."""
        y = self.conv1(F.gelu(self.norm1(x)))
        return x + self.conv2(self.dropout(F.gelu(self.norm2(y))))


class ResidualNetwork(nn.Module):
    """Images in, logits of the classes out."""

    def __init__(self, config: ModelConfig, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, config.width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.GroupNorm(config.groups, config.width)
        self.head = nn.Linear(config.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits [batch, classes] of images [batch, channels, height, width] in 0 ... 1."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(F.gelu(self.norm(x)).mean(dim=(2, 3)))


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """Build the model on the CPU; torch's global random generator initialises it."""
    return ResidualNetwork(config.model, spec.channels, len(spec.classes))


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    """Sum the losses of {"images": [batch, channels, height, width], "labels": [batch]}."""
    labels = batch["labels"]
    logits = model(batch["images"]).float()
    total = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.detach().argmax(dim=1) == labels).sum()
    return LossSum(total, labels.numel(), {"accuracy": correct})


def blocks(model: Any) -> Iterable[nn.Module]:
    """List the modules to compile, shard and recompute one by one: the repeated blocks."""
    return model.blocks
