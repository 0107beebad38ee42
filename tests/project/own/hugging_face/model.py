"""A module in Hugging Face's style: named inputs, an output like a dictionary, its own loss."""

from collections import OrderedDict
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

PRESETS = {"default": {}, "tiny": {"train.micro_batch_size": 3}}


@dataclass(frozen=True)
class ModelConfig:
    """A causal language model."""

    hidden_size: int = 32


class DecoderLayer(nn.Module):
    """A mixing of the past, and a perceptron; returns a tuple, as such layers do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Linear(size, size), nn.Linear(size, size)
        self.input_layernorm = nn.LayerNorm(size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        """Hidden states [batch, time, size], mask [batch, time]."""
        kept = self.mix(self.input_layernorm(hidden_states)) * attention_mask[..., None]
        past = kept.cumsum(dim=1) / attention_mask.cumsum(dim=1).clamp(min=1)[..., None]
        return (hidden_states + F.gelu(self.mlp(past)),)


class Decoder(nn.Module):
    """Embedding and layers."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(DecoderLayer(size) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Hidden states [batch, time, size]."""
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)[0]
        return hidden_states


class ForCausalLM(nn.Module):
    """Head tied to the embedding: one tensor, two names in the state dict."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.model = Decoder(vocabulary, size)
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> OrderedDict:
        """Logits, and a loss that nobody here asks for."""
        logits = self.lm_head(self.model(input_ids, attention_mask))
        loss = torch.zeros(()) if labels is None else F.cross_entropy(logits.mT, labels)
        return OrderedDict(loss=loss, logits=logits)


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """The model."""
    return ForCausalLM(spec.vocabulary, config.model.hidden_size)


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    """Next-token loss where the label is not -100; how many these are differs by batch."""
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits, labels = outputs["logits"][:, :-1].float(), batch["labels"][:, 1:]
    total = F.cross_entropy(logits.mT, labels, reduction="sum", ignore_index=-100)
    return LossSum(total, (labels != -100).sum(), {})


def blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The layers."""
    return model.model.layers
