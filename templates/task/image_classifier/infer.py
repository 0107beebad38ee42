"""Predict classes with a trained model, in one plain process."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import Config
from .data import Spec, build_datasets
from .engine.metrics import move
from .engine.sampling import fetch


@dataclass(frozen=True)
class InferConfig:
    """Which images to look at."""

    samples: int = 6
    """Draw this many validation images, with what the model says of them."""


def infer(model: nn.Module, spec: Spec, config: Config, options: InferConfig) -> None:
    """Print some validation images with predictions, and the accuracy over all of them."""
    _, validation, _ = build_datasets(config)
    device = next(model.parameters()).device
    batch = fetch(validation, torch.arange(len(validation)).numpy())
    with torch.no_grad():
        probabilities = model(move(batch, device)["images"]).float().softmax(dim=1).cpu()
    confidence, predicted = probabilities.max(dim=1)
    labels = batch["labels"]
    for i in range(min(options.samples, len(validation))):
        verdict = "right" if predicted[i] == labels[i] else f"wrong, it is {int(labels[i])}"
        print(draw(batch["images"][i, 0]))
        print(f"image {i}: {int(predicted[i])} ({confidence[i]:.0%} sure), {verdict}\n")
    correct = int((predicted == labels).sum())
    print(f"{correct} of {len(labels)} right: accuracy {correct / len(labels):.2%}")


def draw(image: Tensor) -> str:
    """A picture [height, width] in 0 ... 1 as text."""
    shades = " .:-=+*#%@"
    levels = (image * (len(shades) - 1)).round().int().tolist()
    return "\n".join("".join(shades[level] * 2 for level in row) for row in levels)
