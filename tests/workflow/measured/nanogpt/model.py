"""A model with the layers of nanoGPT's: learned positions, LayerNorm, GELU, no biases."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loss import LossSum
from .own_model import PRESETS as PRESETS
from .own_model import ModelConfig as ModelConfig


class Norm(nn.Module):
    """LayerNorm with a scale, without a shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer."""
        return F.layer_norm(x, self.weight.shape, self.weight)


class Block(nn.Module):
    """Attention and perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = Norm(width)
        self.norm2 = Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens in, mean loss out; both ends share one embedding."""

    def __init__(self, config: ModelConfig, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, config.width)
        self.positions = nn.Embedding(context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = Norm(config.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model(config: Any, spec: Any) -> nn.Module:
    """Build the model."""
    return GPT(config.model, spec.vocabulary, config.data.context)


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    """Sum the losses."""
    tokens = batch["tokens"].long()
    targets = tokens[:, 1:]
    loss = model(tokens[:, :-1], targets)
    return LossSum(loss * targets.numel(), targets.numel(), {})


def blocks(model: Any) -> list[nn.Module]:
    """List the layers."""
    return list(model.blocks)
