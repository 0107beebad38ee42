"""Predict classes of validation images with a trained model, in one process."""

from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config
from .data import Spec, build_datasets
from .device import move
from .sampling import fetch

# Before an image is printed, it is scaled down to at most this many pixels in width and height.
WIDEST = 32


@dataclass(frozen=True)
class InferConfig:
    """Settings of `infer`."""

    samples: int = 6
    """Number of validation images to show with predictions."""


def infer(model: nn.Module, spec: Spec, config: Config, options: InferConfig) -> None:
    """Print some validation images with predictions, and the accuracy over all of them."""
    _, validation, _ = build_datasets(config)
    device = next(model.parameters()).device
    batch_size = config.train.micro_batch_size
    correct = 0
    for start in range(0, len(validation), batch_size):
        ids = np.arange(start, min(start + batch_size, len(validation)))
        batch = fetch(validation, ids)
        probabilities = model(move(batch, device)["images"]).float().softmax(dim=1).cpu()
        confidence, predicted = probabilities.max(dim=1)
        correct += int((predicted == batch["labels"]).sum())
        for offset, sample_id in enumerate(ids):
            if sample_id >= options.samples:
                break
            truth = spec.classes[int(batch["labels"][offset])]
            guess = spec.classes[int(predicted[offset])]
            verdict = "right" if guess == truth else f"wrong, it is {truth}"
            print(draw(batch["images"][offset]))
            print(f"image {sample_id}: {guess} ({confidence[offset]:.0%} sure), {verdict}\n")
    print(f"{correct} of {len(validation)} right: accuracy {correct / len(validation):.2%}")


def draw(image: Tensor) -> str:
    """Draw an image [channels, height, width] in 0 ... 1 as text."""
    shades = " .:-=+*#%@"
    height = min(image.shape[1], WIDEST)
    width = min(image.shape[2], WIDEST)
    grey = F.adaptive_avg_pool2d(image, (height, width)).mean(dim=0)
    levels = (grey * (len(shades) - 1)).round().int().tolist()
    lines: list[str] = []
    for row in levels:
        # Two characters per pixel, since a character is about half as wide as it is high.
        lines.append("".join(shades[level] * 2 for level in row))
    return "\n".join(lines)
