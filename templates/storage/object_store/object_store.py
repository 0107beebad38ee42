"""Objects and folders in an object store, used like paths, through fsspec: s3://bucket/run.

Requests fail now and then: a store throttles, is slow, or cuts the connection. Each request is sent
again after a delay, unless it would fail the same way. Credentials come from the environment or
from fsspec's own settings, never from here.
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
# Seconds in which a store has to answer a request, or the next bytes of a file have to move.
REQUEST_TIMEOUT = 300.0
# Seconds, at most, before each retry of a request.
RETRY_DELAYS = (0.5, 2.0, 6.0, 15.0)
# A fraction of the time in which a run has to end: torchrun kills it after GRACE_SECONDS
# (launch.sh). The rest is for logging what was saved.
GRACE = 0.75 * int(os.environ.get("GRACE_SECONDS") or "120")
# A request that fails in one of these ways would fail again, so it is not retried.
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
LOCAL_PROTOCOLS = ("file", "local")
# Addresses that are opened because a config.json says so, and not the command: add yours here. The
# maker of a run directory chose the address, and some protocols of fsspec run what a file says.
PROTOCOLS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "http", "https", *LOCAL_PROTOCOLS}
# One to three slashes, since pathlib folds two into one.
URL = re.compile(r"([a-zA-Z][\w+.-]+):/{1,3}([^/].*)")
# The addresses that this command was given or has logged.
known_urls: set[str] = set()
# The stop signals of the run that this process trains (`end_in_time`), if it trains one.
stop_of_run: Stop | None = None


class StoreError(OSError, RankError):
    """A request failed, and so did its retries."""


def end_in_time(stop: Stop) -> None:
    """Let all requests of this process end before the launcher kills it after a stop signal."""
    global stop_of_run
    stop_of_run = stop


def time_left() -> float:
    """Return the seconds until the launcher kills this run; infinity without a stop signal."""
    if stop_of_run is None:
        return math.inf
    return stop_of_run.received_at + GRACE - time.monotonic()


def send_once(store: Any, method: str, *arguments: Any, **options: Any) -> Any:
    """Send one request and return the answer; TimeoutError when nothing moves for too long.

    Without that, some clients would wait for ever: s3fs does, for the store's leave to send a PUT.
    """
    progress = None
    if method in ("put_file", "get_file"):
        # fsspec counts in it the bytes that have moved.
        progress = fsspec.Callback()
        options["callback"] = progress
    if not store.async_impl:
        return getattr(store, method)(*arguments, **options)
    coroutine = getattr(store, f"_{method}")(*arguments, **options)
    future = asyncio.run_coroutine_threadsafe(coroutine, store.loop)
    bytes_moved = 0
    moved_at = time.monotonic()
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
        # The headers of an object are missing, as in the answer of a failing proxy.
        raise OSError(errno.EIO, f"an answer without {error}") from error
    except FileNotFoundError as error:
        if method != "put_file":
            raise
        # The store does not know the multipart upload. It was aborted, or it is complete and the
        # answer was lost. A retry sends the file again, so this error may pass.
        raise OSError(errno.EIO, str(error)) from error


def store_error(error: Exception, address: str) -> StoreError:
    """Return what any client raised as a StoreError: a number, one line of text, the address."""
    number = getattr(error, "errno", None) or errno.EIO
    if type(error).__name__ == "FlexibleChecksumError":
        # botocore compared an object with the store's own checksum of it: the object is damaged.
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
        """Sent to another rank as an address: each process opens it with its own credentials."""
        return remote, (str(self),)

    @property
    def name(self) -> str:
        """The last name in the path."""
        return self.path.rpartition("/")[2]

    def exists(self) -> bool:
        """Return whether there is an object, or one below."""
        return self._type() in ("file", "directory")

    def is_file(self) -> bool:
        """Return whether it is an object."""
        return self._type() == "file"

    def _type(self) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return self.request("info", self.path)["type"]
        return None

    def sizes(self) -> dict[str, int]:
        """Return the names right below and their sizes, 0 for folders; {} if there are none."""
        sizes: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):
            for entry in self.request("ls", self.path, detail=True):
                path = entry["name"].rstrip("/")
                # Some stores list the folder itself, too, as an empty object.
                if path != self.path:
                    name = path.rpartition("/")[2]
                    sizes[name] = entry["size"] or 0
        return sizes

    def read(self) -> bytes:
        """Return the content of a small object."""
        return self.request("cat_file", self.path)

    def write(self, content: bytes) -> None:
        """Write a small object, or replace it."""
        self.request("pipe_file", self.path, content)

    def write_new(self, content: bytes, check: Callable[[], None]) -> None:
        """Write a small object where there is none; FileExistsError when there is another one.

        `check()` is called before each attempt, and may raise.
        """
        try:
            self.request("pipe_file", self.path, content, check=check, mode="create")
        except OSError as error:
            # Not every store says that the object exists, so this looks for it.
            if not self.exists():
                raise
            # With the same content an earlier attempt has written it, and its answer was lost.
            if self.read() != content:
                raise FileExistsError(errno.EEXIST, "there is another", str(self)) from error

    def send(self, source: Path) -> None:
        """Upload a file as this object, or replace the object."""
        self.request("put_file", str(source), self.path)

    def fetch(self, target: Path) -> None:
        """Download the object into a file."""
        self.request("get_file", self.path, str(target))

    def unlink(self) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.request("rm_file", self.path)

    def remove_tree(self) -> None:
        """Remove all objects below."""
        with contextlib.suppress(FileNotFoundError):
            self.request("rm", self.path, recursive=True)
        # S3's bulk delete does not report the objects that it may not remove. A single one does.
        for path in self.request("find", self.path):
            self.request("rm_file", path)

    def abort_multipart_uploads(self) -> None:
        """Abort multipart uploads below that killed processes left, which S3 keeps and bills."""
        if not hasattr(self.store, "call_s3"):
            return
        bucket, prefix, _ = self.store.split_path(f"{self.path}/")
        try:
            listed = self.request("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            for upload in listed.get("Uploads", []):
                self.request("abort_mpu", bucket, upload["Key"], upload["UploadId"])
        except (OSError, KeyError) as error:
            # To list them takes a permission of its own, and some stores cannot list them.
            log.info("half uploads in %s, if there are any, stay: %s", self, error)

    def request(
        self, method: str, *arguments: Any, check: Callable[[], None] | None = None, **options: Any
    ) -> Any:
        """Send a request, and retry while its failure may pass; StoreError after the last retry.

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
                # s3fs leaves the number out, by which a missing object is told from a failure.
                error.errno = errno.ENOENT
                raise
            except PERMANENT_ERRORS:
                raise
            except Exception as error:
                failure = store_error(error, str(self))
                # botocore has several errors for missing credentials, which no retry finds.
                no_credentials = type(error).__name__.endswith("CredentialsError")
                if delay is None or no_credentials or time_left() <= 0:
                    raise failure from error
                log.info("%s: %s; trying again", self, failure.strerror)
                # The ranks must not all come back at the same moment. Python's own generator is
                # seeded alike on all of them.
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
        options["auto_mkdir"] = True
    try:
        store, path = fsspec.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        hint = 'pip install -e ".[s3]"' if of_s3 else str(error)
        raise UserError(f"{url} needs a package that is not here: {hint}") from None
    except ValueError as error:
        raise UserError(f"{url} is no address of a store: {error}") from None
    if of_s3 and store.retries != 1:
        # `RemotePath.request` retries. Retries of s3fs and of botocore would multiply with these.
        store.retries = 1
        store.config_kwargs = {**store.config_kwargs, "retries": {"total_max_attempts": 1}}
    return RemotePath(store, path.rstrip("/"))


def remote_of(run: Path, url: str) -> RemotePath:
    """Return the folder at the URL in a run's config.json, and log the URL before it is opened.

    UserError for a protocol that is not in PROTOCOLS, unless this command gave the same URL.
    """
    url = check_address(url)
    if url not in known_urls:
        if url.partition(":")[0] not in PROTOCOLS:
            text = f"{run}/config.json names {url}, which is not opened unasked: give the address"
            raise UserError(f"{text} itself, or add its protocol to PROTOCOLS in {__name__}")
        log.info("%s has its checkpoints in %s, as its config.json says", run, url)
    return remote(url)


def check_address(url: str) -> str:
    """Return a URL in fsspec's form; UserError if it is none, or holds a password.

    The message does not repeat the password.
    """
    match = None
    if isinstance(url, str) and url.isprintable():
        match = URL.fullmatch(url)
    # fsspec takes "::" as a chain of protocols.
    if match is None or "::" in url:
        raise UserError(f"{url!a} is no address of a store: one protocol, as in s3://bucket/run")
    protocol, rest = match.groups()
    if "@" in rest.partition("/")[0] or "?" in rest:
        text = "no credentials in an address, which is logged and saved: use the environment"
        raise UserError(f"{protocol}://…: {text} (as AWS_PROFILE) or in ~/.config/fsspec")
    # `rest` has no slash at its start, and the path of a local file needs one.
    root = "/" if protocol in LOCAL_PROTOCOLS else ""
    return f"{protocol}://{root}{rest}".rstrip("/")
