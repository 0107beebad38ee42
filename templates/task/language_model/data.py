"""Build the data: text as bytes (default: Python's own source) or token files. Replace it by yours.

Other modules rely on `DataConfig`, and on `build_datasets`, which returns two datasets with
`__len__` and `__getitems__`, and a spec with a fingerprint. The spec is a dataclass of plain
values, since a run saves it as spec.json, from which `infer` reads it without the data.
"""

import copy
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from .errors import UserError
from .files import check_regular, fingerprint, fingerprint_files, walk_folders, warn_left_out
from .text import (
    TextConfig,
    described,
    fingerprint_of_text,
    has_json_lines,
    is_json,
    splits_of,
    texts_in,
    warn_of_json_as_text,
)

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class DataConfig(TextConfig):
    """Settings of the data: text or token files."""

    path: Path | None = None
    """Text file, JSON lines with a field "text", .bin file of tokens, or a folder of these; if not
    given, the source code of the Python standard library."""
    context: int = 128
    """Context length, in tokens."""
    vocabulary: int = 0
    """Vocabulary size of .bin files (GPT-2: 50257; 0: not given). Ignored for text (256 bytes)."""
    token_type: Literal["uint16", "uint32"] = "uint16"
    """Integer type of .bin files (little-endian tokens without a header, as in nanoGPT)."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if self.context < 1:
            raise UserError("--data.context must be at least 1")
        if not 0 <= self.vocabulary < 2**31:
            raise UserError("--data.vocabulary must be in [0, 2^31)")


@dataclass(frozen=True)
class Spec:
    """Facts about the data that the model needs, and a fingerprint that identifies the data."""

    vocabulary: int
    # "bytes", or a digest of the tokenizer and the token that ends a document, such as
    # "0123abcd 0"; "" if unknown.
    encoding: str
    # The folder of the data and its tokenizer.
    folder: Path = field(compare=False)
    tokens_per_sample: int
    fingerprint: str


def build_datasets(config: "Config") -> tuple["Chunks", "Chunks", Spec]:
    """Return training and validation data and their spec; UserError for unusable data.

    Files with names such as valid.txt or val_0.bin are for validation. Without such files, a
    twentieth of the data is for validation: some of many text files, chosen by a hash of their
    names, or the end of other data.
    """
    data, encoding = config.data, "bytes"
    folder = data.path or Path(sysconfig.get_paths()["stdlib"])
    if not folder.exists():
        raise UserError(f"--data.path: {folder.absolute()} does not exist")
    files = [folder] if folder.suffix == ".bin" else sorted(folder.glob("*.bin"))
    if files:
        data, encoding = described(folder, data)
        check_token_files(files, data.vocabulary, data.token_type)
        for_training = [file for file in files if not file.name.startswith("val")]
        for_validation = [file for file in files if file.name.startswith("val")]
        parts = [for_training, for_validation]
        identity = fingerprint_files(folder, files, data.context, data.token_type)
    else:
        data = replace(data, vocabulary=256)
        parts = read_text(folder, "" if data.path else ".py")
        identity = fingerprint(*parts[0], *parts[1], data.context)
    training, validation = (
        Chunks(part, data.context, data.vocabulary, data.token_type) for part in parts
    )
    if not parts[1]:
        validation = training.split()
    if not any(parts):
        raise UserError(f"--data.path {folder} has neither text nor .bin files of tokens")
    if not len(training) or not len(validation):
        raise UserError(
            f"{folder} has too few tokens for training and validation with a context of "
            f"{data.context}: give more data, or a smaller --data.context"
        )
    place = folder if folder.is_dir() else folder.parent
    spec = Spec(data.vocabulary, encoding, place, data.context, identity)
    return training, validation, replace(spec, fingerprint=fingerprint_of_text(data, spec))


# One in this many text files, or samples, is for validation.
VALIDATION_SHARE = 20
# The number of files that a dataset keeps open. Many systems allow a process 1,024, some 256.
MOST_OPEN = 128


class Chunks:
    """Chunks of `context` + 1 tokens from several sources, which are arrays or .bin files."""

    # This dataset uses no random numbers. Delete the line if yours does; otherwise a resume is not
    # exact.
    draws = False

    def __init__(
        self, sources: Sequence[np.ndarray | Path], context: int, vocabulary: int, kind: str
    ) -> None:
        self.sources, self.context, self.vocabulary = sources, context, vocabulary
        self.kind = np.dtype(kind).newbyteorder("<")
        # Files are opened when first read, since there may be more than a process may open.
        self.files: dict[int, BinaryIO] = {}
        width = self.kind.itemsize
        lengths = [s.stat().st_size // width if isinstance(s, Path) else len(s) for s in sources]
        # No chunk crosses the end of a source.
        self.counts = np.array([max(0, length - 1) // context for length in lengths], int)
        self.ends = np.cumsum(self.counts)
        self.first, self.last = 0, int(self.counts.sum())

    def __len__(self) -> int:
        """Return the number of samples; an incomplete chunk at the end of a source is not used."""
        return self.last - self.first

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """Read a batch: {"tokens": [n, context + 1]}, uint8 for text, int32 for token files."""
        places = np.asarray(ids) + self.first
        which = np.searchsorted(self.ends, places, side="right")
        starts = (places - (self.ends - self.counts)[which]) * self.context
        rows = np.stack(list(map(self.stretch, which.tolist(), starts.tolist())))
        if rows.dtype != np.uint8:
            # An embedding on a GPU would fail without naming the token.
            if rows.max() >= self.vocabulary:
                file = self.sources[int(which[rows.max(axis=1).argmax()])]
                raise UserError(
                    f"{file} has a token {rows.max()}, outside --data.vocabulary "
                    f"{self.vocabulary}: correct --data.vocabulary or --data.token-type"
                )
            rows = rows.astype(np.int32)
        return {"tokens": torch.from_numpy(rows)}

    def stretch(self, source: int, start: int) -> np.ndarray:
        """Read `context` + 1 tokens of a source, given by its index, from token `start` on."""
        length, width = self.context + 1, self.kind.itemsize
        if not isinstance(path := self.sources[source], Path):
            return path[start : start + length]
        try:
            if source not in self.files:
                while len(self.files) >= MOST_OPEN:
                    self.files.pop(next(iter(self.files))).close()
                self.files[source] = open(path, "rb", buffering=0)  # noqa: SIM115
            # Not memory-mapped: for a random chunk, the system would also read data around it.
            content = os.pread(self.files[source].fileno(), length * width, start * width)
        except OSError as error:
            raise UserError(f"{path} can no longer be read: {error.strerror}") from None
        if len(content) < length * width:
            raise UserError(
                f"{path} has become shorter during this run: restore the file, then run the same "
                "command again to resume"
            )
        return np.frombuffer(content, self.kind)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that is sent to loader workers, without the open files."""
        return {**vars(self), "files": {}}

    def split(self) -> "Chunks":
        """Cut off the last twentieth of the samples, and return it."""
        rest = copy.copy(self)
        self.last = rest.first = self.last - -(-self.last // VALIDATION_SHARE)
        return rest


def check_token_files(files: list[Path], vocabulary: int, kind: str) -> None:
    """Raise UserError for files that cannot contain tokens of this type."""
    if not vocabulary:
        raise UserError(f"{files[0]} is a token file: give its vocabulary size (--data.vocabulary)")
    check_regular(files)
    width = np.dtype(kind).itemsize
    for file in files:
        if not (size := file.stat().st_size) or size % width:
            raise UserError(
                f"{file} has {size:,} bytes, which is not a multiple of {width}, or 0: it is not a "
                f"file of {kind} tokens (--data.token-type)"
            )


def read_text(path: Path, ending: str) -> list[list[np.ndarray]]:
    """Read the text at `path` as bytes (uint8), for training and for validation.

    In a folder, only files whose names end with `ending` are read.
    """
    texts: dict[Path, bytes] = {}
    left_out: list[Path] = []
    json_as_text: list[Path] = []
    for file in text_files(path, ending) if path.is_dir() else [path]:
        # The Python standard library may have broken links.
        if ending and not file.is_file():
            continue
        check_regular([file])
        content = file.read_bytes()
        # UTF-16, or not text.
        if b"\0" in content:
            left_out.append(file)
            continue
        if has_json_lines(file, "text"):
            with open(file, "rb") as lines:
                content = b"\0".join(texts_in(lines, "text", len(content)))
        elif is_json(file):
            json_as_text.append(file)
        texts[file.relative_to(path)] = content
    # Only the user's own folder is read without an ending.
    if not ending:
        warn_left_out(left_out, "not UTF-8 text (NUL bytes, as UTF-16 has)")
        warn_of_json_as_text(json_as_text)
    parts: dict[str, list[bytes]] = {"train": [], "val": [], "test": []}
    for split, (name, content) in zip(splits_of([*texts]), texts.items(), strict=True):
        # A hash of the name is the same on every machine, and does not change when files are added.
        # Its bytes, since a name need not be UTF-8.
        chosen = zlib.crc32(os.fsencode(name.as_posix())) % VALIDATION_SHARE == 0
        parts[split or ("val" if chosen else "train")].append(content)
    both = [parts["train"], parts["val"]]
    # With very few files, the hash may have chosen all of them for validation.
    if not both[0]:
        both.reverse()
    return [[np.frombuffer(b"\0".join(part), np.uint8)] if part else [] for part in both]


def text_files(folder: Path, ending: str) -> Iterator[Path]:
    """Yield the files below a folder in a fixed order, without hidden and installed ones."""
    # Links are followed in the user's folder, but not in the Python standard library.
    walked = os.walk(folder) if ending else walk_folders(folder)
    for parent, folders, files in walked:
        left_out = ("site-packages", "__pycache__")
        folders[:] = sorted(f for f in folders if f not in left_out and f[0] != ".")
        yield from (Path(parent, f) for f in sorted(files) if f.endswith(ending) and f[0] != ".")
