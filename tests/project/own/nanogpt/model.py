"""A module in nanoGPT's shape: a ModuleDict, a tied head, dropout, (logits, loss) out."""

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

N_LAYER, N_HEAD = 2, 2
PRESETS = {"default": {}, "tiny": {"data.block_size": 16, "train.micro_batch_size": 4}}


@dataclass(frozen=True)
class ModelConfig:
    """A GPT."""

    n_embd: int = 16
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.c_fc = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [batch, time, n_embd]."""
        shape = (*x.shape[:2], N_HEAD, -1)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.c_proj(y.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """Tokens in, (logits, loss) out."""

    def __init__(self, config: ModelConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, config.n_embd),
                "wpe": nn.Embedding(block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(N_LAYER)),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits [batch, time, vocabulary], and their mean loss where there are targets."""
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """The model."""
    return GPT(config.model, spec.vocab_size, config.data.block_size)


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    """The model's mean as a sum: every batch has the same number of targets a sample."""
    _, loss = model(batch["x"], batch["y"])
    count = batch["y"].numel()
    return LossSum(loss * count, count, {})


def blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The layers."""
    return model.transformer.h
