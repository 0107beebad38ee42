"""Objects of a store as streams: read by ranges, hashed while they are written."""

import errno
import hashlib
import io
import os
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractBufferedFile

if TYPE_CHECKING:
    from .object_store import RemotePath

PART = 32 << 20  # bytes of an upload in several parts, of which S3 takes 10,000


class RangeReader(io.RawIOBase):
    """Reads an object by ranges; each is fetched again when that fails."""

    def __init__(self, path: "RemotePath", size: int) -> None:
        self.path, self.size, self.at = path, size, 0

    def readable(self) -> bool:
        """True."""
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in the object."""
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fetch the next bytes."""
        end = min(self.at + len(buffer), self.size)
        content = self.path.read(self.at, end) if self.at < end else b""
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)


class HashingWriter(io.RawIOBase):
    """Passes on what is written, and keeps its size and sha256; once it has failed, it fails."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.size, self.sha256 = stream, 0, hashlib.sha256()
        self.failed: OSError | None = None

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, content: Any) -> int:
        """Pass on."""
        if self.failed:
            raise self.failed
        view = memoryview(content).cast("B")
        try:
            for start in range(0, view.nbytes, PART):  # the stream makes copies
                self.stream.write(view[start : start + PART])
        except Exception as error:  # of the store's client, not all OSErrors: torch.save hides them
            code = errno.EACCES if isinstance(error, PermissionError) else errno.EIO
            self.failed = OSError(code, f"{error}" or type(error).__name__)
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


def abandon(stream: Any) -> None:
    """Close a stream without completing what it uploads, which closing alone would."""
    try:
        stream.discard()
    finally:
        if isinstance(stream, AbstractBufferedFile):
            stream.closed = True
        else:
            stream.close()
