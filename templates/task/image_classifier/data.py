"""The data: yours to replace. Images with a class each, by default scikit-learn's small digits.

What the rest relies on: `DataConfig`, and `build_datasets`, which gives two datasets with `__len__`
and `__getitems__` and a spec with a fingerprint. The spec is a dataclass of plain values, as a run
saves it in spec.json, for `infer` without data. An `augment` is optional.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from .errors import UserError
from .files import check_regular, fingerprint, fingerprint_files, warn_left_out

if TYPE_CHECKING:
    from .config import Config

GREY, COLOUR = ("1", "L", "LA"), ("P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB")
VALIDATION_SHARE = 5  # one image in so many


@dataclass(frozen=True)
class DataConfig:
    """Images with a class each."""

    path: Path | None = None
    """An .npz file with `images` and `labels`, or a folder per class; if not given, digits."""
    size: int = 0
    """Side length in pixels to resize and crop images of a folder to (0: they have one size)."""
    channels: Literal[0, 1, 3] = 0
    """Channels of the images of a folder: 1 grey, 3 colour (0: as in the first image)."""
    max_shift: int = 1
    """Largest random shift of training images, in pixels."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if self.max_shift < 0 or self.size < 0:
            raise UserError("--data.max-shift and --data.size must not be negative")


@dataclass(frozen=True)
class Spec:
    """What the model has to know of the data, and what identifies it."""

    channels: int
    classes: tuple[str, ...]
    """Their names."""
    fingerprint: str


def build_datasets(config: "Config") -> tuple["Images", "Images", Spec]:
    """Training and validation images and their spec; UserError for unusable data.

    One image in five is for validation: by its place in an .npz, by a hash of its name in a folder,
    unless that has folders of its own, `train` and `val`, `valid` or `validation`.
    """
    data, path = config.data, config.data.path
    if path and not path.exists():
        raise UserError(f"--data.path: there is nothing at {path.absolute()}")
    if path and path.is_dir():
        return read_folder(path, data)
    images, labels = read_images(path)
    held_out = np.arange(len(labels)) % VALIDATION_SHARE == 0
    if held_out.all():
        raise UserError(f"{len(labels)} images are too few: there must be at least two")
    training, validation = (Images(images[part], labels[part]) for part in (~held_out, held_out))
    validation.brightest = training.brightest
    training.max_shift = data.max_shift
    names = tuple(map(str, range(int(labels.max()) + 1)))
    return training, validation, Spec(images.shape[3], names, fingerprint(images, labels))


def read_folder(path: Path, config: DataConfig) -> tuple["Images", "Images", Spec]:
    """Images in a folder per class, divided as `build_datasets` says; their spec."""
    divided = (path / "train").is_dir() and any((path / name).is_dir() for name in FOR_VALIDATION)
    files: list[Path] = []
    left_out: list[Path] = []
    for file in sorted(path.glob("*/*/*" if divided else "*/*")):
        folder, *names = file.relative_to(path).parts
        if any(name[0] == "." or name == "__MACOSX" for name in (folder, *names)):
            continue  # of a Mac, a notebook or a version control
        used = file.suffix.lower() in ENDINGS
        used = used and (not divided or folder in ("train", *FOR_VALIDATION))
        (files if used else left_out).append(file)
    warn_left_out(left_out, "no images in a folder of their class")
    check_regular(files)
    classes = {name: i for i, name in enumerate(sorted({file.parent.name for file in files}))}
    parts: tuple[list[Path], list[Path]] = ([], [])
    for file in files:
        named = f"{file.parent.name}/{file.name}".encode()
        chosen = zlib.crc32(named) % VALIDATION_SHARE == 0
        parts[file.parts[-3] in FOR_VALIDATION if divided else chosen].append(file)
    if not parts[0] or not parts[1]:
        raise UserError(
            f"--data.path {path}: {len(files)} images in folders named by their class are too few "
            f"to train on and to validate with (read are {', '.join(ENDINGS)})"
        )
    channels = config.channels or (1 if read_image(files[0]).mode in GREY else 3)
    training, validation = (
        ImageFiles(part, np.array([classes[f.parent.name] for f in part]), channels, config.size)
        for part in parts
    )
    training.asked_for = validation.asked_for = config.channels != 0
    training.max_shift = config.max_shift
    spec = Spec(channels, tuple(classes), fingerprint_files(path, files, config.size, channels))
    return training, validation, spec


FOR_VALIDATION = ("val", "valid", "validation")
ENDINGS = (".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


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
            ImageOps.exif_transpose(image, in_place=True)  # upright, as viewers show it
    except Exception as error:  # Pillow has a dozen kinds
        raise UserError(f"{file} cannot be read as an image: {error}") from None
    if image.mode not in (*GREY, *COLOUR):  # 16 bits, say: a conversion would cut them off
        raise UserError(f"{file} has pixels of kind {image.mode}: save it with 8 bits a channel")
    return image


def read_images(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Images (uint8 [n, height, width, channels]) and labels (int64 [n]), from .npz or digits."""
    if path is None:
        from sklearn.datasets import load_digits

        digits: Any = load_digits()  # scikit-learn declares no attributes
        return digits.images.astype(np.uint8)[..., None], digits.target.astype(np.int64)
    check_regular([path])
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
    except Exception as error:
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
    if images.shape[3] > 4:
        raise UserError(
            f"--data.path {path}: images of {images.shape[3]} channels. If these come first, save "
            "images.transpose(0, 2, 3, 1)"
        )
    return np.ascontiguousarray(images), labels.astype(np.int64)
