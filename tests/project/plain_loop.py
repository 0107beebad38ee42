"""The reference: the models, the loop and the readers again, by hand, in plain PyTorch and float64.

Nothing of a render is imported. What a render has to agree on with it is passed in: the weights to
start from, the order of the samples and the keys of their augmentation.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Loss = tuple[Tensor, int, Tensor]  # sum of the losses, how many, sum of the metric
CONTEXT, SHIFT = 32, 1  # of the tiny preset: tokens, pixels
WEIGHTS_EVERY = 10  # steps: to gather them from all ranks takes longer than a step


def language_model(weights: Weights, samples: Tensor) -> Loss:
    """A GPT of two layers and two heads on rows of bytes: nats, positions, bits."""
    tokens, targets = samples[:, :-1], samples[:, 1:]
    x = weights["embedding.weight"][tokens]
    (_, time, width), heads = x.shape, 2
    size = width // heads
    frequencies = 10_000.0 ** -(torch.arange(0, size, 2, dtype=x.dtype) / size)
    turn = torch.outer(torch.arange(time, dtype=x.dtype), frequencies)
    turn = torch.polar(torch.ones_like(turn), turn)  # as complex numbers of length 1
    later = torch.ones(time, time).triu(1).bool()

    def norm(y: Tensor, name: str) -> Tensor:
        epsilon = torch.finfo(torch.float32).eps
        return y / (y.square().mean(-1, keepdim=True) + epsilon).sqrt() * weights[name]

    def rotated(y: Tensor) -> Tensor:
        pairs = torch.complex(y[..., : size // 2], y[..., size // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    for layer in ("blocks.0.", "blocks.1."):
        qkv = norm(x, layer + "norm1.weight") @ weights[layer + "attention.qkv.weight"].T
        q, k, v = (y.unflatten(-1, (heads, size)).transpose(1, 2) for y in qkv.split(width, -1))
        scores = rotated(q) @ rotated(k).mT / math.sqrt(size)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ weights[layer + "attention.out.weight"].T
        hidden = norm(x, layer + "norm2.weight") @ weights[layer + "up.weight"].T
        x = x + hidden.clamp(min=0) ** 2 @ weights[layer + "down.weight"].T
    logits = norm(x, "norm.weight") @ weights["embedding.weight"].T
    total = -logits.log_softmax(-1).gather(-1, targets[..., None]).sum()
    return total, targets.numel(), total.detach() / math.log(2)


def image_classifier(weights: Weights, samples: tuple[Tensor, Tensor]) -> Loss:
    """A residual network of two blocks on images and labels: nats, images, those that are right."""
    images, labels = samples

    def norm(y: Tensor, name: str) -> Tensor:
        grouped = y.unflatten(1, (8, -1)).flatten(2)
        mean = grouped.mean(-1, keepdim=True)
        grouped = (grouped - mean) / (grouped.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        scale, shift = (weights[f"{name}.{kind}"][:, None, None] for kind in ("weight", "bias"))
        return F.gelu(grouped.view_as(y) * scale + shift)

    x = F.conv2d(images, weights["stem.weight"], weights["stem.bias"], padding=1)
    for block in ("blocks.0.", "blocks.1."):
        y = F.conv2d(norm(x, block + "norm1"), weights[block + "conv1.weight"], padding=1)
        x = x + F.conv2d(norm(y, block + "norm2"), weights[block + "conv2.weight"], padding=1)
    pooled = norm(x, "norm").mean((2, 3))
    logits = pooled @ weights["head.weight"].T + weights["head.bias"]
    total = -logits.log_softmax(-1).gather(-1, labels[:, None]).sum()
    return total, len(labels), (logits.argmax(1) == labels).sum()


def text(path: Path) -> tuple[Tensor, Tensor]:
    """Rows of a text, each with the byte after it; a twentieth, rounded up, is for validation."""
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    rows = content.unfold(0, CONTEXT + 1, CONTEXT)
    cut = len(rows) - math.ceil(len(rows) / 20)
    return rows[:cut], rows[cut:]


def arrays(path: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Grey images in 0 ... 1 and their labels; the first of each five is for validation."""
    content = np.load(path)
    images = torch.from_numpy(content["images"]).double()[:, None] / 16
    labels = torch.from_numpy(content["labels"])
    chosen = torch.arange(len(labels)) % 5 == 0
    return (images[~chosen], labels[~chosen]), (images[chosen], labels[chosen])


def shifted(images: Tensor, keys: Iterable[int]) -> Tensor:
    """Each image moved by what its key says, black at the margins."""
    span, result = 2 * SHIFT + 1, []
    height, width = images.shape[-2:]
    for image, key in zip(F.pad(images, [SHIFT] * 4), keys, strict=True):
        down, across = key % span, key // span % span
        result.append(image[:, down : down + height, across : across + width])
    return torch.stack(result)


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of Muon's polynomial on the singular values (Jordan et al., 2024)."""
    x = matrix / matrix.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


@dataclass
class Trace:
    """What a run computed."""

    sums: list[tuple[float, int, float]] = field(default_factory=list)  # of each step
    norms: list[float] = field(default_factory=list)  # of the gradients, before clipping
    clipped: list[float] = field(default_factory=list)  # after it
    rates: list[float] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)  # of each tenth step
    validation: dict[int, tuple[float, float]] = field(default_factory=dict)  # loss, metric


def train(
    weights: Weights,
    forward: Callable[[Weights, Any], Loss],
    batch: Callable[[int], Any],
    validation: Any,
    settings: dict[str, Any],
) -> Trace:
    """Train by a render's settings, given by dotted names, the whole batch at once."""
    get = {name.partition(".")[2]: value for name, value in settings.items()}
    weights = {name: w.detach().double().requires_grad_() for name, w in weights.items()}
    means, squares = ({name: 0.0 for name in weights} for _ in range(2))
    beta1, beta2, steps, warmup = get["beta1"], get["beta2"], get["steps"], get["warmup_steps"]
    trace = Trace()
    for step in range(steps):
        total, count, metric = forward(weights, batch(step))
        parts = torch.autograd.grad(total / count, list(weights.values()))
        gradients = dict(zip(weights, parts, strict=True))
        norm = math.sqrt(sum(float(g.square().sum()) for g in parts))
        rate = get["learning_rate"] * (step + 1) / warmup
        if step >= warmup:
            done = (step - warmup) / (steps - warmup)
            low = get["final_fraction"]
            rate = get["learning_rate"] * (low + (1 - low) * (1 + math.cos(math.pi * done)) / 2)
        with torch.no_grad():
            for name, weight in weights.items():
                gradient = gradients[name] * min(1.0, get["clip"] / norm)
                weight *= 1 - rate * (get["weight_decay"] if weight.ndim > 1 else 0)
                if get.get("name") == "muon" and name.startswith("blocks.") and weight.ndim > 1:
                    momentum = get["momentum"]
                    means[name] = momentum * means[name] + (1 - momentum) * gradient
                    ahead = momentum * means[name] + (1 - momentum) * gradient
                    for part in range(parts := 3 if "qkv" in name else 1):
                        rows = slice(part * len(weight) // parts, (part + 1) * len(weight) // parts)
                        size = rate * 0.2 * math.sqrt(max(weight[rows].shape))
                        weight[rows] -= size * orthogonal(ahead[rows])
                    continue
                means[name] = beta1 * means[name] + (1 - beta1) * gradient
                squares[name] = beta2 * squares[name] + (1 - beta2) * gradient.square()
                mean = means[name] / (1 - beta1 ** (step + 1))
                deviation = (squares[name] / (1 - beta2 ** (step + 1))).sqrt() + 1e-8
                weight -= rate * mean / deviation
            if (step + 1) % get["validate_every"] == 0:
                loss, all_of, right = forward(weights, validation)
                trace.validation[step + 1] = (float(loss) / all_of, float(right) / all_of)
        trace.sums.append((float(total.detach()), count, float(metric)))
        trace.norms.append(norm)
        trace.clipped.append(min(norm, get["clip"]))
        trace.rates.append(rate)
        if (step + 1) % WEIGHTS_EVERY == 0:
            trace.weights.append({name: w.detach().clone() for name, w in weights.items()})
    return trace
