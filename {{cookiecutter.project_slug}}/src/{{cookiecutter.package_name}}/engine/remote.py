"""Places in an object store, used as paths are, through fsspec: s3://bucket/run and its like.

Who may use the store is told by the environment or fsspec's own settings, never here.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from . import UserError
from .retrying import persistently

PART = 32 << 20  # bytes: of an upload in several parts (S3 takes 10,000 of them), and of a read
URL = re.compile(r"([a-zA-Z][\w+.-]+):/{1,3}([^/].*)")


@dataclass(frozen=True)
class RemotePath:
    """A place in a store. `written` holds size and sha256 of what was written below a folder."""

    store: Any
    path: str
    written: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False, repr=False)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.store, f"{self.path}/{name}", self.written)

    def __str__(self) -> str:
        return self.store.unstrip_protocol(self.path)

    def __hash__(self) -> int:
        return hash(self.path)

    def __reduce__(self) -> Any:
        """Sent to another rank as an address: how to get there is each process's own affair."""
        return located, (str(self),)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The folder it is in."""
        return RemotePath(self.store, self.path.rpartition("/")[0])

    @property
    def suffix(self) -> str:
        """The name's extension, with its dot."""
        return Path(self.name).suffix

    def info(self) -> dict[str, Any] | None:
        """What the store says of it: "type" and "size"; None when there is nothing."""
        with contextlib.suppress(FileNotFoundError):
            return persistently(lambda: self.store.info(self.path), self)
        return None

    def exists(self) -> bool:
        """Whether there is an object, or one below."""
        return self.info() is not None

    def is_file(self) -> bool:
        """Whether it is an object."""
        return (self.info() or {}).get("type") == "file"

    def sizes(self) -> dict[str, int]:
        """The names right below, with their sizes (0 for folders); {} if there is nothing."""
        with contextlib.suppress(FileNotFoundError):
            found = persistently(lambda: self.store.ls(self.path, detail=True), self)
            entries = ((entry["name"].rstrip("/"), entry["size"] or 0) for entry in found)
            return {n.rpartition("/")[2]: size for n, size in entries if n != self.path}
        return {}

    def open(self) -> BinaryIO:
        """Open for reading, anywhere in it; FileNotFoundError when there is no such object."""
        info = self.info()
        if info is None or info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return io.BufferedReader(_Ranges(self, info["size"]), PART)

    def read(self) -> bytes:
        """All of a small object."""
        return persistently(lambda: self.store.cat_file(self.path), self)

    def write(self, content: bytes) -> None:
        """Write a small object, in place of what is there."""
        persistently(lambda: self.store.pipe_file(self.path, content), self)

    def write_new(self, content: bytes) -> None:
        """Write a small object where there is none; FileExistsError when there is another."""
        try:
            persistently(lambda: self.store.pipe_file(self.path, content, mode="create"), self)
        except FileExistsError:
            if self.read() != content:  # else it was ours, and only the answer was lost
                raise

    @contextlib.contextmanager
    def create(self) -> Iterator[BinaryIO]:
        """Write an object as a stream, hashed on its way; after an error there is none."""
        stream = self.store.open(self.path, "wb", block_size=PART)
        hashing = _Hashing(stream)
        try:
            yield hashing
            stream.close()
        except BaseException:
            with contextlib.suppress(Exception):
                _abandon(stream)
            raise
        entry = {"size": hashing.size, "sha256": hashing.sha256.hexdigest()}
        self.written[self.path] = entry

    def rename(self, other: "RemotePath") -> None:
        """Copy, then remove: stores know nothing better. For small objects."""
        persistently(lambda: self.store.cp_file(self.path, other.path), self)
        self.unlink()
        if self.path in self.written:
            self.written[other.path] = self.written.pop(self.path)

    def unlink(self) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            persistently(lambda: self.store.rm_file(self.path), self)

    def remove_tree(self) -> None:
        """Remove all objects below."""

        def remove() -> None:
            self.store.rm(self.path, recursive=True)
            if self.store.find(self.path):  # S3's bulk delete tells of no failures
                raise OSError(errno.EIO, "not all of it could be removed", str(self))

        with contextlib.suppress(FileNotFoundError):
            persistently(remove, self)

    def abort_uploads(self) -> int:
        """Drop uploads in parts that a killed process left below (S3 keeps, and bills, them).

        Returns how many there were; nothing is done for stores that do not show them.
        """
        call = getattr(self.store, "call_s3", None)
        if call is None:
            return 0
        bucket, prefix, _ = self.store.split_path(f"{self.path}/")
        listing = partial(call, "list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        found, answer = [], persistently(listing, self)
        while found.extend(answer.get("Uploads", [])) or answer.get("IsTruncated"):
            markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
            more = {name: answer[source] for name, source in markers.items()}
            answer = persistently(partial(listing, **more), self)
        for upload in found:
            with contextlib.suppress(FileNotFoundError):
                which = bucket, upload["Key"], upload["UploadId"]
                persistently(partial(self.store.abort_mpu, *which), self)
        return len(found)


Place = Path | RemotePath


def located(where: Path | str | RemotePath) -> Place:
    """A path, or the place in a store that a URL names.

    UserError for a URL that nothing here can open, or that holds a password.
    """
    if isinstance(where, RemotePath) or not (match := URL.fullmatch(str(where))):
        return where if isinstance(where, RemotePath) else Path(where)
    protocol, rest = match.groups()  # pathlib folds the two slashes of a URL into one
    url = f"{protocol}://{'/' if protocol in ('file', 'local') else ''}{rest}".rstrip("/")
    if "@" in rest.partition("/")[0] or "?" in rest:
        raise UserError(
            f"{protocol}://…: no credentials in an address, which is written to config.json and "
            "logs: give them by the environment (as AWS_PROFILE) or in ~/.config/fsspec"
        )
    how = {"auto_mkdir": True} if protocol in ("file", "local") else {}
    try:
        store, path = fsspec.url_to_fs(url, use_listings_cache=False, **how)
    except ImportError as error:
        how_to = 'pip install -e ".[s3]"' if protocol in ("s3", "s3a") else str(error)
        raise UserError(f"{url} needs a package that is not here: {how_to}") from None
    except ValueError as error:
        raise UserError(f"{url} is no address of a store: {error}") from None
    return RemotePath(store, path.rstrip("/"))


def created(path: Place) -> contextlib.AbstractContextManager[Any]:
    """Open for writing, on disk or in a store."""
    return path.create() if isinstance(path, RemotePath) else open(path, "wb")


class _Ranges(io.RawIOBase):
    """Reads an object by ranges; each is fetched again when that fails."""

    def __init__(self, place: RemotePath, size: int) -> None:
        self.place, self.size, self.at = place, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        end = min(self.at + len(buffer), self.size)
        if end <= self.at:
            return 0
        fetch = self.place.store.cat_file
        content = persistently(lambda: fetch(self.place.path, start=self.at, end=end), self.place)
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)


class _Hashing(io.RawIOBase):
    """Passes on what is written, and keeps its size and sha256; once it has failed, it fails."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.size, self.sha256 = stream, 0, hashlib.sha256()
        self.failed: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        if self.failed:
            raise self.failed
        view = memoryview(content).cast("B")
        try:
            self.stream.write(view)
        except Exception as error:  # of the store's client, not all OSErrors: torch.save hides them
            self.failed = OSError(errno.EIO, f"{error}" or type(error).__name__)
            raise self.failed from error
        self.sha256.update(view)
        self.size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.size


def _abandon(stream: Any) -> None:
    """Close a stream without completing what it uploads, which closing alone would."""
    try:
        stream.discard()
    finally:
        if isinstance(stream, fsspec.spec.AbstractBufferedFile):
            stream.closed = True
        else:
            stream.close()
