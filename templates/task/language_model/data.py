"""Build the data: text as bytes (default: Python's own source) or token files. Yours to replace.

Other modules rely on `DataConfig` and `build_datasets`. `build_datasets` returns two datasets, with
`__len__` and `__getitems__`, and a spec, with a fingerprint. The spec is a dataclass of plain
values: a run saves it as spec.json, so that the trained model can be loaded without the data.
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

# One of this many text files is for validation, or one of this many samples.
VALIDATION_SHARE = 20
# The maximum number of files that a dataset keeps open. Many systems let a process open 1,024
# files, and some let it open only 256.
MOST_OPEN = 128


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
    # "bytes" for text. For token files, the digest of the tokenizer and the token that ends a
    # document, such as "0123abcd 0", or "" if these are unknown.
    encoding: str
    # The folder with the data and, if the data have one, with the tokenizer.
    folder: Path = field(compare=False)
    tokens_per_sample: int
    fingerprint: str


def build_datasets(config: "Config") -> tuple["Chunks", "Chunks", Spec]:
    """Return training and validation data and their spec; UserError for unusable data.

    Names of files can choose the data for validation: token files such as val_0.bin, and text files
    such as valid.txt if there are also files such as train.txt. If the names of text files do not
    choose, a hash of each name puts about one file in 20 into validation. If the hash does not
    divide the files (there may be only one), or if no token file is named for validation, the last
    twentieth of the samples is for validation.
    """
    data = config.data
    encoding = "bytes"
    path = data.path or Path(sysconfig.get_paths()["stdlib"])
    if not path.exists():
        raise UserError(f"--data.path: {path.absolute()} does not exist")
    token_files = [path] if path.suffix == ".bin" else sorted(path.glob("*.bin"))
    if token_files:
        # `described` may complete the settings from a file next to the token files.
        data, encoding = described(path, data)
        check_token_files(token_files, data.vocabulary, data.token_type)
        for_training = [file for file in token_files if not file.name.startswith("val")]
        for_validation = [file for file in token_files if file.name.startswith("val")]
        identity = fingerprint_files(path, token_files, data.context, data.token_type)
    else:
        data = replace(data, vocabulary=256)
        # Read only the source code of the standard library, since its folder has other files, too.
        ending = "" if data.path else ".py"
        for_training, for_validation = read_text(path, ending)
        identity = fingerprint(*for_training, *for_validation, data.context)
    training = Chunks(for_training, data.context, data.vocabulary, data.token_type)
    validation = Chunks(for_validation, data.context, data.vocabulary, data.token_type)
    if not for_training and not for_validation:
        raise UserError(f"--data.path {path} has neither text nor .bin files of tokens")
    if not for_validation:
        validation = training.split()
    if not len(training) or not len(validation):
        raise UserError(
            f"{path} has too few tokens for training and validation with a context of "
            f"{data.context}: give more data, or a smaller --data.context"
        )
    spec = Spec(
        vocabulary=data.vocabulary,
        encoding=encoding,
        folder=path if path.is_dir() else path.parent,
        tokens_per_sample=data.context,
        fingerprint=identity,
    )
    # Add those settings of TextConfig to the fingerprint that change the batches, if there are any.
    spec = replace(spec, fingerprint=fingerprint_of_text(data, spec))
    return training, validation, spec


class Chunks:
    """Chunks of `context` + 1 tokens from several sources, which are arrays or .bin files.

    A chunk begins with the last token of the previous chunk, in which this token is only a target.
    """

    # False, since this dataset uses no random numbers. If your dataset uses some, delete this line:
    # otherwise the random numbers are not seeded, and a resume is not exact.
    draws = False

    def __init__(
        self, sources: Sequence[np.ndarray | Path], context: int, vocabulary: int, kind: str
    ) -> None:
        self.sources = sources
        self.context = context
        self.vocabulary = vocabulary
        # The integer type of the tokens in .bin files, which are little-endian.
        self.kind = np.dtype(kind).newbyteorder("<")
        # Open files by the index of their source. `stretch` opens a file when it first reads it,
        # since there may be more files than a process may open.
        self.files: dict[int, BinaryIO] = {}
        # The number of chunks of each source. No chunk crosses the end of a source.
        counts: list[int] = []
        for source in sources:
            if isinstance(source, Path):
                length = source.stat().st_size // self.kind.itemsize
            else:
                length = len(source)
            # Neighbouring chunks share a token, so n chunks take n * context + 1 tokens.
            counts.append(max(0, length - 1) // context)
        self.counts = np.array(counts, int)
        # For each source, the number of chunks in this source and all sources before it.
        self.ends = np.cumsum(self.counts)
        # The samples of this dataset are the chunks first ... last - 1. `split` changes these two.
        self.first = 0
        self.last = int(self.counts.sum())

    def __len__(self) -> int:
        """Return the number of samples; an incomplete chunk at the end of a source is not used."""
        return self.last - self.first

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """Read a batch: {"tokens": [n, context + 1]}, uint8 for text, int32 for token files."""
        chunks = np.asarray(ids) + self.first
        # For each chunk, find its source, and the position of its first token in that source.
        sources = np.searchsorted(self.ends, chunks, side="right")
        first_chunks = self.ends - self.counts
        starts = (chunks - first_chunks[sources]) * self.context
        rows = np.stack(list(map(self.stretch, sources.tolist(), starts.tolist())))
        if rows.dtype != np.uint8:
            # Check here: the embedding would fail on a GPU, too, but without naming the token.
            if rows.max() >= self.vocabulary:
                bad_row = rows.max(axis=1).argmax()
                file = self.sources[int(sources[bad_row])]
                raise UserError(
                    f"{file} has a token {rows.max()}, outside --data.vocabulary "
                    f"{self.vocabulary}: correct --data.vocabulary or --data.token-type"
                )
            rows = rows.astype(np.int32)
        return {"tokens": torch.from_numpy(rows)}

    def stretch(self, source: int, start: int) -> np.ndarray:
        """Read `context` + 1 tokens, from token `start` on, of the source with index `source`."""
        length = self.context + 1
        stored = self.sources[source]
        if not isinstance(stored, Path):
            return stored[start : start + length]
        bytes_per_token = self.kind.itemsize
        size = length * bytes_per_token
        try:
            if source not in self.files:
                while len(self.files) >= MOST_OPEN:
                    opened_first = next(iter(self.files))
                    self.files.pop(opened_first).close()
                self.files[source] = open(stored, "rb", buffering=0)  # noqa: SIM115
            # Do not memory-map the file: the system would also read the data around each chunk.
            content = os.pread(self.files[source].fileno(), size, start * bytes_per_token)
        except OSError as error:
            raise UserError(f"{stored} can no longer be read: {error.strerror}") from None
        if len(content) < size:
            raise UserError(
                f"{stored} has become shorter during this run: restore the file, then run the same "
                "command again to resume"
            )
        return np.frombuffer(content, self.kind)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to send to loader workers, without the open files."""
        return {**vars(self), "files": {}}

    def split(self) -> "Chunks":
        """Remove the last twentieth of the samples, and return them as another dataset."""
        validation = copy.copy(self)
        # Round up, so that the new dataset has at least one sample if there is one.
        count = -(-self.last // VALIDATION_SHARE)
        self.last -= count
        validation.first = self.last
        return validation


def check_token_files(files: list[Path], vocabulary: int, kind: str) -> None:
    """Raise UserError for files that cannot contain tokens of this type."""
    if not vocabulary:
        raise UserError(f"{files[0]} is a token file: give its vocabulary size (--data.vocabulary)")
    check_regular(files)
    width = np.dtype(kind).itemsize
    for file in files:
        size = file.stat().st_size
        if size == 0 or size % width:
            raise UserError(
                f"{file} has {size:,} bytes: a file of {kind} tokens (--data.token-type) has a "
                f"positive multiple of {width}"
            )


def read_text(path: Path, ending: str) -> list[list[np.ndarray]]:
    """Read the text at `path` as bytes (uint8): return a list for training, one for validation.

    Each list has one array, in which all its texts are joined, or is empty if it has no text. In a
    folder, only files whose names end with `ending` are read.
    """
    texts: dict[Path, bytes] = {}
    left_out: list[Path] = []
    json_as_text: list[Path] = []
    files = text_files(path, ending) if path.is_dir() else [path]
    for file in files:
        # Only the Python standard library is read with an `ending`. It may have broken links.
        if ending and not file.is_file():
            continue
        check_regular([file])
        content = file.read_bytes()
        # A file with a NUL byte is UTF-16, or it is not text.
        if b"\0" in content:
            left_out.append(file)
            continue
        if has_json_lines(file, "text"):
            with open(file, "rb") as lines:
                # Join the documents of the file with NUL bytes.
                content = b"\0".join(texts_in(lines, "text", len(content)))
        elif is_json(file):
            json_as_text.append(file)
        # If `path` is a single file, this relative path is ".", which names no split.
        texts[file.relative_to(path)] = content
    # Do not warn about files of the standard library, which is read with an `ending`.
    if not ending:
        warn_left_out(left_out, "not UTF-8 text (NUL bytes, as UTF-16 has)")
        warn_of_json_as_text(json_as_text)
    # Names of files may put them into the split "test", which is not used.
    parts: dict[str, list[bytes]] = {"train": [], "val": [], "test": []}
    for split, (name, content) in zip(splits_of([*texts]), texts.items(), strict=True):
        # If the names give no splits (""), a hash of the name decides. The hash is the same on
        # every machine, and does not change when files are added. The name is hashed as bytes,
        # since it need not be UTF-8.
        is_for_validation = zlib.crc32(os.fsencode(name.as_posix())) % VALIDATION_SHARE == 0
        by_hash = "val" if is_for_validation else "train"
        parts[split or by_hash].append(content)
    training_and_validation = [parts["train"], parts["val"]]
    # The hash may have chosen all of very few files for validation. Then use them for training.
    if not parts["train"]:
        training_and_validation.reverse()
    sources: list[list[np.ndarray]] = []
    for contents in training_and_validation:
        if contents:
            sources.append([np.frombuffer(b"\0".join(contents), np.uint8)])
        else:
            sources.append([])
    return sources


def text_files(folder: Path, ending: str) -> Iterator[Path]:
    """Yield files below a folder in a fixed order, except hidden files and installed packages."""
    # `walk_folders` follows links in the user's folder. `os.walk` does not follow links in the
    # folder of the Python standard library.
    walked = os.walk(folder) if ending else walk_folders(folder)
    for parent, folders, files in walked:
        left_out = ("site-packages", "__pycache__")
        # The walk will visit only the folders that remain in this list.
        folders[:] = sorted(f for f in folders if f not in left_out and f[0] != ".")
        for name in sorted(files):
            if name.endswith(ending) and name[0] != ".":
                yield Path(parent, name)
