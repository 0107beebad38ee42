"""The data: yours to replace. Text as bytes (by default Python's own source), or files of tokens.

What the rest relies on: `DataConfig`, and `build_datasets`, which gives two datasets with `__len__`
and `__getitems__` and a spec with a fingerprint. The spec is a dataclass of plain values, as a run
saves it in spec.json, for `infer` without data.
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
    """Text, or tokens."""

    path: Path | None = None
    """Text file, JSON lines with a field "text", .bin file of tokens, or a folder of these; if not
    given, the source code of the Python standard library."""
    context: int = 128
    """Context length, in tokens."""
    vocabulary: int = 0
    """Vocabulary size of .bin files (GPT-2: 50257); text has 256 bytes."""
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
    """What the model has to know of the data, and what identifies it."""

    vocabulary: int
    # What the tokens are: "bytes", or a digest of their tokenizer and the token that ends a
    # document, as "0123abcd 0" ("": not known).
    encoding: str
    folder: Path = field(compare=False)  # where they are, and their tokenizer
    tokens_per_sample: int
    fingerprint: str


def build_datasets(config: "Config") -> tuple["Chunks", "Chunks", Spec]:
    """Training and validation data and their spec; UserError for unusable data.

    Files whose names say so (valid.txt, val_0.bin) are for validation. Without any, a twentieth
    is held out: of many text files some, by a hash of their names; of other data the end.
    """
    data, encoding = config.data, "bytes"
    folder = data.path or Path(sysconfig.get_paths()["stdlib"])
    if not folder.exists():
        raise UserError(f"--data.path: there is nothing at {folder.absolute()}")
    files = [folder] if folder.suffix == ".bin" else sorted(folder.glob("*.bin"))
    if files:
        data, encoding = described(folder, data)
        check_token_files(files, data.vocabulary, data.token_type)
        parts = [[f for f in files if f.name.startswith("val") is val] for val in (False, True)]
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
        raise UserError(f"--data.path {folder}: there is no text in it, and no .bin file of tokens")
    if not len(training) or not len(validation):
        raise UserError(
            f"{folder} has too few tokens to train on and to validate with, at a context of "
            f"{data.context}: give more data, or a smaller --data.context"
        )
    place = folder if folder.is_dir() else folder.parent
    spec = Spec(data.vocabulary, encoding, place, data.context, identity)
    return training, validation, replace(spec, fingerprint=fingerprint_of_text(data, spec))


VALIDATION_SHARE = 20  # one in so many: of the text files, or of the samples
MOST_OPEN = 128  # files that a dataset keeps open; many systems allow a process 1,024, some 256


class Chunks:
    """Sample i is the i-th stretch of `context` + 1 tokens in the sources, arrays or .bin files."""

    draws = False  # no random numbers; delete this if yours does, or a resume is not exact

    def __init__(
        self, sources: Sequence[np.ndarray | Path], context: int, vocabulary: int, kind: str
    ) -> None:
        self.sources, self.context, self.vocabulary = sources, context, vocabulary
        self.kind = np.dtype(kind).newbyteorder("<")
        # Each is opened where it is first read: there may be more than a process may have open.
        self.files: dict[int, BinaryIO] = {}
        width = self.kind.itemsize
        lengths = [s.stat().st_size // width if isinstance(s, Path) else len(s) for s in sources]
        # No stretch crosses the end of a source.
        self.counts = np.array([max(0, length - 1) // context for length in lengths], int)
        self.ends = np.cumsum(self.counts)
        self.first, self.last = 0, int(self.counts.sum())

    def __len__(self) -> int:
        """Number of samples; what is left over at the end of a source is not used."""
        return self.last - self.first

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """A batch: {"tokens": [len(ids), context + 1]}, uint8 of text, int32 of token files."""
        places = np.asarray(ids) + self.first
        which = np.searchsorted(self.ends, places, side="right")
        starts = (places - (self.ends - self.counts)[which]) * self.context
        rows = np.stack(list(map(self.stretch, which.tolist(), starts.tolist())))
        if rows.dtype != np.uint8:
            if rows.max() >= self.vocabulary:  # an embedding on a GPU would not say which
                file = self.sources[int(which[rows.max(axis=1).argmax()])]
                raise UserError(
                    f"{file} has a token {rows.max()}: the file's tokens are not those that "
                    f"--data.vocabulary {self.vocabulary} and --data.token-type say"
                )
            rows = rows.astype(np.int32)
        return {"tokens": torch.from_numpy(rows)}

    def stretch(self, source: int, start: int) -> np.ndarray:
        """`context` tokens of a source, by its number, and the token after them, one axis."""
        length, width = self.context + 1, self.kind.itemsize
        if not isinstance(path := self.sources[source], Path):
            return path[start : start + length]
        try:
            if source not in self.files:
                while len(self.files) >= MOST_OPEN:
                    self.files.pop(next(iter(self.files))).close()
                self.files[source] = open(path, "rb", buffering=0)  # noqa: SIM115 - kept open
            # Not mapped: for a stretch anywhere the system would read far around it.
            content = os.pread(self.files[source].fileno(), length * width, start * width)
        except OSError as error:
            raise UserError(f"{path} can no longer be read: {error.strerror}") from None
        if len(content) < length * width:
            raise UserError(
                f"{path} has become shorter since this run began to read it: put the file back as "
                "it was; then the same command resumes"
            )
        return np.frombuffer(content, self.kind)

    def __getstate__(self) -> dict[str, Any]:
        """What a loader worker is sent: not the open files."""
        return {**vars(self), "files": {}}

    def split(self) -> "Chunks":
        """Cut off the last twentieth of the samples, and return it."""
        rest = copy.copy(self)
        self.last = rest.first = self.last - -(-self.last // VALIDATION_SHARE)
        return rest


def check_token_files(files: list[Path], vocabulary: int, kind: str) -> None:
    """UserError for files that cannot be such tokens."""
    if not vocabulary:
        raise UserError(f"{files[0]} holds tokens: say how many there are with --data.vocabulary")
    check_regular(files)
    width = np.dtype(kind).itemsize
    for file in files:
        if not (size := file.stat().st_size) or size % width:
            raise UserError(f"{file} has {size:,} bytes: not a file of {kind} tokens")


def read_text(path: Path, ending: str) -> list[list[np.ndarray]]:
    """All text at `path` in files named so, as bytes (uint8): for training, for validation."""
    texts: dict[Path, bytes] = {}
    left_out: list[Path] = []
    json_as_text: list[Path] = []
    for file in text_files(path, ending) if path.is_dir() else [path]:
        if ending and not file.is_file():
            continue  # the system's own folder may have links to nothing
        check_regular([file])
        content = file.read_bytes()
        if b"\0" in content:  # UTF-16, or no text
            left_out.append(file)
            continue
        if has_json_lines(file, "text"):
            with open(file, "rb") as lines:
                content = b"\0".join(texts_in(lines, "text", len(content)))
        elif is_json(file):
            json_as_text.append(file)
        texts[file.relative_to(path)] = content
    if not ending:  # the user's own
        warn_left_out(left_out, "not UTF-8 text (NUL bytes, as UTF-16 has)")
        warn_of_json_as_text(json_as_text)
    parts: dict[str, list[bytes]] = {"train": [], "val": [], "test": []}
    for split, (name, content) in zip(splits_of([*texts]), texts.items(), strict=True):
        # The same on every machine, and when files are added.
        chosen = zlib.crc32(name.as_posix().encode()) % VALIDATION_SHARE == 0
        parts[split or ("val" if chosen else "train")].append(content)
    both = [parts["train"], parts["val"]]
    if not both[0]:  # too few files for that
        both.reverse()
    return [[np.frombuffer(b"\0".join(part), np.uint8)] if part else [] for part in both]


def text_files(folder: Path, ending: str) -> Iterator[Path]:
    """Files below a folder, in a fixed order, without hidden and installed ones."""
    # Links are followed in a folder of the user's, not in the system's own.
    walked = os.walk(folder) if ending else walk_folders(folder)
    for parent, folders, files in walked:
        left_out = ("site-packages", "__pycache__")
        folders[:] = sorted(f for f in folders if f not in left_out and f[0] != ".")
        yield from (Path(parent, f) for f in sorted(files) if f.endswith(ending) and f[0] != ".")
