"""Use objects and folders in an object store (s3://bucket/run) like paths, through fsspec.

Requests fail now and then: a store throttles, is slow, or drops the connection. A failed request is
retried after a delay, unless it would fail again in the same way. Credentials come from the
environment or from fsspec's configuration, never from this project.
"""

import asyncio
import contextlib
import errno
import logging
import math
import os
import random
import re
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from ..distributed.stop import Stop
from ..errors import RankError, UserError

log = logging.getLogger(__name__)
# Seconds to wait for an answer, or for progress of a file transfer.
REQUEST_TIMEOUT = 300.0
# Maximum seconds before each retry of a request.
RETRY_DELAYS = (0.5, 2.0, 6.0, 15.0)
# Seconds for requests after a stop signal. torchrun kills the run after GRACE_SECONDS (launch.sh);
# the rest of that time is for logging what was saved.
GRACE = 0.75 * int(os.environ.get("GRACE_SECONDS") or "120")
# Requests that fail with these errors would fail again, so they are not retried.
PERMANENT_ERRORS = (
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    NotImplementedError,
    ImportError,
)
# Errors of a disk without room.
FULL = (errno.ENOSPC, errno.EDQUOT)
# Protocols of fsspec for paths on this machine.
LOCAL_PROTOCOLS = ("file", "local")
# Protocols that may be opened when only a config.json names the URL, not the command; add yours
# here. A run directory from elsewhere may name any URL, and some protocols of fsspec execute code
# from files.
PROTOCOLS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "http", "https", *LOCAL_PROTOCOLS}
# The protocol, and the bucket and key. Between them are two slashes, which pathlib merges into one;
# file:///path has three.
URL = re.compile(r"([a-zA-Z][\w+.-]+):/{1,3}([^/].*)")
# URLs that the command was given, or that were logged.
known_urls: set[str] = set()
# The handler of stop signals while a run trains in this process (`end_in_time`), else None.
stop_of_run: Stop | None = None


class StoreError(OSError, RankError):
    """A request failed, and so did its retries."""


def end_in_time(stop: Stop | None) -> None:
    """After a stop signal, give up requests before the launcher kills this process.

    None means that the run is over: later requests have no deadline.
    """
    global stop_of_run
    stop_of_run = stop


def time_left() -> float:
    """Return the seconds left for requests after a stop signal: negative when it is too late.

    Infinity without a signal.
    """
    if stop_of_run is None:
        return math.inf
    # Before a signal, `received_at` is infinite.
    return stop_of_run.received_at + GRACE - time.monotonic()


def send_once(store: Any, method: str, *arguments: Any, **options: Any) -> Any:
    """Send one request and return the answer; TimeoutError when there is no progress for too long.

    Without a timeout some clients would wait forever, as s3fs does for permission to send a PUT.
    """
    progress = None
    if method in ("put_file", "get_file"):
        # fsspec counts the transferred bytes in this callback.
        progress = fsspec.Callback()
        options["callback"] = progress
    # A client without asyncio cannot be interrupted, so it gets no timeout.
    if not store.async_impl:
        return getattr(store, method)(*arguments, **options)
    coroutine = getattr(store, f"_{method}")(*arguments, **options)
    future = asyncio.run_coroutine_threadsafe(coroutine, store.loop)
    bytes_moved = 0
    moved_at = time.monotonic()
    # Look once per second until there is an answer.
    while not futures.wait([future], 1.0).done:
        if progress is not None and progress.value != bytes_moved:
            bytes_moved = progress.value
            moved_at = time.monotonic()
        run_has_to_stop = time_left() <= 0
        if run_has_to_stop or time.monotonic() - moved_at > REQUEST_TIMEOUT:
            future.cancel()
            text = "no answer, and the run has to stop" if run_has_to_stop else "no answer"
            raise TimeoutError(errno.ETIMEDOUT, text)
    try:
        return future.result()
    except LookupError as error:
        # A header is missing, as in an answer of a failing proxy. An OSError is retried.
        raise OSError(errno.EIO, f"the answer lacks {error}") from error
    except FileNotFoundError as error:
        if method != "put_file":
            raise
        # The store does not know the multipart upload: it was aborted, or it is complete and the
        # answer was lost. A retry sends the file again, so this is a temporary error.
        raise OSError(errno.EIO, str(error)) from error


def store_error(error: Exception, address: str) -> StoreError:
    """Convert any client's error to a StoreError with a number, one line of text and the URL."""
    number = getattr(error, "errno", None) or errno.EIO
    if type(error).__name__ == "FlexibleChecksumError":
        # botocore found that the object does not match the store's checksum: it is damaged.
        number = errno.EBADMSG
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    first_line = text.partition("\n")[0]
    return StoreError(number, first_line, address)


@dataclass(frozen=True)
class RemotePath:
    """An object or a folder in a store; `path` is its bucket and key, without the protocol."""

    store: Any
    path: str

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.store, f"{self.path}/{name}")

    def __str__(self) -> str:
        return self.store.unstrip_protocol(self.path)

    def __reduce__(self) -> Any:
        """Pickle only the URL: each process opens it with its own credentials."""
        return remote, (str(self),)

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition("/")[2]

    def exists(self) -> bool:
        """Return whether there is an object at this path, or below it."""
        return self._type() in ("file", "directory")

    def is_file(self) -> bool:
        """Return whether there is an object at this path."""
        return self._type() == "file"

    def _type(self) -> str | None:
        """Return fsspec's type, such as "file" (an object) or "directory"; None for nothing."""
        with contextlib.suppress(FileNotFoundError):
            return self.request("info", self.path)["type"]
        return None

    def sizes(self) -> dict[str, int]:
        """Return the names directly below with their sizes, 0 for folders; {} if there are none."""
        sizes: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):
            for entry in self.request("ls", self.path, detail=True):
                path = entry["name"].rstrip("/")
                # Some stores also list the folder itself, as an empty object.
                if path != self.path:
                    name = path.rpartition("/")[2]
                    sizes[name] = entry["size"] or 0
        return sizes

    def read(self) -> bytes:
        """Return the content of a small object."""
        return self.request("cat_file", self.path)

    def write(self, content: bytes) -> None:
        """Write or replace a small object."""
        self.request("pipe_file", self.path, content)

    def write_new(self, content: bytes, check: Callable[[], None]) -> None:
        """Create a small object; FileExistsError when there is one with other content.

        `check()` is called before each attempt, and may raise.
        """
        try:
            self.request("pipe_file", self.path, content, check=check, mode="create")
        except OSError as error:
            # Not every store reports that the object exists, so look for it.
            if not self.exists():
                raise
            # If the content is the same, an earlier attempt succeeded and its answer was lost.
            if self.read() != content:
                text = "exists with other content"
                raise FileExistsError(errno.EEXIST, text, str(self)) from error

    def send(self, source: Path) -> None:
        """Upload a file to this object, replacing it if it exists."""
        self.request("put_file", str(source), self.path)

    def fetch(self, target: Path) -> None:
        """Download the object into a file."""
        self.request("get_file", self.path, str(target))

    def unlink(self) -> None:
        """Remove the object, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.request("rm_file", self.path)

    def remove_tree(self) -> None:
        """Remove all objects below."""
        with contextlib.suppress(FileNotFoundError):
            self.request("rm", self.path, recursive=True)
        # S3's bulk delete does not report a missing permission. So delete what is left one by one,
        # which does.
        for path in self.request("find", self.path):
            self.request("rm_file", path)

    def abort_multipart_uploads(self) -> None:
        """Abort multipart uploads left by killed processes, which S3 would keep and bill."""
        # Only the client for S3 has this method.
        if not hasattr(self.store, "call_s3"):
            return
        bucket, prefix, _ = self.store.split_path(f"{self.path}/")
        try:
            listed = self.request("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            for upload in listed.get("Uploads", []):
                self.request("abort_mpu", bucket, upload["Key"], upload["UploadId"])
        except (OSError, KeyError) as error:
            # Listing uploads needs a separate permission, and some stores cannot do it.
            log.info("could not look for unfinished uploads in %s: %s", self, error)

    def request(
        self, method: str, *arguments: Any, check: Callable[[], None] | None = None, **options: Any
    ) -> Any:
        """Send a request, and retry after temporary failures; StoreError after the last retry.

        `check()` is called before each attempt, and may raise.
        """
        for delay in (*RETRY_DELAYS, None):
            try:
                if check is not None:
                    check()
                return send_once(self.store, method, *arguments, **options)
            except PermissionError as error:
                text = f"{method} was refused: {error.strerror or error}"
                raise PermissionError(errno.EACCES, text, str(self)) from error
            except FileNotFoundError as error:
                # s3fs does not set the number that distinguishes a missing object from a failure.
                error.errno = errno.ENOENT
                raise
            except PERMANENT_ERRORS:
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in FULL:
                    # This machine's disk is full, not the store.
                    raise
                failure = store_error(error, str(self))
                # botocore has several errors for missing credentials; a retry does not help.
                no_credentials = type(error).__name__.endswith("CredentialsError")
                if delay is None or no_credentials or time_left() <= 0:
                    raise failure from error
                log.info("%s: %s; trying again", self, failure.strerror)
                # Jitter keeps the ranks from retrying at the same moment. Python's global generator
                # cannot be used, since all ranks seed it alike.
                jittered = delay * random.SystemRandom().uniform(0.5, 1.0)
                time.sleep(max(0.0, min(jittered, time_left())))


def remote(url: str) -> RemotePath:
    """Return the object or folder at a URL; UserError if no installed package can open it."""
    url = check_address(url)
    known_urls.add(url)
    protocol = url.partition(":")[0]
    of_s3 = protocol in ("s3", "s3a")
    options = {}
    if protocol in LOCAL_PROTOCOLS:
        # In a store there is no need to make folders.
        options["auto_mkdir"] = True
    try:
        # Without a cache of listings, since other processes write there, too.
        store, path = fsspec.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        hint = 'pip install -e ".[s3]"' if of_s3 else str(error)
        raise UserError(f"{url} needs a package that is not installed: {hint}") from None
    except ValueError as error:
        raise UserError(f"{url} is not a URL of an object store: {error}") from None
    if of_s3 and store.retries != 1:
        # `RemotePath.request` retries, so disable the retries of s3fs and botocore.
        store.retries = 1
        store.config_kwargs = {**store.config_kwargs, "retries": {"total_max_attempts": 1}}
    return RemotePath(store, path.rstrip("/"))


def remote_of(run: Path, url: str) -> RemotePath:
    """Return the folder at the URL in a run's config.json, if `address_of` accepts it."""
    return remote(address_of(run, url))


def address_of(run: Path, url: str) -> str:
    """Normalize the `url` in a run's config.json, and log it unless the command gave it.

    Raises UserError if its protocol is not in PROTOCOLS, unless the command gave the same URL.
    """
    url = check_address(url)
    if url not in known_urls:
        if url.partition(":")[0] not in PROTOCOLS:
            raise UserError(
                f"{run}/config.json names {url}, whose protocol may be unsafe: give this URL on "
                f"the command line, or add its protocol to PROTOCOLS in {__name__}"
            )
        log.info("the checkpoints of %s are in %s, according to its config.json", run, url)
    return url


def check_address(url: str) -> str:
    """Normalize a URL for fsspec; UserError if it is not a URL, or contains credentials.

    The message does not show the credentials.
    """
    text = str(url)
    match = None
    # fsspec interprets "::" as a chain of protocols.
    if text.isprintable() and "::" not in text:
        match = URL.fullmatch(text)
    # Credentials end with an "@" before the bucket, or follow a "?". If the text is not a URL, it
    # may be a mistyped one, so look at all of it. In a URL, look for an "@" only before the first
    # slash, since a key may contain one.
    may_have_credentials = text
    if match:
        may_have_credentials, _, _ = match[2].partition("/")
    if "@" in may_have_credentials or "?" in text:
        raise UserError(
            "a URL must not contain credentials, since it is logged and saved: set them in the "
            "environment (such as AWS_PROFILE) or in ~/.config/fsspec. An account of Azure "
            "belongs there, too: abfs://container/run"
        )
    if match is None:
        raise UserError(f"{text!a} is not a URL of an object store: write it as s3://bucket/run")
    protocol, rest = match.groups()
    # `rest` does not begin with a slash, which the path of a local file needs.
    root = "/" if protocol in LOCAL_PROTOCOLS else ""
    return f"{protocol}://{root}{rest}".rstrip("/")
