"""The model: yours to replace. A decoder-only transformer over bytes or tokens.

What the rest relies on is in three functions at the end (`build_model`, `compute_loss`, `blocks`)
and in `ModelConfig` and `PRESETS`. Any `nn.Module` will do; nothing here has to be inherited.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .errors import UserError
from .loss import LossSum

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec

PART = 2**26  # logits that are in float32 at the same time: 256 MB


@dataclass(frozen=True)
class ModelConfig:
    """A GPT."""

    layers: int = 3
    heads: int = 3
    width: int = 96
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if min(self.layers, self.heads, self.width) < 1 or self.width % (2 * self.heads):
            raise UserError(
                f"--model.width {self.width} must be a multiple of twice --model.heads "
                f"{self.heads}, and none of them below 1"
            )
        if not 0 <= self.dropout < 1:
            raise UserError("--model.dropout must be in [0, 1)")


# Settings by dotted name; "default" is the ground that the others stand on.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {
        "data.context": 128,
        "train.steps": 300,
        "train.global_batch_size": 16,
        "train.micro_batch_size": 16,
        "train.validate_samples": 256,
        "optim.name": "muon",
        "optim.learning_rate": 2e-2,
        "optim.momentum": 0.9,
    },
    # GPT-2's size and batch; for token files: --data.path FOLDER (train.bin, val.bin).
    "gpt2_124m": {
        "model.layers": 12,
        "model.heads": 12,
        "model.width": 768,
        "data.context": 1024,
        "data.vocabulary": 50304,
        "train.steps": 20_000,
        "train.global_batch_size": 480,
        "train.micro_batch_size": 16,
        "train.validate_every": 500,
        "train.validate_samples": 480,
        "optim.name": "adamw",
        "optim.learning_rate": 6e-4,
        "optim.warmup_steps": 700,
        "checkpoint.every": 500,
    },
    "tiny": {
        "model.layers": 2,
        "model.heads": 2,
        "model.width": 32,
        "data.context": 32,
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


def rotary(context: int, size: int) -> Tensor:
    """Rotation angles as cosines and sines, [2, context, size / 2] (RoPE: Su et al., 2021)."""
    frequencies = 10_000.0 ** -(torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(context), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn pairs of features by their position; x is [batch, heads, time, size]."""
    cosines, sines = table[:, : x.shape[-2]].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)


class Attention(nn.Module):
    """Causal self-attention by PyTorch's fused kernels."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, table: Any) -> Tensor:
        """Attend to all positions before; x is [batch, time, width]."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        q, k = rotate(q, table), rotate(k, table)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a perceptron, each on a normalised copy of the residual stream."""

    def __init__(self, config: ModelConfig, attention: type[Attention]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = attention(config)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, table: Any) -> Tensor:
        """One layer; x is [batch, time, width]."""
        x = x + self.dropout(self.attention(self.norm1(x), table))
        hidden = F.relu(self.up(self.norm2(x))).square()  # as good as GELU, and cheap everywhere
        return x + self.dropout(self.down(hidden))


class GPT(nn.Module):
    """Tokens in, logits of the next token out; input and output share one embedding."""

    attention = Attention

    def __init__(self, config: ModelConfig, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, self.attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        # Worked out, not learned: not part of a checkpoint.
        table = rotary(context, config.width // config.heads)
        self.register_buffer("table", table, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                depth = math.sqrt(2 * config.layers) if into_residual else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, time, vocabulary] for tokens [batch, time]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        return F.linear(self.norm(x), self.embedding.weight)


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """The model, on the CPU, initialised from torch's global random numbers."""
    return GPT(config.model, spec.vocabulary, config.data.context)


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    """Next-token loss of a batch of {"tokens": [batch, context + 1]}; uint8 are bytes of text."""
    tokens = batch["tokens"].long()
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    total = cross_entropies(logits.flatten(0, 1), targets.flatten())
    unit = "byte" if batch["tokens"].dtype == torch.uint8 else "token"
    return LossSum(total, targets.numel(), {f"bits_per_{unit}": total.detach() / math.log(2)})


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over all targets [n] in float32, of logits [n, vocabulary].

    Of logits in bfloat16 a part at a time, and once more in backward: all of them in float32, with
    their gradient, would be the largest tensors of a step.
    """

    def of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, reduction="sum")

    if logits.dtype == torch.float32 or logits.numel() <= PART:
        return of(logits, targets)
    rows = max(1, PART // logits.shape[1])
    again = partial(checkpoint, of, use_reentrant=False, preserve_rng_state=False)
    return torch.stack(list(map(again, logits.split(rows), targets.split(rows)))).sum()


def blocks(model: Any) -> Iterable[nn.Module]:
    """The repeated layers: units of compilation, sharding and activation checkpointing."""
    return model.blocks
