"""Text and token files as datasets of equally long stretches."""

import copy
import os
import resource
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from . import UserError

VALIDATION_SHARE = 20  # one in so many: of the text files, or of the samples


class Chunks:
    """Sample i is the i-th stretch of `context` tokens and the token after it.

    No stretch crosses the end of a source, which is an array of bytes or a .bin file. Nothing is
    shared but the files: their sizes say where each sample lies, and each is opened where it is
    first read, so there may be more of them than a process may have open.
    """

    def __init__(
        self, sources: list[np.ndarray | Path], context: int, vocabulary: int, kind: str
    ) -> None:
        self.sources, self.context, self.vocabulary = sources, context, vocabulary
        self.kind = np.dtype(kind).newbyteorder("<")
        self.files: dict[int, BinaryIO] = {}
        width = self.kind.itemsize
        lengths = [s.stat().st_size // width if isinstance(s, Path) else len(s) for s in sources]
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
        rows = np.stack(
            [
                self.stretch(source, start)
                for source, start in zip(which.tolist(), starts.tolist(), strict=True)
            ]
        )
        if rows.dtype != np.uint8:
            if rows.max() >= self.vocabulary:  # an embedding on a GPU would not say which
                file = self.sources[which[rows.max(axis=1).argmax()]]
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
        if source not in self.files:
            while len(self.files) >= most_open():
                self.files.pop(next(iter(self.files))).close()
            self.files[source] = open(path, "rb", buffering=0)  # noqa: SIM115 - kept open
        # Not mapped: for a stretch anywhere the system would read far around it.
        content = os.pread(self.files[source].fileno(), length * width, start * width)
        return np.frombuffer(content, self.kind)

    def __getstate__(self) -> dict[str, Any]:
        """What a loader worker is sent: not the open files."""
        return {**vars(self), "files": {}}

    def split(self) -> "Chunks":
        """Cut off the last twentieth of the samples, and return it."""
        rest = copy.copy(self)
        self.last = rest.first = self.last - -(-self.last // VALIDATION_SHARE)
        return rest


def most_open() -> int:
    """Files that a dataset keeps open: a quarter of what the process may (`ulimit -n`)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (limit if limit > 0 else 2**16) // 4)


def token_files(path: Path) -> list[Path]:
    """`path` if it is a .bin file, or those in that folder, in the order of their names."""
    return [path] if path.suffix == ".bin" else sorted(path.glob("*.bin"))


def check_token_files(files: list[Path], vocabulary: int, kind: str) -> None:
    """UserError for files that cannot be such tokens."""
    if not vocabulary:
        raise UserError(f"{files[0]} holds tokens: say how many there are with --data.vocabulary")
    width = np.dtype(kind).itemsize
    for file in files:
        if not (size := file.stat().st_size) or size % width:
            raise UserError(f"{file} has {size:,} bytes: not a file of {kind} tokens")


def read_text(path: Path, ending: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """All text at `path` in files named so, as bytes (uint8): for training, for validation."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for file in [path] if path.is_file() else text_files(path, ending):
        content = file.read_bytes()
        if b"\0" not in content:  # else it is not text
            name = file.relative_to(path).as_posix()
            chosen = path.is_dir() and zlib.crc32(name.encode()) % VALIDATION_SHARE == 0
            parts[chosen].append(content)
    if not parts[0]:  # too few files for that
        parts = (parts[1], parts[0])
    return tuple([np.frombuffer(b"\0".join(part), np.uint8)] if part else [] for part in parts)


def text_files(folder: Path, ending: str) -> Iterator[Path]:
    """Files below a folder, in a fixed order, without hidden and installed ones."""
    for parent, folders, files in os.walk(folder):
        unwanted = ("site-packages", "__pycache__")
        folders[:] = sorted(f for f in folders if f not in unwanted and not f.startswith("."))
        wanted = (name for name in sorted(files) if name.endswith(ending) and name[0] != ".")
        yield from (Path(parent, name) for name in wanted)
