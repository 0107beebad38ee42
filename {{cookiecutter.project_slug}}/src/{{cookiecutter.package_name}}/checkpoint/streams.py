"""An object of a store as a stream: read by ranges, or written and hashed on its way."""

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Iterator
from typing import Any

from fsspec.spec import AbstractBufferedFile

from .retrying import persistently


class RangeReader(io.RawIOBase):
    """Reads an object by ranges; each is fetched again when that fails."""

    def __init__(self, place: Any, size: int) -> None:
        self.place, self.size, self.at = place, size, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go somewhere."""
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        """Where it is."""
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fetch the next bytes."""
        end = min(self.at + len(buffer), self.size)
        if end <= self.at:
            return 0
        place, how = self.place, {"start": self.at, "end": end, **self.place.limit}
        content = persistently(lambda: place.store.cat_file(place.path, **how), place)
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)


class HashingWriter(io.RawIOBase):
    """Passes on what is written, and keeps its size and sha256; once it has failed, it fails."""

    def __init__(self, stream: Any, most: int) -> None:
        """`most` bytes are handed on at once."""
        self.stream, self.most, self.size, self.sha256 = stream, most, 0, hashlib.sha256()
        self.failed: OSError | None = None

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, content: Any) -> int:
        """Hand on."""
        if self.failed:
            raise self.failed
        view = memoryview(content).cast("B")
        try:
            for start in range(0, view.nbytes, self.most):  # it makes copies of them
                self.stream.write(view[start : start + self.most])
        except Exception as error:  # of the store's client, not all OSErrors: torch.save hides them
            self.failed = OSError(errno.EIO, f"{error}" or type(error).__name__)
            raise self.failed from error
        self.sha256.update(view)
        self.size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Where it is."""
        return self.size

    def entry(self) -> dict[str, Any]:
        """What went through, as a manifest has it."""
        return {"size": self.size, "sha256": self.sha256.hexdigest()}


@contextlib.contextmanager
def may_pass() -> Iterator[None]:
    """What is not found while it is written, such as an upload in parts, may be the next time."""
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(errno.EIO, f"{error}") from error


def abandon(stream: Any) -> None:
    """Close a stream without completing what it uploads, which closing alone would."""
    try:
        stream.discard()
    finally:
        if isinstance(stream, AbstractBufferedFile):
            stream.closed = True
        else:
            stream.close()
