"""Logs: the console, and the files in a run's logs/.

    console          rank 0: everything; other ranks: errors
    train.log        rank 0; each start of the run appends to it
    rank_<n>.log     another rank: its log, and whatever else it prints

A rank's file also has the traceback that ended it, or the stacks of a crash.
"""

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ..errors import UserError, printable
from ..files import naming, open_to_write

PACKAGE = logging.getLogger(__name__.partition(".")[0])
WARNINGS = logging.getLogger("py.warnings")
ONLY_IN_FILES = {"only_in_files": True}  # `extra` of a record that the console leaves out


class Console(logging.Handler):
    """Prints log records; a terminal or a pipe that is gone does not end the run."""

    stream: TextIO | None = None  # the console, while stderr is redirected into a file

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record to the console."""
        if not hasattr(record, *ONLY_IN_FILES):
            label = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
            text = printable(label + self.format(record))
            with contextlib.suppress(OSError, ValueError):
                print(text, file=self.stream or sys.stderr, flush=True)


class LogFile(logging.StreamHandler[TextIO]):
    """A file that records are appended to; a disk that fails does not end the run."""

    def __init__(self, path: Path) -> None:
        super().__init__(open_to_write(path, "a"))
        form = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        form.converter = time.gmtime
        self.setFormatter(form)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore it: the warning about metrics.jsonl says that the disk is full."""

    def close(self) -> None:
        """Close the file, on a full disk too."""
        super().close()
        with contextlib.suppress(OSError):
            self.stream.close()


def make_lenient(stream: Any) -> None:
    """Let a stream drop what cannot be written: the terminal may be closed, or a pipe's reader."""

    def suppressing(method: Callable[..., Any], *arguments: Any) -> Any:
        with contextlib.suppress(OSError):
            return method(*arguments)

    for name in ("write", "flush"):
        setattr(stream, name, partial(suppressing, getattr(stream, name)))


def log_to_console() -> None:
    """Show this package's log on the console: all records of rank 0, errors of other ranks."""
    # Standard streams that are closed are opened, or other files would get their descriptors.
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:  # the lowest number that is free
        os.set_inheritable(null, True)
    os.close(null)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - it stays open
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    make_lenient(sys.stderr)
    rank = int(os.environ.get("RANK", "0"))
    console = Console(logging.ERROR if rank else logging.INFO)
    console.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s" if rank else "%(message)s"))
    PACKAGE.handlers[:] = WARNINGS.handlers[:] = [console]
    PACKAGE.setLevel(logging.DEBUG)  # in the files
    logging.captureWarnings(True)  # Python's


@contextlib.contextmanager
def logging_in(folder: Path, group: Any) -> Iterator[None]:
    """Append the log to this rank's file in a folder, too.

    After `log_to_console` the file also gets the stacks of a crash, and what other ranks than 0
    print; in a caller's own process these stay the caller's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with naming(path := folder / (f"rank_{group.rank}.log" if group.rank else "train.log")):
        handler = LogFile(path)
    console = next((handler for handler in PACKAGE.handlers if isinstance(handler, Console)), None)
    with contextlib.ExitStack() as stack:
        stack.callback(handler.close)
        for logger in (PACKAGE, WARNINGS):
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        stack.callback(PACKAGE.setLevel, PACKAGE.level)
        PACKAGE.setLevel(PACKAGE.level or logging.INFO)
        if console:
            faulthandler.enable(handler.stream)
            stack.callback(faulthandler.disable)
            if group.rank:
                stack.enter_context(group.printing_to(handler.stream, console))
        origin = group, os.getpid(), socket.gethostname()
        PACKAGE.info("%sprocess %d on %s", *origin, extra=ONLY_IN_FILES)
        try:
            yield
        except BaseException as error:
            # In the file alone: what catches the error reports it on the console.
            known = isinstance(error, UserError)
            text = str(error) if known else "".join(traceback.format_exception(error)).rstrip()
            handler.handle(logging.makeLogRecord({"levelname": "ERROR", "msg": text}))
            raise
