"""A bottleneck with noise in training behind torch's own encoder, whose key biases get no gradient.

The encoder reads whether any position is padded: a library's line that waits for the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loss import LossSum

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec

PRESETS = {"default": {}, "tiny": {"train.global_batch_size": 8, "train.micro_batch_size": 4}}


@dataclass(frozen=True)
class ModelConfig:
    """An encoder."""

    width: int = 16


class Bottleneck(nn.Module):
    """The first label of a sequence, from a sample of a normal distribution, as a VAE draws it."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(12, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mean, self.log_scale = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("class_weights", torch.ones(vocabulary))

    def forward(self, tokens: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [batch, vocabulary], and how far the distribution is from the standard one."""
        x = self.encoder(self.embedding(tokens) + self.places, src_key_padding_mask=padding)
        mean, log_scale = self.mean(x[:, 0]), self.log_scale(x[:, 0])
        z = mean
        if self.training:
            z = mean + log_scale.exp() * torch.randn_like(mean)
        distance = 0.5 * (mean**2 + (2 * log_scale).exp() - 2 * log_scale - 1).sum()
        return self.head(z), distance


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """The model."""
    return Bottleneck(config.model.width, spec.vocabulary)


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    """Cross-entropy with class weights from a registered buffer, and the distance."""
    logits, distance = model(batch["tokens"], batch["padding"])
    labels = batch["labels"]
    total = F.cross_entropy(logits, labels, weight=model.class_weights, reduction="sum")
    return LossSum(total + 0.01 * distance, len(labels), {})


def blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The layers."""
    return model.encoder.layers
