"""Generate text with a trained model, in one plain process."""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import Config
from .data import Spec


@dataclass(frozen=True)
class InferConfig:
    """Text to go on from, and how."""

    prompt: str = "def "
    tokens: int = 300
    """Bytes to generate."""
    temperature: float = 0.8
    """0 takes the likeliest byte each time; higher is more daring."""
    top_k: int = 40
    """Choose among this many likeliest bytes (0: all)."""
    seed: int = 0


def infer(model: nn.Module, spec: Spec, config: Config, options: InferConfig) -> None:
    """Print the prompt and what the model makes of it, byte by byte as they come."""
    prompt = options.prompt.encode() or b"\n"
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(options.seed)
    tokens = torch.tensor([list(prompt)], device=device)
    out = sys.stdout.buffer
    out.write(prompt)
    for _ in range(options.tokens):
        logits = model(tokens[:, -config.data.context :])[0, -1].float()
        token = sample(logits, options, generator)
        tokens = torch.cat([tokens, token.view(1, 1)], dim=1)
        out.write(bytes([int(token)]))
        out.flush()
    out.write(b"\n")
    out.flush()


def sample(logits: Tensor, options: InferConfig, generator: torch.Generator) -> Tensor:
    """Draw one token from logits [vocabulary]."""
    if options.temperature <= 0:
        return logits.argmax()
    if 0 < options.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(options.top_k).values[-1], -torch.inf)
    probabilities = (logits / options.temperature).softmax(dim=0)
    return torch.multinomial(probabilities, 1, generator=generator)[0]
