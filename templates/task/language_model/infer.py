"""Generate text with a trained model, in one process."""

import codecs
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import Config
from .data import Spec
from .errors import UserError
from .text import decode, encode


@dataclass(frozen=True)
class InferConfig:
    """Settings of the prompt and of sampling."""

    prompt: str = "def "
    """Text to continue; token ids ("15496 11 995") if there are token files but no tokenizer."""
    tokens: int = 300
    """Tokens to generate."""
    temperature: float = 0.8
    """Sampling temperature (0: always the most likely token)."""
    top_k: int = 40
    """Most likely tokens to sample from (0: all)."""
    seed: int = 0
    """Seed of the sampling."""


def infer(model: nn.Module, spec: Spec, config: Config, options: InferConfig) -> None:
    """Print the prompt and the model's continuation, token by token."""
    prompt = encode(options.prompt, spec)
    continuation = generate(model, prompt, config.data.context, options)
    tokens = itertools.chain(prompt, continuation)
    # Write bytes, since a token may be only a part of a character. In a notebook, stdout has no
    # `buffer` for bytes and accepts only text, so wait there until a character is complete.
    stdout = getattr(sys.stdout, "buffer", None)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        for content in decode(tokens, spec):
            if stdout is None:
                print(decoder.decode(content), end="")
            else:
                stdout.write(content)
                stdout.flush()
    finally:
        # End the line, even after Ctrl-C or an error.
        print()


def generate(
    model: nn.Module, prompt: list[int], context: int, options: InferConfig
) -> Iterator[int]:
    """Yield the tokens that the model generates after a prompt."""
    device = next(model.parameters()).device
    # `manual_seed` refuses very large integers, so take the remainder.
    generator = torch.Generator(device).manual_seed(options.seed % 2**63)
    tokens = torch.tensor([prompt], device=device)
    for _ in range(options.tokens):
        logits = model(tokens[:, -context:])[0, -1].float()
        token = sample(logits, options, generator)
        tokens = torch.cat([tokens, token.view(1, 1)], dim=1)
        yield int(token)


def sample(logits: Tensor, options: InferConfig, generator: torch.Generator) -> Tensor:
    """Draw one token from logits [vocabulary]."""
    # Without this check, `argmax` would choose a NaN.
    if logits.isnan().any():
        raise UserError("the model's output is not finite: use an earlier checkpoint (--step)")
    if options.temperature <= 0:
        return logits.argmax()
    if 0 < options.top_k < len(logits):
        lowest_kept = logits.topk(options.top_k).values[-1]
        logits = logits.masked_fill(logits < lowest_kept, -torch.inf)
    probabilities = (logits / options.temperature).softmax(dim=0)
    # A logit of +inf makes all probabilities NaN.
    if probabilities.isnan().any():
        raise UserError("the model's output is not finite: use an earlier checkpoint (--step)")
    return torch.multinomial(probabilities, 1, generator=generator)[0]
