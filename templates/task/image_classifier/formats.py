"""Images in memory and in files as datasets."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from . import UserError

GREY, COLOUR = ("1", "L", "LA"), ("P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB")
ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


class Images:
    """Images in memory, uint8 [count, height, width, channels], and their classes."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray) -> None:
        self.pixels, self.labels = pixels, torch.from_numpy(labels)
        self.brightest = float(pixels.max()) or 1.0
        self.max_shift = 0

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """A batch: {"images": float32 [n, channels, height, width], "labels": int64 [n]}.

        The images are in 0 ... 1.
        """
        images = torch.from_numpy(self.read(ids)).permute(0, 3, 1, 2).contiguous().float()
        return {"images": images.div_(self.brightest), "labels": self.labels[ids]}

    def read(self, ids: list[int]) -> np.ndarray:
        """Pixels uint8 [n, height, width, channels] of some images."""
        return self.pixels[ids]

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


class ImageFiles(Images):
    """Images in files, decoded where they are asked for; give them --train.loader-workers."""

    def __init__(self, files: list[Path], labels: np.ndarray, channels: int, size: int) -> None:
        self.files, self.labels, self.size = files, torch.from_numpy(labels), size
        self.channels, self.asked_for = channels, True
        self.brightest, self.max_shift = 255.0, 0

    def read(self, ids: list[int]) -> np.ndarray:
        """Decode, scale and crop; UserError for what is no image, or has another size."""
        decoded = [np.array(self.decode(self.files[i])) for i in ids]
        if len({image.shape for image in decoded}) > 1:
            raise UserError(
                f"{self.files[ids[0]]} and others of its batch are not of one size: scale them "
                "with --data.size PIXELS"
            )
        return np.stack(decoded).reshape(len(ids), *decoded[0].shape[:2], -1)

    def decode(self, file: Path) -> Image.Image:
        """One image as it goes into a batch."""
        image = read_image(file)
        if self.channels == 1 and image.mode not in GREY and not self.asked_for:
            raise UserError(f"{file} is in colour, the first image is not: say --data.channels 3")
        image = image.convert("L" if self.channels == 1 else "RGB")
        return ImageOps.fit(image, (self.size, self.size)) if self.size else image


def read_image(file: Path) -> Image.Image:
    """An image as it is in its file; UserError for what is none."""
    try:
        with Image.open(file) as image:
            image.load()
    except OSError as error:
        raise UserError(f"{file} cannot be read as an image: {error}") from None
    if image.mode not in (*GREY, *COLOUR):  # 16 bits, say: a conversion would cut them off
        raise UserError(f"{file} has pixels of kind {image.mode}: save it with 8 bits a channel")
    return image


def read_images(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Images (uint8 [n, height, width, channels]) and labels (int64 [n]), from .npz or digits."""
    if path is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.images.astype(np.uint8)[..., None], digits.target.astype(np.int64)
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--data.path {path}: not an .npz of images and labels ({error})") from None
    fit = images.dtype == np.uint8 and images.ndim in (3, 4) and labels.dtype.kind in "iu"
    if not fit or labels.shape != images.shape[:1]:
        raise UserError(
            f"--data.path {path}: wanted images uint8 [n, height, width] or [n, height, width, "
            f"channels] and labels int [n], found {images.dtype} {list(images.shape)} and "
            f"{labels.dtype} {list(labels.shape)}"
        )
    if len(labels) == 0 or labels.min() < 0:
        raise UserError(f"--data.path {path}: no images, or a negative label")
    images = images if images.ndim == 4 else images[..., None]
    return np.ascontiguousarray(images), labels.astype(np.int64)
