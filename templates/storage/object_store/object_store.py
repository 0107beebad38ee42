"""Use objects and folders in an object store (s3://bucket/run) like paths, through fsspec.

Requests fail now and then: a store throttles, is slow, or drops the connection. A failed request is
retried after a delay, unless a retry would fail in the same way. Credentials come from the
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
# The longest delay in seconds before each retry of a request; jitter makes it shorter.
RETRY_DELAYS = (0.5, 2.0, 6.0, 15.0)
# A launcher such as torchrun kills the run GRACE_SECONDS after a stop signal. Requests may take
# three quarters of that time, 90 seconds by default. The rest is for logging what was saved.
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
# Error numbers of a full disk, and of an exceeded quota.
FULL = (errno.ENOSPC, errno.EDQUOT)
# Protocols of fsspec for paths on this machine.
LOCAL_PROTOCOLS = ("file", "local")
# The config.json of a run directory from elsewhere may name any URL, and some protocols of fsspec
# execute code from files. So a URL that config.json names must have one of these protocols, unless
# it is also given on the command line. Add yours here.
PROTOCOLS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "http", "https", *LOCAL_PROTOCOLS}
# The first group is the protocol, and the second is the rest without leading slashes: the bucket
# and the key. There are two slashes in s3://bucket/run, and three in file:///path. pathlib turns
# two slashes into one, so s3:/bucket/run is accepted, too.
URL = re.compile(r"([a-zA-Z][\w+.-]+):/{1,3}([^/].*)")
# URLs that `remote` was called with: the command gave them, or `address_of` has logged them.
known_urls: set[str] = set()
# The handler of stop signals of the run that trains in this process; None while there is no run.
# `end_in_time` sets it.
stop_of_run: Stop | None = None


class StoreError(OSError, RankError):
    """A request failed for good: its retries failed, too, or a retry would not help."""


def end_in_time(stop: Stop | None) -> None:
    """Give requests a deadline after a stop signal, before the launcher kills this process.

    `stop` handles the signals of a run. None means that the run is over, and ends the deadline.
    """
    global stop_of_run
    stop_of_run = stop


def time_left() -> float:
    """Return the seconds until the deadline of requests; negative after the deadline.

    Only a stop signal sets a deadline. Without one, return infinity.
    """
    if stop_of_run is None:
        return math.inf
    # Before a signal, `received_at` is infinite.
    return stop_of_run.received_at + GRACE - time.monotonic()


def send_once(store: Any, method: str, *arguments: Any, **options: Any) -> Any:
    """Send one request and return the answer.

    Raises TimeoutError after REQUEST_TIMEOUT without progress, or at the deadline of a stopped run.
    Without a timeout some clients could wait forever. For example, s3fs may send the content of a
    PUT only after the store has answered "100 Continue".
    """
    progress = None
    if method in ("put_file", "get_file"):
        # fsspec counts the transferred bytes in this callback.
        progress = fsspec.Callback()
        options["callback"] = progress
    # A client without asyncio cannot be interrupted, so it gets no timeout.
    if not store.async_impl:
        return getattr(store, method)(*arguments, **options)
    # fsspec's coroutine function for `put_file` is `_put_file`.
    coroutine = getattr(store, f"_{method}")(*arguments, **options)
    future = asyncio.run_coroutine_threadsafe(coroutine, store.loop)
    bytes_moved = 0
    last_progress_at = time.monotonic()
    # Until there is an answer, check once per second for progress.
    while not futures.wait([future], 1.0).done:
        if progress is not None and progress.value != bytes_moved:
            bytes_moved = progress.value
            last_progress_at = time.monotonic()
        run_has_to_stop = time_left() <= 0
        if run_has_to_stop or time.monotonic() - last_progress_at > REQUEST_TIMEOUT:
            future.cancel()
            text = "no answer, and the run has to stop" if run_has_to_stop else "no answer"
            raise TimeoutError(errno.ETIMEDOUT, text)
    try:
        return future.result()
    except LookupError as error:
        # The answer lacks a header that the client looked up, as an answer of a failing proxy may.
        # `request` retries after an OSError, but not after a LookupError.
        raise OSError(errno.EIO, f"the answer lacks {error}") from error
    except FileNotFoundError as error:
        if method != "put_file":
            raise
        # The store no longer has the multipart upload: it was aborted, or it is complete and the
        # answer was lost. Raise an OSError, so that `request` sends the file again.
        raise OSError(errno.EIO, str(error)) from error


def store_error(error: Exception, address: str) -> StoreError:
    """Convert an error of any client to a StoreError: an errno, one line of text and the URL."""
    number = getattr(error, "errno", None) or errno.EIO
    if type(error).__name__ == "FlexibleChecksumError":
        # botocore found that the object is damaged: it does not match the store's checksum.
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
        """Return fsspec's type, "file" (an object) or "directory"; None if nothing is there."""
        with contextlib.suppress(FileNotFoundError):
            return self.request("info", self.path)["type"]
        return None

    def sizes(self) -> dict[str, int]:
        """Return the size of each object or folder directly below, by name; {} if there is none.

        The size of a folder has no meaning.
        """
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
        """Create a small object; FileExistsError if it already exists with other content.

        `check()` is called before each attempt, and may raise.
        """
        try:
            # With mode="create" the request fails if the object exists.
            self.request("pipe_file", self.path, content, check=check, mode="create")
        except OSError as error:
            # Stores report an existing object by different errors, so look for the object.
            if not self.exists():
                raise
            # If the content is the same, an earlier attempt wrote it, and the answer was lost.
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
        """Remove all objects below this folder."""
        with contextlib.suppress(FileNotFoundError):
            self.request("rm", self.path, recursive=True)
        # S3's bulk delete does not report a missing permission, but deleting a single object does.
        # So delete the objects that are left one by one.
        for path in self.request("find", self.path):
            self.request("rm_file", path)

    def abort_multipart_uploads(self) -> None:
        """Abort unfinished multipart uploads: S3 would keep and bill those of killed processes."""
        # Only s3fs, the client for S3, has this method.
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
        # None: no retry follows the last attempt.
        for delay in (*RETRY_DELAYS, None):
            try:
                if check is not None:
                    check()
                return send_once(self.store, method, *arguments, **options)
            except PermissionError as error:
                text = f"{method} was refused: {error.strerror or error}"
                raise PermissionError(errno.EACCES, text, str(self)) from error
            except FileNotFoundError as error:
                # s3fs does not set errno, by which callers recognize a missing object.
                error.errno = errno.ENOENT
                raise
            except PERMANENT_ERRORS:
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in FULL:
                    # The disk of this machine is full, so a retry of a download does not help.
                    raise
                failure = store_error(error, str(self))
                # botocore has several errors for missing credentials, such as NoCredentialsError. A
                # retry does not help.
                no_credentials = type(error).__name__.endswith("CredentialsError")
                if delay is None or no_credentials or time_left() <= 0:
                    raise failure from error
                log.info("%s: %s; trying again", self, failure.strerror)
                # Jitter keeps the ranks from retrying at the same moment. It needs its own
                # generator, since all ranks seed Python's global one with the same number.
                jittered = delay * random.SystemRandom().uniform(0.5, 1.0)
                time.sleep(max(0.0, min(jittered, time_left())))


def remote(url: str) -> RemotePath:
    """Return the object or folder at a URL; UserError if no installed package can open it."""
    url = check_address(url)
    known_urls.add(url)
    protocol = url.partition(":")[0]
    is_s3 = protocol in ("s3", "s3a")
    options = {}
    if protocol in LOCAL_PROTOCOLS:
        # Make the folders of a new file. A store needs no folders, so callers do not make them.
        options["auto_mkdir"] = True
    try:
        # Do not cache listings, since other processes write to the store, too.
        store, path = fsspec.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        hint = 'pip install -e ".[s3]"' if is_s3 else str(error)
        raise UserError(f"{url} needs a package that is not installed: {hint}") from None
    except ValueError as error:
        raise UserError(f"{url} is not a URL of an object store: {error}") from None
    if is_s3 and store.retries != 1:
        # `RemotePath.request` retries, so disable the retries of s3fs and botocore.
        store.retries = 1
        store.config_kwargs = {**store.config_kwargs, "retries": {"total_max_attempts": 1}}
    return RemotePath(store, path.rstrip("/"))


def remote_of(run: Path, url: str) -> RemotePath:
    """Open the folder at `url`, which config.json in `run` names; UserError if it may be unsafe."""
    return remote(address_of(run, url))


def address_of(run: Path, url: str) -> str:
    """Normalize `url`, which config.json in `run` names, and log it.

    Raises UserError if its protocol is not in PROTOCOLS. A URL in `known_urls`, such as one that
    the command gave, is neither refused nor logged.
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

    The message of the error does not show the credentials.
    """
    text = str(url)
    match = None
    # fsspec would interpret "::" as a chain of protocols.
    if text.isprintable() and "::" not in text:
        match = URL.fullmatch(text)
    # Credentials are before an "@", as in s3://name:password@bucket/run, or after a "?". A key may
    # contain an "@", so look for an "@" only before the key. But a text that does not match may be
    # a mistyped URL, so look at all of it.
    before_key = text
    if match:
        before_key, _, _ = match[2].partition("/")
    if "@" in before_key or "?" in text:
        raise UserError(
            "a URL must not contain credentials, since it is logged and saved: set them in the "
            "environment (such as AWS_PROFILE) or in ~/.config/fsspec. An account of Azure "
            "belongs there, too: abfs://container/run"
        )
    if match is None:
        raise UserError(f"{text!a} is not a URL of an object store: write it as s3://bucket/run")
    protocol, rest = match.groups()
    # The path of a local file begins with a slash, which is not in `rest`.
    root = "/" if protocol in LOCAL_PROTOCOLS else ""
    return f"{protocol}://{root}{rest}".rstrip("/")
