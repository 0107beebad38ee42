"""A model of transformers itself, as it is."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from .loss import LossSum

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec


@dataclass(frozen=True)
class ModelConfig:
    """A small Llama."""

    layers: int = 2
    width: int = 32


PRESETS: dict[str, dict[str, Any]] = {"default": {}, "tiny": {"train.micro_batch_size": 4}}


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """Build it with random weights."""
    settings = LlamaConfig(
        vocab_size=spec.vocabulary,
        hidden_size=config.model.width,
        intermediate_size=2 * config.model.width,
        num_hidden_layers=config.model.layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return LlamaForCausalLM(settings)


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    """Sum the loss of the tokens that are not padding."""
    output = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    )
    targets = batch["labels"][:, 1:].flatten()
    logits = output.logits[:, :-1].flatten(0, 1).float()
    total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return LossSum(total, (targets != -100).sum(), {})


def blocks(model: Any) -> Iterable[nn.Module]:
    """List the decoder layers."""
    return model.model.layers
