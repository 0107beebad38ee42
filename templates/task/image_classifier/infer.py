"""Predict classes with a trained model, in one plain process."""

from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config
from .data import Spec, build_datasets
from .device import move
from .sampling import fetch

WIDEST = 32  # characters are wide: larger images are drawn smaller


@dataclass(frozen=True)
class InferConfig:
    """Which images to look at."""

    samples: int = 6
    """Validation images to draw, with predictions."""


def infer(model: nn.Module, spec: Spec, config: Config, options: InferConfig) -> None:
    """Print some validation images with predictions, and the accuracy over all of them."""
    _, validation, _ = build_datasets(config)
    device = next(model.parameters()).device
    correct = 0
    for start in range(0, len(validation), config.train.micro_batch_size):
        ids = np.arange(start, min(start + config.train.micro_batch_size, len(validation)))
        batch = fetch(validation, ids)
        probabilities = model(move(batch, device)["images"]).float().softmax(dim=1).cpu()
        confidence, predicted = probabilities.max(dim=1)
        correct += int((predicted == batch["labels"]).sum())
        for i in range(max(0, min(options.samples - start, len(ids)))):
            truth, guess = (spec.classes[int(c[i])] for c in (batch["labels"], predicted))
            verdict = "right" if guess == truth else f"wrong, it is {truth}"
            print(draw(batch["images"][i]))
            print(f"image {start + i}: {guess} ({confidence[i]:.0%} sure), {verdict}\n")
    print(f"{correct} of {len(validation)} right: accuracy {correct / len(validation):.2%}")


def draw(image: Tensor) -> str:
    """A picture [channels, height, width] in 0 ... 1 as text."""
    shades = " .:-=+*#%@"
    height, width = (min(side, WIDEST) for side in image.shape[-2:])
    grey = F.adaptive_avg_pool2d(image, (height, width)).mean(dim=0)
    levels = (grey * (len(shades) - 1)).round().int().tolist()
    return "\n".join("".join(shades[level] * 2 for level in row) for row in levels)
