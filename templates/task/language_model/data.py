"""The data: yours to replace. Text as bytes (by default Python's own source), or files of tokens.

What the rest relies on: `DataConfig`, and `build_datasets`, which gives two datasets with `__len__`
and `__getitems__` and a spec with a fingerprint.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .engine import UserError
from .engine.fingerprint import of_bytes, of_files
from .engine.formats import Chunks, check_token_files, read_text, token_files

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class DataConfig:
    """Text, or tokens."""

    path: Path | None = None
    """A text file, a .bin file of tokens, or a folder (default: the Python standard library)."""
    context: int = 128
    """Tokens that the model sees at once."""
    vocabulary: int = 0
    """Of .bin files: how many different tokens there can be (GPT-2: 50257). Text has 256 bytes."""
    token_type: Literal["uint16", "uint32"] = "uint16"
    """Of .bin files: tokens one after the other, little-endian, no header, as nanoGPT has them."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if self.context < 1:
            raise UserError("--data.context must be at least 1")
        if not 0 <= self.vocabulary < 2**31:
            raise UserError("--data.vocabulary must be in [0, 2^31)")


@dataclass(frozen=True)
class Spec:
    """What the model has to know of the data, and what identifies it."""

    vocabulary: int
    tokens_per_sample: int
    fingerprint: str


def build_datasets(config: "Config") -> tuple[Chunks, Chunks, Spec]:
    """Training and validation data and their spec; UserError for unusable data.

    Text is split by file, a twentieth of the files by a hash of their names, so that the split is
    the same on every machine and when files are added. Of token files, those whose name begins
    with "val" are for validation. What is not divided like this gives its last twentieth.
    """
    data, path = config.data, config.data.path
    if path and not path.exists():
        raise UserError(f"--data.path {path}: there is nothing there")
    folder = path or Path(sysconfig.get_paths()["stdlib"])
    if files := token_files(folder):
        check_token_files(files, data.vocabulary, data.token_type)
        parts = [[f for f in files if f.name.startswith("val") is val] for val in (False, True)]
        identity = of_files(folder, files, data.context, data.token_type)
    else:
        parts = read_text(folder, "" if path else ".py")
        identity = of_bytes(*parts[0], *parts[1], data.context)
    training, validation = (
        Chunks(part, data.context, data.vocabulary, data.token_type) for part in parts
    )
    if not parts[1]:
        validation = training.split()
    if not len(training) or not len(validation):
        raise UserError(
            f"{folder} has too few tokens to train on and to validate with, at a context of "
            f"{data.context}: give more data, or a smaller --data.context"
        )
    spec = Spec(data.vocabulary if files else 256, data.context, identity)
    return training, validation, spec
