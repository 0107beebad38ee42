"""Logs: the console, and the files in a run's logs/.

    console          rank 0: everything; the other ranks: errors
    train.log        rank 0, appended to by each start of the run
    rank_<n>.log     the other ranks, each its own file: their log, and everything else that they
                     print from Python, NCCL or CUDA

The traceback that ended a rank is in its file, and so are the stacks of one that crashed.
"""

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from tqdm import tqdm

from ..errors import UserError

PACKAGE = logging.getLogger(__package__.rpartition(".")[0])
ONLY_IN_FILES = {"only_in_files": True}  # `extra` of a record that the console shows otherwise


class Console(logging.Handler):
    """Prints log records without tearing the progress bar."""

    stream: TextIO | None = None  # the console, while stderr is redirected into a file

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record to the console."""
        if not hasattr(record, *ONLY_IN_FILES):
            label = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
            tqdm.write(label + self.format(record), file=self.stream or sys.stderr)


class LogFile(logging.FileHandler):
    """A file that records are appended to; a failing disk does not end the run here."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        form = "%(asctime)s %(levelname)s %(message)s"
        self.setFormatter(logging.Formatter(form, "%Y-%m-%dT%H:%M:%SZ"))
        self.formatter.converter = time.gmtime

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore it: the warning about metrics.jsonl says that the disk is full."""

    def close(self) -> None:
        """Close the file even if its last lines cannot be written."""
        with contextlib.suppress(OSError):
            super().close()


def log_to_console() -> None:
    """Show this package's log: everything on rank 0, errors on the others."""
    rank = int(os.environ.get("RANK", "0"))
    console = Console(logging.INFO if rank == 0 else logging.ERROR)
    console.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s" if rank else "%(message)s"))
    PACKAGE.handlers[:] = [console]
    PACKAGE.setLevel(logging.INFO)


def say(text: str) -> None:
    """Print to the console and to a redirected stderr, without waiting for a lock."""
    if (console := _console()) and console.stream:
        print(text, file=console.stream, flush=True)  # first: the other one is on a disk
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def open_log(folder: Path, rank: int) -> LogFile:
    """This rank's file; OSError."""
    return LogFile(folder / (f"rank_{rank}.log" if rank else "train.log"))


@contextlib.contextmanager
def logging_to(file: LogFile, rank: int, size: int) -> Iterator[None]:
    """Meanwhile write the log to `file`, too, and everything that other ranks than 0 print.

    Python's warnings, crashes and prints only after `log_to_console`: else they are the caller's.
    """
    console, warnings = _console(), logging.getLogger("py.warnings")
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        PACKAGE.addHandler(file)
        stack.callback(PACKAGE.removeHandler, file)
        stack.callback(PACKAGE.setLevel, PACKAGE.level)
        PACKAGE.setLevel(PACKAGE.level or logging.INFO)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        where = (rank, size, os.getpid(), socket.gethostname(), restarts)
        text = "rank %d of %d, process %d on %s, restarts so far: %s"
        PACKAGE.info(text, *where, extra=ONLY_IN_FILES)
        if console:
            faulthandler.enable(file.stream)
            stack.callback(faulthandler.disable)
        if console and rank == 0:
            stack.callback(setattr, warnings, "handlers", warnings.handlers)
            warnings.handlers = [console, file]
            logging.captureWarnings(True)
            stack.callback(logging.captureWarnings, False)
        elif console:
            stack.enter_context(_printing_to(file.stream, console))
        try:
            yield
        except BaseException as error:
            # In the file alone: whoever catches the error reports it on the console.
            known = isinstance(error, UserError)
            text = str(error) if known else "".join(traceback.format_exception(error)).rstrip()
            file.handle(logging.makeLogRecord({"levelname": "ERROR", "msg": text}))
            raise


@contextlib.contextmanager
def _printing_to(file: TextIO, console: Console) -> Iterator[None]:
    """Redirect this process's prints to `file`; by descriptor, so that crashes are in it, too."""
    with open(os.dup(1), "wb") as out, open(os.dup(2), "w", encoding="utf-8") as err:
        _redirect(file, file)
        console.stream = err
        try:
            yield
        finally:
            _redirect(out, err)
            console.stream = None


def _redirect(out: IO[Any], err: IO[Any]) -> None:
    for number, target, printed in ((1, out, sys.stdout), (2, err, sys.stderr)):
        with contextlib.suppress(OSError):
            printed.flush()
        os.dup2(target.fileno(), number)


def _console() -> Console | None:
    return next((handler for handler in PACKAGE.handlers if isinstance(handler, Console)), None)
