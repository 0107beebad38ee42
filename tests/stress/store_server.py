"""An S3 in a process of its own, to be asked what it holds and what it shall do to requests.

In a process of its own, since one that has threads cannot be forked, as jobs are.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import threading
import time
from typing import Any

import pytest

from tests.project.s3 import Request, Store, s3

from .storm import Contents, digests


class Server:
    """The server, seen from the process that forked it, whose children find it as the store."""

    def __init__(self) -> None:
        self.ours, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                self.ours.close()
                _serve(theirs)
            os._exit(0)
        theirs.close()
        os.environ.update(self.ours.recv())

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Ask: for what a method of `Told` gives."""
        self.ours.send((name, arguments))
        return self.ours.recv()

    def close(self) -> None:
        """End it."""
        self.ours.close()
        os.waitpid(self.pid, 0)

    def until_struck(self, seconds: float = 60.0) -> bool:
        """Whether some request was struck within so much time."""
        deadline = time.monotonic() + seconds
        while not self("struck") and time.monotonic() < deadline:
            time.sleep(0.02)
        return self("struck") > 0


class Told:
    """What the server does when it is asked."""

    def __init__(self, store: Store) -> None:
        self.store, self.lock = store, threading.Lock()
        self.arm(None)
        store.fault = self._judge

    def arm(self, how: str | None, first: int = 0, times: int = 1, only: str = "") -> None:
        """Fail so many requests from one on, of those that match `only`; let go what hangs."""
        self.how, self.first, self.times, self.only = how, first, times, re.compile(only)
        self.count = self.hits = 0
        self.store.released.set()
        self.store.released = threading.Event()

    def seen(self) -> int:
        """Requests since then."""
        return self.count

    def struck(self) -> int:
        """How many of them failed."""
        return self.hits

    def half_uploads(self) -> int:
        """Uploads in parts, of all runs, that are neither whole nor dropped."""
        return self.store.half_uploads

    def contents(self, run: str) -> Contents:
        """Digests of what each manifest names, by step; {} where that is not what lies there."""
        objects, found = self.store.objects(run), {}
        for name in (n for n in objects if n.endswith("/manifest.json")):
            step, whole, files = name.partition("/")[0], False, {}
            with contextlib.suppress(ValueError, KeyError, TypeError):
                manifest = json.loads(objects[name])
                files, folder = manifest["files"], f"{step}/{manifest['folder']}"
                whole = all(
                    hashlib.sha256(objects[f"{folder}/{n}"]).hexdigest() == entry["sha256"]
                    for n, entry in files.items()
                )
            found[int(step[5:])] = digests(files) if whole else {}
        return found

    def left(self, run: str) -> list[str]:
        """Objects that no manifest names."""
        objects = self.store.objects(run)
        named = {"owner.json"}
        for name in (n for n in objects if n.endswith("/manifest.json")):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                manifest = json.loads(objects[name])
                folder = f"{name.partition('/')[0]}/{manifest['folder']}"
                named |= {name, *(f"{folder}/{file}" for file in manifest["files"])}
        return sorted(objects.keys() - named)

    def forget(self, run: str) -> None:
        """Drop all of a run."""
        keys = self.store.bucket().keys
        for name in [n for n in keys if n.startswith(f"{run}/")]:
            keys.pop(name)

    def _judge(self, request: Request) -> str | None:
        line = f"{request.method} {request.path}?{request.query}"
        with self.lock:
            if not self.how or not self.only.search(line):
                self.count += not self.how
                return None
            self.count += 1
            strikes = self.first < self.count <= self.first + self.times
            self.hits += strikes
            return self.how if strikes else None


def _serve(connection: Any) -> None:
    os.environ["S3_UPLOAD_PART_MIN_SIZE"] = "1"  # moto's own: small files can go in parts, too
    with pytest.MonkeyPatch.context() as patch, s3(patch) as store:
        told = Told(store)
        connection.send({k: v for k, v in os.environ.items() if k.startswith(("AWS_", "no_"))})
        with contextlib.suppress(EOFError):
            while True:
                name, arguments = connection.recv()
                connection.send(getattr(told, name)(*arguments))
