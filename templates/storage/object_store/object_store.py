"""Places in an object store, used like paths, through fsspec: s3://bucket/run and the like.

Requests fail now and then: a store throttles, is slow, or cuts the connection. Each is tried again
after a pause, unless it would fail the same way. Credentials come from the environment or from
fsspec's own settings, never from here.
"""

import asyncio
import contextlib
import errno
import logging
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
LIMIT = 300.0  # seconds in which a request has to be answered, or a part of a file to move
PAUSES = (0.5, 2.0, 6.0, 15.0)  # seconds, at most, before each further attempt
# A share of the time in which a run has to end: torchrun kills it after GRACE_SECONDS (launch.sh).
# The rest is for saying what was saved.
GRACE = 0.75 * int(os.environ.get("GRACE_SECONDS") or "120")
LASTING = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
LASTING += (TypeError, ValueError, LookupError, AttributeError, NotImplementedError, ImportError)
LOCAL = ("file", "local")
# Addresses that are opened because a config.json says so, and not the command: add yours here. The
# maker of a run directory chose the address, and some protocols of fsspec run what a file says.
PROTOCOLS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "http", "https", *LOCAL}
known: set[str] = set()  # the addresses that this command gave or has shown
URL = re.compile(r"([a-zA-Z][\w+.-]+):/{1,3}([^/].*)")  # pathlib folds two slashes into one


class StoreError(OSError, RankError):
    """A store could not be used, however often it was tried."""


def time_left() -> float:
    """Seconds in which a run has to end after a stop signal; then the launcher kills it."""
    return Stop.since + GRACE - time.monotonic()


def answer(store: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """Return a store's answer to one request; TimeoutError when nothing moves for too long.

    Some clients would wait for ever: s3fs does, for the leave to send a PUT.
    """
    if name in ("put_file", "get_file"):
        options["callback"] = fsspec.Callback()
    if not store.async_impl:
        return getattr(store, name)(*arguments, **options)
    request = getattr(store, f"_{name}")(*arguments, **options)
    future = asyncio.run_coroutine_threadsafe(request, store.loop)
    moved, since = 0, time.monotonic()
    while not futures.wait([future], 1.0).done:
        if "callback" in options and options["callback"].value != moved:
            moved, since = options["callback"].value, time.monotonic()
        if time.monotonic() - since > LIMIT or time_left() <= 0:
            future.cancel()
            text = "no answer, and the run has to stop" if time_left() <= 0 else "no answer"
            raise TimeoutError(errno.ETIMEDOUT, text)
    try:
        return future.result()
    except LookupError as error:  # it lacks the headers of an object
        raise OSError(errno.EIO, f"an answer without {error}") from error
    except FileNotFoundError as error:
        if name != "put_file":
            raise
        # The upload in parts is not known: dropped, or complete with its answer lost.
        raise OSError(errno.EIO, f"{error}") from error


@dataclass(frozen=True)
class RemotePath:
    """A file or folder in a store."""

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
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    def exists(self, kinds: tuple[str, ...] = ("file", "directory")) -> bool:
        """Whether there is an object, or one below."""
        with contextlib.suppress(FileNotFoundError):
            return self.ask("info", self.path)["type"] in kinds
        return False

    def is_file(self) -> bool:
        """Whether it is an object."""
        return self.exists(("file",))

    def sizes(self) -> dict[str, int]:
        """The names right below, with their sizes (0 for folders); {} if there is nothing."""
        with contextlib.suppress(FileNotFoundError):
            entries = self.ask("ls", self.path, detail=True)
            sizes = {entry["name"].rstrip("/"): entry["size"] or 0 for entry in entries}
            return {n.rpartition("/")[2]: size for n, size in sizes.items() if n != self.path}
        return {}

    def read(self) -> bytes:
        """All of a small object."""
        return self.ask("cat_file", self.path)

    def write(self, content: bytes) -> None:
        """Write a small object, in place of what is there."""
        self.ask("pipe_file", self.path, content)

    def write_new(self, content: bytes, check: Callable[[], None]) -> None:
        """Write a small object where there is none; FileExistsError when there is another.

        `check()` is called before each attempt, and may raise.
        """
        try:
            self.ask("pipe_file", self.path, content, check=check, mode="create")
        except OSError as error:  # not every store says why it would not
            if not self.exists():
                raise
            if self.read() != content:  # else it is ours, and only the answer was lost
                raise FileExistsError(errno.EEXIST, "there is another", str(self)) from error

    def send(self, source: Path) -> None:
        """Send a file, in place of what is there."""
        self.ask("put_file", str(source), self.path)

    def fetch(self, target: Path) -> None:
        """Copy the object into a file."""
        self.ask("get_file", self.path, str(target))

    def unlink(self) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.ask("rm_file", self.path)

    def remove_tree(self) -> None:
        """Remove all objects below."""
        with contextlib.suppress(FileNotFoundError):
            self.ask("rm", self.path, recursive=True)
        for name in self.ask("find", self.path):  # S3's bulk delete reports no refusal
            self.ask("rm_file", name)

    def abort_uploads(self) -> None:
        """Drop uploads in parts that killed processes left below (S3 keeps, and bills, them)."""
        if not hasattr(self.store, "call_s3"):
            return
        bucket, prefix, _ = self.store.split_path(f"{self.path}/")
        try:
            listed = self.ask("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            for upload in listed.get("Uploads", []):
                self.ask("abort_mpu", bucket, upload["Key"], upload["UploadId"])
        except (OSError, KeyError) as error:  # it takes rights of its own; some stores lack it
            log.info("half uploads in %s, if there are any, stay: %s", self, error)

    def ask(
        self, name: str, *arguments: Any, check: Callable[[], None] | None = None, **options: Any
    ) -> Any:
        """Send a request, again while its failure may pass (StoreError after that)."""
        for pause in (*PAUSES, None):
            try:
                if check:
                    check()
                return answer(self.store, name, *arguments, **options)
            except PermissionError as error:
                text = f"{name} was refused: {error.strerror or error}"
                raise PermissionError(errno.EACCES, text, str(self)) from error
            except LASTING as error:
                if isinstance(error, FileNotFoundError):
                    error.errno = errno.ENOENT  # s3fs leaves it out; it tells damage from failure
                raise
            except Exception as error:
                kind, code = type(error).__name__, getattr(error, "errno", None) or errno.EIO
                text = (getattr(error, "strerror", None) or f"{error}" or kind).partition("\n")[0]
                # botocore: errors that no pause mends, and the store's own checksum of an object.
                if pause is None or time_left() <= 0 or kind.endswith("CredentialsError"):
                    code = errno.EBADMSG if kind == "FlexibleChecksumError" else code
                    raise StoreError(code, text, str(self)) from error
                log.info("%s: %s; trying again", self, text)
                pause *= random.SystemRandom().uniform(0.5, 1.0)  # seeds are the same on all ranks
                time.sleep(max(0.0, min(pause, time_left())))


def remote(url: str) -> RemotePath:
    """Return what a URL names in a store; UserError if nothing here can open it."""
    url = check_address(url)
    known.add(url)
    protocol = url.partition(":")[0]
    of_s3 = protocol in ("s3", "s3a")
    options = {"auto_mkdir": True} if protocol in LOCAL else {}
    try:
        store, path = fsspec.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        hint = 'pip install -e ".[s3]"' if of_s3 else str(error)
        raise UserError(f"{url} needs a package that is not here: {hint}") from None
    except ValueError as error:
        raise UserError(f"{url} is no address of a store: {error}") from None
    if of_s3 and store.retries != 1:
        # `ask` tries again: attempts of s3fs and of botocore, inside of it, would multiply.
        store.retries = 1
        store.config_kwargs = {**store.config_kwargs, "retries": {"total_max_attempts": 1}}
    return RemotePath(store, path.rstrip("/"))


def remote_of(run: Path, url: str) -> RemotePath:
    """Return what a run's config.json names, which is shown before it is opened; UserError."""
    url = check_address(url)
    if url not in known:
        if url.partition(":")[0] not in PROTOCOLS:
            text = f"{run}/config.json names {url}, which is not opened unasked: give the address"
            raise UserError(f"{text} itself, or add its protocol to PROTOCOLS in {__name__}")
        log.info("%s has its checkpoints in %s, as its config.json says", run, url)
    return remote(url)


def check_address(url: str) -> str:
    """Return the URL as fsspec takes it; UserError for none, or one with a password.

    A password is not repeated in the message.
    """
    match = URL.fullmatch(url) if isinstance(url, str) and url.isprintable() else None
    if match is None or "::" in url:
        raise UserError(f"{url!a} is no address of a store: one protocol, as in s3://bucket/run")
    protocol, rest = match.groups()
    if "@" in rest.partition("/")[0] or "?" in rest:
        text = "no credentials in an address, which is logged and saved: use the environment"
        raise UserError(f"{protocol}://…: {text} (as AWS_PROFILE) or in ~/.config/fsspec")
    return f"{protocol}://{'/' * (protocol in LOCAL)}{rest}".rstrip("/")
