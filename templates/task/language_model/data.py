"""The data: yours to replace. Bytes of text, by default the Python standard library's source.

What the rest relies on: `DataConfig`, and `build_datasets`, which gives two datasets with `__len__`
and `__getitems__` and a spec with a fingerprint.
"""

import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .engine import UserError

if TYPE_CHECKING:
    from .config import Config

VALIDATION_SHARE = 20  # about one file in so many


@dataclass(frozen=True)
class DataConfig:
    """Text."""

    path: Path | None = None
    """A text file, or a folder of them (default: the Python standard library's own source)."""
    context: int = 128
    """Tokens that the model sees at once."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if self.context < 1:
            raise UserError("--data.context must be at least 1")


@dataclass(frozen=True)
class Spec:
    """What the model has to know of the data, and what identifies it."""

    vocabulary: int
    tokens_per_sample: int
    fingerprint: str


class Chunks:
    """Sample i is the i-th stretch of `context` tokens and the token after it."""

    def __init__(self, tokens: np.ndarray, context: int) -> None:
        self.tokens, self.context = tokens, context
        self.offsets = np.arange(context + 1)

    def __len__(self) -> int:
        """Number of samples; what is left over at the end is not used."""
        return (len(self.tokens) - 1) // self.context

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """A batch: {"tokens": uint8 [len(ids), context + 1]}."""
        starts = np.asarray(ids)[:, None] * self.context
        return {"tokens": torch.from_numpy(self.tokens[starts + self.offsets])}


def build_datasets(config: "Config") -> tuple[Chunks, Chunks, Spec]:
    """Training and validation data, split by file, and their spec; UserError for unusable data."""
    path, context = config.data.path, config.data.context
    ending = "" if path else ".py"
    path = path or Path(sysconfig.get_paths()["stdlib"])
    training, validation = read_text(path, ending)
    for name, tokens in (("training", training), ("validation", validation)):
        if len(tokens) <= context:
            raise UserError(
                f"{len(tokens):,} bytes of {name} text in {path} are too few for a context of "
                f"{context}: give more text, or a smaller --data.context"
            )
    digest = hashlib.sha256(training.tobytes())
    digest.update(validation.tobytes() + context.to_bytes(8, "little"))
    spec = Spec(vocabulary=256, tokens_per_sample=context, fingerprint=digest.hexdigest()[:16])
    return Chunks(training, context), Chunks(validation, context), spec


def read_text(path: Path, ending: str) -> tuple[np.ndarray, np.ndarray]:
    """All text at `path` in files named so, as bytes (uint8), in a training and a validation part.

    Files go to one part or the other by a hash of their name, so that the split stays as it is on
    every machine and when files are added. A single file gives its last twentieth away.
    """
    if not path.exists():
        raise UserError(f"--data.path {path}: there is nothing there")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for file in [path] if path.is_file() else text_files(path, ending):
        content = file.read_bytes()
        if b"\0" not in content:  # else it is not text
            name = file.relative_to(path).as_posix()
            parts[zlib.crc32(name.encode()) % VALIDATION_SHARE == 0].append(content)
    training, validation = (np.frombuffer(b"\0".join(part), np.uint8) for part in parts)
    if not (parts[0] and parts[1]):  # too few files to divide
        whole = np.concatenate([training, validation])
        cut = len(whole) - len(whole) // VALIDATION_SHARE
        training, validation = whole[:cut], whole[cut:]
    return training, validation


def text_files(folder: Path, ending: str) -> Iterator[Path]:
    """Files below a folder, in a fixed order, without hidden and installed ones."""
    for parent, folders, files in os.walk(folder):
        unwanted = ("site-packages", "__pycache__")
        folders[:] = sorted(f for f in folders if f not in unwanted and not f.startswith("."))
        wanted = (name for name in sorted(files) if name.endswith(ending) and name[0] != ".")
        yield from (Path(parent, name) for name in wanted)
