"""Build the data: labelled images, by default scikit-learn's small digits. Yours to replace.

Other modules rely on `DataConfig` and `build_datasets`. `build_datasets` returns two datasets, with
`__len__`, `__getitems__` and (optional) `augment`, and a spec, with a fingerprint. The spec is a
dataclass of plain values: a run saves it as spec.json, so that the trained model can be loaded
without the data.
"""

import os
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

# Pillow's modes of images with at most 8 bits per channel.
GREY = ("1", "L", "LA")
COLOUR = ("P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB")
# One image in this many is for validation.
VALIDATION_SHARE = 5
# Names of folders whose images are for validation.
FOR_VALIDATION = ("val", "valid", "validation")
# Suffixes of image files.
ENDINGS = (".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class DataConfig:
    """Settings of the data."""

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
    """Facts about the data that the model needs, and a fingerprint that identifies the data."""

    channels: int
    classes: tuple[str, ...]
    """Names of the classes."""
    fingerprint: str


def build_datasets(config: "Config") -> tuple["Images", "Images", Spec]:
    """Return training and validation images and their spec; UserError for unusable data.

    One image in five is for validation: in an .npz, every fifth image; in a folder, a hash of the
    name decides. If a folder has subfolders `train` and `val` (or `valid` or `validation`), these
    decide instead.
    """
    data = config.data
    path = data.path
    if path and not path.exists():
        raise UserError(f"--data.path: {path.absolute()} does not exist")
    if path and path.is_dir():
        return read_folder(path, data)
    images, labels = read_images(path)
    held_out = np.arange(len(labels)) % VALIDATION_SHARE == 0
    if held_out.all():
        raise UserError(f"--data.path has only {len(labels)} images: at least two are needed")
    training = Images(images[~held_out], labels[~held_out])
    validation = Images(images[held_out], labels[held_out])
    # Both datasets divide pixels by the same value.
    validation.brightest = training.brightest
    training.max_shift = data.max_shift
    # Neither an .npz nor the digits name their classes, so the number of a class is its name.
    class_names = tuple(map(str, range(int(labels.max()) + 1)))
    return training, validation, Spec(images.shape[3], class_names, fingerprint(images, labels))


def read_folder(path: Path, config: DataConfig) -> tuple["Images", "Images", Spec]:
    """Return images of a folder with a subfolder per class, as `build_datasets` describes."""
    has_splits = (path / "train").is_dir() and any(
        (path / name).is_dir() for name in FOR_VALIDATION
    )
    # A glob pattern that matches the folders of the classes.
    class_folders = "*/*" if has_splits else "*"
    files: list[Path] = []
    left_out: list[Path] = []
    for file in sorted(path.glob(f"{class_folders}/*")):
        names = file.relative_to(path).parts
        # Skip what macOS, notebooks and git create, such as .DS_Store, .ipynb_checkpoints and .git.
        if any(name[0] == "." or name == "__MACOSX" for name in names):
            continue
        is_image = file.suffix.lower() in ENDINGS
        is_in_split = not has_splits or names[0] in ("train", *FOR_VALIDATION)
        if is_image and is_in_split:
            files.append(file)
        else:
            left_out.append(file)
    warn_left_out(left_out, "not images in a folder of their class")
    check_regular(files)
    # The folder of a class may be a link. Without this check, the images of a class with a broken
    # link would be missing without any message.
    for folder in path.glob(class_folders):
        if folder.is_symlink() and not folder.exists() and folder.name[0] != ".":
            raise UserError(f"{folder} is a broken link: repair it, or remove it")
    class_names = sorted({file.parent.name for file in files})
    label_of = {name: label for label, name in enumerate(class_names)}
    for_training: list[Path] = []
    for_validation: list[Path] = []
    for file in files:
        if has_splits:
            is_for_validation = file.parts[-3] in FOR_VALIDATION
        else:
            # A hash of the name is the same on every machine, and does not change when files are
            # added. The name is hashed as bytes, since it need not be UTF-8.
            name = os.fsencode(f"{file.parent.name}/{file.name}")
            is_for_validation = zlib.crc32(name) % VALIDATION_SHARE == 0
        if is_for_validation:
            for_validation.append(file)
        else:
            for_training.append(file)
    if not for_training or not for_validation:
        raise UserError(
            f"--data.path {path}: found {len(files)} images in folders named after their class, "
            f"too few for training and validation (supported: {', '.join(ENDINGS)})"
        )
    channels = config.channels
    if channels == 0:
        channels = 1 if read_image(files[0]).mode in GREY else 3
    datasets: list[ImageFiles] = []
    for part in (for_training, for_validation):
        labels = np.array([label_of[file.parent.name] for file in part])
        dataset = ImageFiles(part, labels, channels, config.size)
        dataset.user_chose_channels = config.channels != 0
        datasets.append(dataset)
    training, validation = datasets
    training.max_shift = config.max_shift
    identity = fingerprint_files(path, files, config.size, channels)
    return training, validation, Spec(channels, tuple(class_names), identity)


class Images:
    """Images in memory, uint8 [count, height, width, channels], and their classes."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray) -> None:
        self.pixels = pixels
        self.labels = torch.from_numpy(labels)
        # Pixels are divided by this value: the brightest pixel, or 1 if all images are black.
        self.brightest = float(pixels.max()) or 1.0
        self.max_shift = 0

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """Read a batch: {"images": float32 [n, channels, height, width], "labels": int64 [n]}.

        Pixels are scaled to 0 ... 1.
        """
        pixels = torch.from_numpy(self.read(ids))
        images = pixels.permute(0, 3, 1, 2).contiguous().float()
        return {"images": images.div_(self.brightest), "labels": self.labels[ids]}

    def read(self, ids: list[int]) -> np.ndarray:
        """Return the pixels of some images, uint8 [n, height, width, channels]."""
        return self.pixels[ids]

    def augment(self, batch: dict[str, Tensor], keys: np.ndarray) -> dict[str, Tensor]:
        """Shift each image by a random number of pixels, which depends only on the image's key.

        `keys` has a random integer for each image. A resumed run gets the same keys.
        """
        if not self.max_shift:
            return batch
        images = batch["images"]
        height, width = images.shape[-2:]
        padded = F.pad(images, [self.max_shift] * 4)
        # A shifted image is a window of the padded image. The first row and the first column of the
        # window are each in 0 ... 2 * max_shift.
        offsets = 2 * self.max_shift + 1
        top = (keys % offsets).astype(int)
        left = (keys // offsets % offsets).astype(int)
        rows = torch.from_numpy(top)[:, None] + torch.arange(height)
        columns = torch.from_numpy(left)[:, None] + torch.arange(width)
        image_indices = torch.arange(len(images))[:, None, None]
        # Indexing on both sides of `:` puts the channels last: [n, height, width, channels].
        shifted = padded[image_indices, :, rows[:, :, None], columns[:, None, :]]
        return {**batch, "images": shifted.permute(0, 3, 1, 2).contiguous()}


class ImageFiles(Images):
    """Images in files, decoded for each batch: --train.loader-workers decodes them in parallel."""

    def __init__(self, files: list[Path], labels: np.ndarray, channels: int, size: int) -> None:
        self.files = files
        self.labels = torch.from_numpy(labels)
        self.size = size
        self.channels = channels
        # False if the first image determined the number of channels.
        self.user_chose_channels = True
        self.brightest = 255.0
        self.max_shift = 0

    def read(self, ids: list[int]) -> np.ndarray:
        """Decode, scale and crop images; UserError if one is not an image, or sizes differ."""
        decoded = [np.array(self.decode(self.files[i])) for i in ids]
        if len({image.shape for image in decoded}) > 1:
            raise UserError(
                f"{self.files[ids[0]]} and other images in its batch have different sizes: scale "
                "them with --data.size PIXELS"
            )
        # The arrays of grey images have no axis of channels; -1 adds the axis.
        return np.stack(decoded).reshape(len(ids), *decoded[0].shape[:2], -1)

    def decode(self, file: Path) -> Image.Image:
        """Return one image with the channels and the size that a batch needs."""
        image = read_image(file)
        if self.channels == 1 and image.mode not in GREY and not self.user_chose_channels:
            raise UserError(
                f"{file} is in colour, but the first image is grey: choose --data.channels 3 or 1"
            )
        image = image.convert("L" if self.channels == 1 else "RGB")
        if self.size:
            image = ImageOps.fit(image, (self.size, self.size))
        return image


def read_image(file: Path) -> Image.Image:
    """Read an image, unconverted; UserError if the file is not an image with 8-bit channels."""
    try:
        with Image.open(file) as image:
            image.load()
            # Turn the image upright, as viewers do: a camera may have stored it sideways.
            ImageOps.exif_transpose(image, in_place=True)
    # Pillow raises errors of a dozen types.
    except Exception as error:
        raise UserError(f"{file} cannot be read as an image: {error}") from None
    # Converting other modes would lose values: 16-bit channels, for example, would be clipped.
    if image.mode not in (*GREY, *COLOUR):
        raise UserError(f"{file} has pixels of mode {image.mode}: save it with 8 bits per channel")
    return image


def read_images(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Read images (uint8 [n, height, width, channels]) and labels (int64 [n]); default: digits."""
    if path is None:
        from sklearn.datasets import load_digits

        # Annotated with Any, since scikit-learn does not declare the attributes.
        digits: Any = load_digits()
        return digits.images.astype(np.uint8)[..., None], digits.target.astype(np.int64)
    check_regular([path])
    try:
        with np.load(path, allow_pickle=False) as file:
            images = file["images"]
            labels = file["labels"]
    except Exception as error:
        raise UserError(f"--data.path {path}: not an .npz of images and labels ({error})") from None
    has_images = images.dtype == np.uint8 and images.ndim in (3, 4)
    # Signed or unsigned integers, one per image.
    has_labels = labels.dtype.kind in "iu" and labels.shape == images.shape[:1]
    if not has_images or not has_labels:
        raise UserError(
            f"--data.path {path}: expected `images` uint8 [n, height, width] or [n, height, width, "
            f"channels] and `labels` int [n], found {images.dtype} {list(images.shape)} and "
            f"{labels.dtype} {list(labels.shape)}"
        )
    if len(labels) == 0 or labels.min() < 0:
        raise UserError(
            f"--data.path {path} has no images, or a negative label: labels count from 0"
        )
    # Grey images may come without an axis of channels.
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[3] > 4:
        raise UserError(
            f"--data.path {path}: the images have {images.shape[3]} channels. If channels are the "
            "second axis, save images.transpose(0, 2, 3, 1)"
        )
    return np.ascontiguousarray(images), labels.astype(np.int64)
