"""The data: yours to replace. Images with a class each, by default scikit-learn's small digits.

What the rest relies on: `DataConfig`, and `build_datasets`, which gives two datasets with `__len__`
and `__getitems__` and a spec with a fingerprint. An `augment` is optional.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from .engine import UserError
from .engine.fingerprint import of_bytes, of_files
from .engine.formats import ENDINGS, GREY, ImageFiles, Images, read_image, read_images

if TYPE_CHECKING:
    from .config import Config

VALIDATION_SHARE = 5  # one image in so many


@dataclass(frozen=True)
class DataConfig:
    """Images with a class each."""

    path: Path | None = None
    """An .npz of `images` and `labels`, or a folder with one per class (default: the digits)."""
    size: int = 0
    """Scale and crop the images of a folder to so many pixels a side (0: all have one size)."""
    channels: Literal[0, 1, 3] = 0
    """Of the images of a folder, grey or in colour (0: as the first one)."""
    max_shift: int = 1
    """Move each training image by up to this many pixels, another way each time it is seen."""

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


def build_datasets(config: "Config") -> tuple[Images, Images, Spec]:
    """Training and validation images and their spec; UserError for unusable data.

    One image in five is for validation: by its place in an .npz, by a hash of its name in a folder,
    unless that has `train` and `val` folders of its own.
    """
    data, path = config.data, config.data.path
    if path and not path.exists():
        raise UserError(f"--data.path {path}: there is nothing there")
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
    return training, validation, Spec(images.shape[3], names, of_bytes(images, labels))


def read_folder(path: Path, config: DataConfig) -> tuple[Images, Images, Spec]:
    """Images in a folder per class, divided as `build_datasets` says; their spec."""
    divided = (path / "train").is_dir() and (path / "val").is_dir()
    files = sorted(
        file
        for file in path.glob("*/*/*" if divided else "*/*")
        if file.suffix.lower() in ENDINGS and (not divided or file.parts[-3] in ("train", "val"))
    )
    classes = {name: i for i, name in enumerate(sorted({file.parent.name for file in files}))}
    parts: tuple[list[Path], list[Path]] = ([], [])
    for file in files:
        named = f"{file.parent.name}/{file.name}".encode()
        chosen = zlib.crc32(named) % VALIDATION_SHARE == 0
        parts[file.parts[-3] == "val" if divided else chosen].append(file)
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
    spec = Spec(channels, tuple(classes), of_files(path, files, config.size, channels))
    return training, validation, spec
