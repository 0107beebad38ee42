"""Places in an object store, used as paths are, through fsspec: s3://bucket/run and its like.

Who may use the store is told by the environment or fsspec's own settings, never here.
"""

import contextlib
import errno
import io
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from ..errors import UserError
from .retrying import persistently
from .streams import HashingWriter, RangeReader, abandon, may_pass

log = logging.getLogger(__name__)
PART = 32 << 20  # bytes of an upload in several parts, of which S3 takes 10,000
LIMIT = 300.0  # seconds for one request, of which none moves more bytes than a part has
READ = 16 << 20  # bytes that are fetched at once
RETRYING = {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"}
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
    def limit(self) -> dict[str, float]:
        """What bounds a call, where one can be bounded: s3fs may wait for ever to be heard."""
        return {"timeout": LIMIT} if self.store.async_impl else {}

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
            return persistently(lambda: self.store.info(self.path, **self.limit), self)
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
            found = persistently(lambda: self.store.ls(self.path, detail=True, **self.limit), self)
            entries = ((entry["name"].rstrip("/"), entry["size"] or 0) for entry in found)
            return {n.rpartition("/")[2]: size for n, size in entries if n != self.path}
        return {}

    def open(self) -> BinaryIO:
        """Open for reading, anywhere in it; FileNotFoundError when there is no such object."""
        info = self.info()
        if info is None or info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return io.BufferedReader(RangeReader(self, info["size"]), READ)

    def read(self) -> bytes:
        """All of a small object."""
        return persistently(lambda: self.store.cat_file(self.path, **self.limit), self)

    def write(self, content: bytes) -> None:
        """Write a small object, in place of what is there."""
        persistently(lambda: self.store.pipe_file(self.path, content, **self.limit), self)

    def write_new(self, content: bytes, check: Callable[[], None]) -> None:
        """Write a small object where there is none; FileExistsError when there is another.

        `check()` is called before each attempt, and may raise.
        """

        def write() -> None:
            check()
            self.store.pipe_file(self.path, content, mode="create", **self.limit)

        try:
            persistently(write, self)
        except OSError as error:  # not every store says why it would not
            if not self.exists():
                raise
            if self.read() != content:  # else it is ours, and only the answer was lost
                raise FileExistsError(errno.EEXIST, "there is another", str(self)) from error

    @contextlib.contextmanager
    def create(self) -> Iterator[BinaryIO]:
        """Write an object as a stream, hashed on its way; after an error there is none."""
        with may_pass():
            stream = self.store.open(self.path, "wb", block_size=PART)
        hashing = HashingWriter(stream, PART)
        try:
            yield hashing
            with may_pass():
                stream.close()
        except BaseException:
            with contextlib.suppress(Exception):
                abandon(stream)
            raise
        self.written[self.path] = hashing.entry()

    def rename(self, other: "RemotePath") -> None:
        """Copy, then remove: stores know nothing better. For small objects."""
        persistently(lambda: self.store.cp_file(self.path, other.path, **self.limit), self)
        self.unlink()
        if self.path in self.written:
            self.written[other.path] = self.written.pop(self.path)

    def unlink(self) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            persistently(lambda: self.store.rm_file(self.path, **self.limit), self)

    def remove_tree(self) -> None:
        """Remove all objects below."""

        def remove() -> None:
            self.store.rm(self.path, recursive=True, **self.limit)
            if self.store.find(self.path, **self.limit):  # S3's bulk delete tells of no failures
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
        count = 0
        try:
            found, answer = [], persistently(listing, self)
            while found.extend(answer.get("Uploads", [])) or answer.get("IsTruncated"):
                markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
                more = {name: answer[source] for name, source in markers.items()}
                answer = persistently(partial(listing, **more), self)
            for upload in found:
                which = bucket, upload["Key"], upload["UploadId"]
                with contextlib.suppress(FileNotFoundError):
                    persistently(partial(self.store.abort_mpu, *which), self)
                    count += 1
        except (OSError, KeyError) as error:  # it takes rights of its own; some stores lack it
            log.info("half uploads in %s, if there are any, stay: %s", self, error)
        return count


Place = Path | RemotePath


def located(where: Path | str | RemotePath) -> Place:
    """A path, or the place in a store that a URL names.

    UserError for a URL that nothing here can open, or that holds a password.
    """
    if isinstance(where, RemotePath) or not (match := URL.fullmatch(str(where))):
        return where if isinstance(where, RemotePath) else Path(where)
    protocol, rest = match.groups()  # pathlib folds the two slashes of a URL into one
    url = f"{protocol}://{'/' if protocol in ('file', 'local') else ''}{rest}".rstrip("/")
    check_address(url)
    how: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("file", "local"):
        how["auto_mkdir"] = True
    if protocol in ("s3", "s3a") and not (
        os.environ.keys() & RETRYING or fsspec.config.conf.get("s3")
    ):
        # Else s3fs and botocore make 25 requests of one, each with its time-out.
        how["config_kwargs"] = {"retries": {"max_attempts": 1}}
    try:
        store, path = fsspec.url_to_fs(url, **how)
    except ImportError as error:
        how_to = 'pip install -e ".[s3]"' if protocol in ("s3", "s3a") else str(error)
        raise UserError(f"{url} needs a package that is not here: {how_to}") from None
    except ValueError as error:
        raise UserError(f"{url} is no address of a store: {error}") from None
    for name in ("call_s3", "abort_mpu", "touch"):  # what its streams call
        if hasattr(store, "call_s3") and not isinstance(call := getattr(store, name), partial):
            setattr(store, name, partial(call, timeout=LIMIT))
    return RemotePath(store, path.rstrip("/"))


def check_address(url: str) -> None:
    """UserError for what is no URL, or one with a password in it, which is not repeated."""
    match = URL.fullmatch(url)
    if match and ("@" in match[2].partition("/")[0] or "?" in match[2]):
        raise UserError(
            f"{match[1]}://…: no credentials in an address, which is written to config.json and "
            "logs: give them by the environment (as AWS_PROFILE) or in ~/.config/fsspec"
        )
    if not match:
        raise UserError(f"--checkpoint.url {url}: an address as s3://bucket/run is wanted")


def created(path: Place) -> contextlib.AbstractContextManager[Any]:
    """Open for writing, on disk or in a store."""
    return path.create() if isinstance(path, RemotePath) else open(path, "wb")
