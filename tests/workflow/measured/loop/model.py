"""The model: yours to replace. A decoder-only transformer over bytes or tokens.

What the rest relies on is in three functions at the end (`build_model`, `compute_loss`, `blocks`)
and in `ModelConfig` and `PRESETS`. Any `nn.Module` will do; nothing here has to be inherited.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UserError
from .loss import LossSum

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec

PART = 2**26  # logits in memory at the same time, where nothing is compiled: 256 MB in float32


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
            raise UserError("--model.width must be a multiple of 2 x --model.heads, all at least 1")
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
    cosines, sines = (part[: x.shape[-2]].to(x.dtype) for part in table)
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
        hidden = F.relu(self.up(self.norm2(x)))
        # As good as GELU, and cheap. Autocast would take `square` in float32.
        return x + self.dropout(self.down(hidden * hidden))


def summed_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The losses of rows x [rows, width], summed in float32."""
    return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")


class LossInParts(torch.autograd.Function):
    """`summed_loss` of some rows at a time, each with its gradients, so that no logits stay."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, pairs: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
        """The loss of `pairs`: parts of `x`, and their targets."""
        of_x, of_weight, losses = [], torch.zeros_like(weight, dtype=torch.float), []
        for part, targets in pairs:
            leaves = part.detach().requires_grad_(), weight.detach().requires_grad_()
            with torch.enable_grad():
                losses.append(summed_loss(*leaves, targets))
            gradients = torch.autograd.grad(losses[-1], leaves)
            of_x.append(gradients[0])
            of_weight += gradients[1]  # in float32
        ctx.save_for_backward(of_weight.to(weight.dtype), torch.cat(of_x))
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by: Tensor) -> Any:
        """The gradients, times the one of the loss."""
        of_weight, of_x = ctx.saved_tensors
        return of_weight * by, None, of_x * by


class Output(nn.Module):
    """Logits of the next token, or their loss. It has no parameters: the weight is passed in."""

    recompute = False  # by activation checkpointing: all the work is done in forward

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor | None) -> Tensor:
        """Logits [..., vocabulary] of x [..., width], or the sum of the losses in float32."""
        if targets is None:
            return F.linear(x, weight)
        x, targets, weight = x.flatten(0, -2), targets.flatten(), weight.to(x.dtype)
        # All logits would be the largest tensors of a step. Where no compiler fuses what becomes of
        # them, a part is in memory at a time.
        rows = len(x) if torch.compiler.is_compiling() else max(1, PART // len(weight))
        if len(x) <= rows:
            return summed_loss(x, weight, targets)
        dtype = F.linear(x[:1], weight[:1]).dtype  # autocast's, so that each is cast once
        x, weight = x.to(dtype), weight.to(dtype)
        pairs = [*zip(x.split(rows), targets.split(rows), strict=True)]
        if torch.is_grad_enabled():
            return LossInParts.apply(weight, pairs, x)
        return torch.stack([summed_loss(part, weight, ids) for part, ids in pairs]).sum()


class GPT(nn.Module):
    """Tokens in, logits of the next token or their loss out; both ends share one embedding."""

    attention = Attention

    def __init__(self, config: ModelConfig, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, self.attention) for _ in range(config.layers))
        self.norm, self.output = nn.RMSNorm(config.width), Output()
        # Worked out, not learned: not part of a checkpoint.
        table = rotary(context, config.width // config.heads)
        self.register_buffer("table", table, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                depth = math.sqrt(2 * config.layers) if into_residual else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, time, vocabulary] for tokens [batch, time]; with targets, their loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        return self.output(self.norm(x), self.embedding.weight, targets)


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """The model, on the CPU, initialised from torch's global random numbers."""
    return GPT(config.model, spec.vocabulary, config.data.context)


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    """Next-token loss of a batch of {"tokens": [batch, context + 1]}; uint8 are bytes of text."""
    tokens = batch["tokens"].long()
    total, count = model(tokens[:, :-1], tokens[:, 1:]), tokens[:, 1:].numel()
    unit = "byte" if batch["tokens"].dtype == torch.uint8 else "token"
    return LossSum(total, count, {f"bits_per_{unit}": total.detach() / math.log(2)})


def blocks(model: Any) -> Iterable[nn.Module]:
    """What is compiled, sharded and recomputed one by one: the layers (and the loss: compiled)."""
    return [*model.blocks, model.output]
