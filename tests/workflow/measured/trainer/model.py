"""GPT-2 as transformers builds it, without dropout; the shape is that of the preset gpt2_124m."""

from typing import Any

from torch import Tensor, nn

from .loss import LossSum
from .own_model import PRESETS as PRESETS
from .own_model import ModelConfig as ModelConfig


def build_model(config: Any, spec: Any) -> nn.Module:
    """Build the model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    settings = GPT2Config(vocab_size=spec.vocabulary, use_cache=False, **dropout)
    return GPT2LMHeadModel(settings)


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    """Sum the losses."""
    tokens = batch["tokens"][:, :-1].long()
    loss = model(input_ids=tokens, labels=tokens).loss
    return LossSum(loss * tokens.numel(), tokens.numel(), {})


def blocks(model: Any) -> list[nn.Module]:
    """List the layers."""
    return list(model.transformer.h)
