"""The data: yours to replace. The 1,797 handwritten digits (8 x 8) that scikit-learn ships.

What the rest relies on: `DataConfig`, and `build_datasets`, which gives two datasets with `__len__`
and `__getitems__` and a spec with a fingerprint. An `augment` is optional.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .engine import UserError

if TYPE_CHECKING:
    from .config import Config

VALIDATION_SHARE = 5  # one image in so many


@dataclass(frozen=True)
class DataConfig:
    """Images with a class each."""

    path: Path | None = None
    """An .npz file with `images` (uint8, N x H x W) and `labels` (default: the digits)."""
    max_shift: int = 1
    """Move each training image by up to this many pixels, another way each time it is seen."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if self.max_shift < 0:
            raise UserError("--data.max-shift must not be negative")


@dataclass(frozen=True)
class Spec:
    """What the model has to know of the data, and what identifies it."""

    channels: int
    classes: int
    fingerprint: str


class Images:
    """Images in memory, as float32 in 0 ... 1."""

    def __init__(self, images: Tensor, labels: Tensor, max_shift: int = 0) -> None:
        self.images, self.labels, self.max_shift = images, labels, max_shift

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """A batch: {"images": float32 [n, channels, height, width], "labels": int64 [n]}."""
        index = torch.tensor(ids)
        return {"images": self.images[index], "labels": self.labels[index]}

    def augment(self, batch: dict[str, Tensor], keys: np.ndarray) -> dict[str, Tensor]:
        """Shift each image by what its random key says; the same whenever the run gets there."""
        if not self.max_shift:
            return batch
        images, span = batch["images"], 2 * self.max_shift + 1
        height, width = images.shape[-2:]
        padded = F.pad(images, [self.max_shift] * 4)
        down, across = (keys % span).astype(int), (keys // span % span).astype(int)
        rows = torch.from_numpy(down)[:, None] + torch.arange(height)
        columns = torch.from_numpy(across)[:, None] + torch.arange(width)
        one = torch.arange(len(images))[:, None, None]
        shifted = padded[one, :, rows[:, :, None], columns[:, None, :]]
        return {**batch, "images": shifted.permute(0, 3, 1, 2).contiguous()}


def build_datasets(config: "Config") -> tuple[Images, Images, Spec]:
    """Training and validation images, split by index, and their spec; UserError if unusable."""
    images, labels = read_images(config.data.path)
    held_out = np.arange(len(labels)) % VALIDATION_SHARE == 0
    if held_out.all():
        raise UserError(f"{len(labels)} images are too few: there must be at least two")
    digest = hashlib.sha256(images.tobytes() + labels.tobytes())
    spec = Spec(channels=1, classes=int(labels.max()) + 1, fingerprint=digest.hexdigest()[:16])
    scaled = torch.from_numpy(images).float().div(float(images.max()) or 1.0)[:, None]
    targets = torch.from_numpy(labels)
    return (
        Images(scaled[~held_out], targets[~held_out], config.data.max_shift),
        Images(scaled[held_out], targets[held_out]),
        spec,
    )


def read_images(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Images (uint8 [n, height, width]) and labels (int64 [n]) from a file or from scikit-learn."""
    if path is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.images.astype(np.uint8), digits.target.astype(np.int64)
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--data.path {path}: not an .npz of images and labels ({error})") from None
    if images.dtype != np.uint8 or images.ndim != 3 or labels.shape != images.shape[:1]:
        raise UserError(
            f"--data.path {path}: wanted images uint8 [n, height, width] and labels [n], found "
            f"{images.dtype} {list(images.shape)} and {list(labels.shape)}"
        )
    if len(labels) == 0 or labels.min() < 0:
        raise UserError(f"--data.path {path}: no images, or a negative label")
    return images, labels.astype(np.int64)
