"""Places in an object store, used like paths, through fsspec: s3://bucket/run and the like.

Requests fail now and then: a store throttles, is slow, or cuts the connection. Each is tried again
after a pause, unless it would fail the same way. Credentials come from the environment or from
fsspec's own settings, never from here.
"""

import asyncio
import contextlib
import errno
import io
import logging
import os
import pickle
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.config import apply_config

from ..distributed.stop import Stop
from ..errors import RankError, UserError
from .object_streams import PART, HashingWriter, RangeReader, abandon

log = logging.getLogger(__name__)
T = TypeVar("T")
LIMIT = 300.0  # seconds for one request; none moves more bytes than a part has
READ = 16 << 20  # bytes that are fetched at once
PAUSES = (0.5, 2.0, 6.0, 15.0)  # seconds, at most, before each further attempt
PATIENCE = 900.0  # seconds after which there is no further attempt
# Of the time in which a run has to end: torchrun kills it after GRACE_SECONDS (launch.sh). The rest
# is for saying what was saved.
if not (seconds := os.environ.get("GRACE_SECONDS") or "120").isdecimal():
    raise UserError(f"GRACE_SECONDS is {seconds!r} in the environment: wanted a number of seconds")
GRACE = 0.75 * int(seconds)
RIGHTS = {  # a request, by what it does and the right (in S3's words) that it takes
    **dict.fromkeys(("info", "cat_file"), ("be read", "s3:GetObject")),
    **dict.fromkeys(("ls", "find"), ("be listed", "s3:ListBucket")),
    **dict.fromkeys(("pipe_file", "cp_file", "touch"), ("be written", "s3:PutObject")),
    **dict.fromkeys(("rm", "rm_file"), ("be deleted", "s3:DeleteObject")),
}
LASTING = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(TypeError, ValueError, LookupError, AttributeError, NotImplementedError, ImportError),
    pickle.PickleError,
)
# Of botocore: errors that no pause mends, and the store's own checksum of an object.
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")
CHECKSUM = "FlexibleChecksumError"
PROTOCOLS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "http", "https", "file", "local"}
"""Addresses that are opened because a config.json says so, and not the command: add yours here.

Whoever made a run directory chose the address. Some protocols of fsspec run what a file says."""
known: set[tuple[str, str]] = set()
"""Protocol and rest of the addresses that this command gave or has shown."""
URL = re.compile(r"([a-zA-Z][\w+.-]+):/{1,3}([^/].*)")  # pathlib folds two slashes into one


class StoreError(OSError, RankError):
    """A store could not be used, however often it was tried."""


def time_left() -> float:
    """Seconds in which a run that was told to stop has to end: whoever waits then gives up."""
    return Stop.since + GRACE - time.monotonic()


def persistently(action: Callable[[], T], place: Any) -> T:
    """Run an action on a place in a store, again while its failure may pass; else StoreError."""
    began, pauses = time.monotonic(), iter(PAUSES)
    while True:
        try:
            return action()
        except LASTING:
            raise
        except Exception as error:
            text = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
            text = text.partition("\n")[0]
            pause = next(pauses, None)
            over = time.monotonic() - began > PATIENCE or time_left() <= 0
            if pause is None or over or type(error).__name__ in NO_CREDENTIALS:
                code = getattr(error, "errno", None) or errno.EIO
                if type(error).__name__ == CHECKSUM:
                    code = errno.EBADMSG
                raise StoreError(code, text, str(place)) from error
            log.info("%s: %s; trying again", place, text)
            pause *= random.uniform(0.5, 1.0)  # not the same on all ranks
            time.sleep(max(0.0, min(pause, time_left())))


def answer(store: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """What a store answers to a request; TimeoutError when that takes too long.

    Some wait for ever: s3fs, for the leave to send a PUT. A run that stops has little time.
    """
    if not store.async_impl:
        return getattr(store, name)(*arguments, **options)
    request = getattr(store, f"_{name}")(*arguments, **options)
    future = asyncio.run_coroutine_threadsafe(request, store.loop)
    began = time.monotonic()
    while not futures.wait([future], 1.0).done:
        if time.monotonic() - began > LIMIT or time_left() <= 0:
            future.cancel()
            text = "no answer, and the run has to stop" if time_left() <= 0 else "no answer"
            raise TimeoutError(errno.ETIMEDOUT, text)
    try:
        return future.result()
    except LookupError as error:  # it lacks the headers of an object
        raise OSError(errno.EIO, f"an answer without {error}") from error


@dataclass(frozen=True)
class RemotePath:
    """A place in a store."""

    store: Any
    path: str

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.store, f"{self.path}/{name}")

    def __str__(self) -> str:
        return self.store.unstrip_protocol(self.path)

    def __hash__(self) -> int:
        return hash(self.path)

    def __reduce__(self) -> Any:
        """Sent to another rank as an address: each process opens it with its own credentials."""
        return remote, (str(self),)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The folder that it is in."""
        return RemotePath(self.store, self.path.rpartition("/")[0])

    def is_symlink(self) -> bool:
        """A store has no links."""
        return False

    def info(self) -> dict[str, Any]:
        """What the store says of it: "type" and "size"; {} when there is nothing."""
        with contextlib.suppress(FileNotFoundError):
            return self._call("info", self.path)
        return {}

    def exists(self) -> bool:
        """Whether there is an object, or one below."""
        return bool(self.info())

    def is_file(self) -> bool:
        """Whether it is an object."""
        return self.info().get("type") == "file"

    def sizes(self) -> dict[str, int]:
        """The names right below, with their sizes (0 for folders); {} if there is nothing."""
        with contextlib.suppress(FileNotFoundError):
            entries = self._call("ls", self.path, detail=True)
            sizes = {entry["name"].rstrip("/"): entry["size"] or 0 for entry in entries}
            return {n.rpartition("/")[2]: size for n, size in sizes.items() if n != self.path}
        return {}

    def open(self) -> Any:
        """Open for reading, anywhere in it."""
        info = self.info()
        if info.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return io.BufferedReader(RangeReader(self, info["size"]), READ)

    def read(self, start: int | None = None, end: int | None = None) -> bytes:
        """All of a small object, or a range of one."""
        return self._call("cat_file", self.path, start=start, end=end)

    def write(self, content: bytes) -> None:
        """Write a small object, in place of what is there."""
        self._call("pipe_file", self.path, content)

    def write_new(self, content: bytes, check: Callable[[], None]) -> None:
        """Write a small object where there is none; FileExistsError when there is another.

        `check()` is called before each attempt, and may raise.
        """

        def write() -> None:
            check()
            answer(self.store, "pipe_file", self.path, content, mode="create")

        try:
            with naming_right("pipe_file", self):
                persistently(write, self)
        except OSError as error:  # not every store says why it would not
            if not self.exists():
                raise
            if self.read() != content:  # else it is ours, and only the answer was lost
                raise FileExistsError(errno.EEXIST, "there is another", str(self)) from error

    @contextlib.contextmanager
    def create(self) -> Iterator[Any]:
        """Write an object as a stream, hashed on its way; after an error there is none."""
        with may_pass():
            stream = self.store.open(self.path, "wb", block_size=PART)
        hashing = HashingWriter(stream)
        try:
            with naming_right("pipe_file", self):
                yield hashing
                with may_pass():
                    stream.close()
        except BaseException:
            with contextlib.suppress(Exception):
                abandon(stream)
            raise

    def rename(self, other: "RemotePath") -> None:
        """Copy, then remove: stores know nothing better. For small objects."""
        self._call("cp_file", self.path, other.path)
        self.unlink()

    def unlink(self) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._call("rm_file", self.path)

    def remove_tree(self) -> None:
        """Remove all objects below."""

        def remove() -> None:
            answer(self.store, "rm", self.path, recursive=True)
            if left := answer(self.store, "find", self.path):
                answer(self.store, "rm_file", left[0])  # S3's bulk delete reports no refusal
                raise OSError(errno.EIO, "not all of it could be removed", str(self))

        with contextlib.suppress(FileNotFoundError), naming_right("rm", self):
            persistently(remove, self)

    def abort_uploads(self) -> None:
        """Drop uploads in parts that killed processes left below (S3 keeps, and bills, them).

        At most 1,000 at a start; none in stores that do not list them.
        """
        if not hasattr(self.store, "call_s3"):
            return
        bucket, prefix, _ = self.store.split_path(f"{self.path}/")
        listing = partial(self.store.call_s3, "list_multipart_uploads", Bucket=bucket)
        try:
            uploads = persistently(partial(listing, Prefix=prefix), self).get("Uploads", [])
            for upload in uploads:
                which = bucket, upload["Key"], upload["UploadId"]
                with contextlib.suppress(FileNotFoundError):
                    persistently(partial(self.store.abort_mpu, *which), self)
                    log.info("dropped a half upload: %s", upload["Key"])
        except (OSError, KeyError) as error:  # it takes rights of its own; some stores lack it
            log.info("half uploads in %s, if there are any, stay: %s", self, error)

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        with naming_right(name, self):
            return persistently(lambda: answer(self.store, name, *arguments, **options), self)


@contextlib.contextmanager
def naming_right(name: str, place: Any) -> Iterator[None]:
    """Name the object, the request and the right in a PermissionError: the store names none."""
    try:
        yield
    except PermissionError as error:
        what, right = RIGHTS[name]
        text = f"it cannot {what} ({error.strerror or error}), which takes the right {right}"
        raise PermissionError(errno.EACCES, text, str(place)) from error


def remote(url: str) -> RemotePath:
    """The place in a store that a URL names; UserError if nothing here can open it."""
    protocol, rest = check_address(url)
    known.add((protocol, rest))
    # To three slashes for files, to two for stores.
    url = f"{protocol}://{'/' if protocol in ('file', 'local') else ''}{rest}".rstrip("/")
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("file", "local"):
        options["auto_mkdir"] = True
    of_s3 = protocol in ("s3", "s3a")
    try:
        if of_s3:
            options["config_kwargs"] = once_each()
        store, path = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        hint = 'pip install -e ".[s3]"' if of_s3 else str(error)
        raise UserError(f"{url} needs a package that is not here: {hint}") from None
    except ValueError as error:
        raise UserError(f"{url} is no address of a store: {error}") from None
    if of_s3:
        store.retries = 1  # as `once_each`
        for name in ("call_s3", "abort_mpu", "touch"):  # what its streams call
            setattr(store, name, partial(answer, store, name))
    return RemotePath(store, path.rstrip("/"))


def once_each() -> dict[str, Any]:
    """Settings with which botocore sends each request once, beside the user's own for S3.

    `persistently` tries again. s3fs, botocore and aiohttp would, too, and their attempts multiply.
    """
    given = apply_config(fsspec.get_filesystem_class("s3"), {})
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):
        """Sends a request once, also when its connection is dropped."""

        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            session._retry_connection = False
            return session

    once = {"retries": {"total_max_attempts": 1}, "http_session_cls": Session}
    return {**given.get("config_kwargs", {}), **once}


def remote_of(run: Path, url: str) -> RemotePath:
    """The place that a run's config.json names, shown before it is opened; UserError."""
    protocol, rest = check_address(url)
    if (protocol, rest) not in known:
        if protocol not in PROTOCOLS:
            raise UserError(
                f"{run}/config.json names {url}, which is not opened unasked: give the address "
                f"itself, or add {protocol} to PROTOCOLS in {__name__} if you trust it"
            )
        log.info("%s has its checkpoints in %s, as its config.json says", run, url)
    return remote(url)


def check_address(url: str) -> tuple[str, str]:
    """Protocol and rest; UserError for no URL, or one with a password, which is not repeated."""
    if not isinstance(url, str) or "::" in url or not url.isprintable():
        raise UserError(f"{url!a} is no address of a store: one protocol, as in s3://bucket/run")
    match = URL.fullmatch(url)
    if match and ("@" in match[2].partition("/")[0] or "?" in match[2]):
        raise UserError(
            f"{match[1]}://…: no credentials in an address, which is written to config.json and "
            "logs: give them by the environment (as AWS_PROFILE) or in ~/.config/fsspec"
        )
    if not match:
        raise UserError(f"--checkpoint.url {url}: give an address such as s3://bucket/run")
    return match[1], match[2]


@contextlib.contextmanager
def may_pass() -> Iterator[None]:
    """Give an error that may pass: an upload in parts that is not found may be, the next time."""
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(errno.EIO, f"{error}") from error
