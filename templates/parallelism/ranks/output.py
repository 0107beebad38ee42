"""What the ranks print: rank 0 to the console, each other rank into its own log file."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, TextIO

console: TextIO | None = None  # of a rank whose stderr is redirected into a file


@contextlib.contextmanager
def redirected(file: TextIO, handler: Any) -> Iterator[None]:
    """Redirect this process's prints to `file`; by descriptor, so that crashes are in it, too.

    `handler` (run/logs.py) goes on logging to the console.
    """
    global console
    with open(os.dup(1), "wb") as out, open(os.dup(2), "w", encoding="utf-8") as err:
        _redirect(file, file)
        handler.stream = console = err
        try:
            yield
        finally:
            _redirect(out, err)
            handler.stream = console = None


def say(text: str) -> None:
    """Print to the console and to a redirected stderr, without waiting for a lock."""
    if console:
        print(text, file=console, flush=True)  # first: the other one is on a disk
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _redirect(out: IO[Any], err: IO[Any]) -> None:
    for number, target, printed in ((1, out, sys.stdout), (2, err, sys.stderr)):
        with contextlib.suppress(OSError):
            printed.flush()
        os.dup2(target.fileno(), number)
