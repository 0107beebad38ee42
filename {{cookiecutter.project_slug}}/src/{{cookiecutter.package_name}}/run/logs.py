"""Who says what, and where: the console, and the files in a run's logs/.

    console          rank 0: all it says; the other ranks: errors
    train.log        rank 0, after restarts behind what was there
    rank_<n>.log     the other ranks, each in a file of its own: what they log, and whatever else
                     they print, be it by Python, NCCL or CUDA

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
from typing import TextIO

from tqdm import tqdm

from ..errors import UserError

PACKAGE = logging.getLogger(__package__.rpartition(".")[0])
NOTES_SECONDS = 1.0  # for so long a killed run may not have what metrics.jsonl has as well
TIME = "%Y-%m-%dT%H:%M:%SZ"
ONLY_IN_FILES = {"only_in_files": True}
"""As `extra` of a record: the console has it in another form."""


class Console(logging.Handler):
    """Prints log records without tearing the progress bar."""

    stream: TextIO | None = None  # while stderr leads elsewhere

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record to stderr, or to what that was before."""
        if not hasattr(record, *ONLY_IN_FILES):
            label = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
            tqdm.write(label + self.format(record), file=self.stream or sys.stderr)


class LogFile(logging.FileHandler):
    """A file that lines are appended to; one that cannot be written is not worth a run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", TIME))
        self.formatter.converter = time.gmtime
        self.flushed = 0.0

    def note(self, text: str) -> None:
        """Append a line that may come often: no record is made of it, nor is each one flushed."""
        now = time.time()
        with self.lock, contextlib.suppress(OSError):
            self.stream.write(f"{time.strftime(TIME, time.gmtime(now))} INFO {text}\n")
            if now - self.flushed > NOTES_SECONDS:
                self.flushed = now
                self.stream.flush()

    def handleError(self, record: logging.LogRecord) -> None:
        """Leave it out: metrics.jsonl says that the disk is full."""

    def close(self) -> None:
        """Close it, whatever the disk says."""
        with contextlib.suppress(OSError):
            super().close()


def note(text: str) -> None:
    """A line for the log's file alone: the console has it in another form."""
    for handler in PACKAGE.handlers:
        if isinstance(handler, LogFile):
            handler.note(text)


def log_to_console() -> None:
    """Show this package's log: all of it on rank 0, of the others what they failed at."""
    rank = int(os.environ.get("RANK", "0"))
    console = Console(logging.INFO if rank == 0 else logging.ERROR)
    console.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s" if rank else "%(message)s"))
    PACKAGE.handlers[:] = [console]
    PACKAGE.setLevel(logging.INFO)


def _console() -> Console | None:
    return next((it for it in PACKAGE.handlers if isinstance(it, Console)), None)


def say(text: str) -> None:
    """Print to the console and, where stderr leads elsewhere, there, without a lock to wait for."""
    if (console := _console()) and console.stream:
        print(text, file=console.stream, flush=True)  # first, since the other is on a disk
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def open_log(folder: Path, rank: int) -> LogFile:
    """This rank's file; OSError."""
    return LogFile(folder / (f"rank_{rank}.log" if rank else "train.log"))


@contextlib.contextmanager
def logging_to(file: LogFile, rank: int, size: int) -> Iterator[None]:
    """Meanwhile write the log to `file`, too, and of other ranks than the first all they print.

    The latter, Python's warnings and crashes only where the console is ours (`log_to_console`).
    """
    console, warnings = _console(), logging.getLogger("py.warnings")
    PACKAGE.addHandler(file)
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
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
            if rank == 0:
                handlers, warnings.handlers = warnings.handlers, [console, file]
                stack.callback(setattr, warnings, "handlers", handlers)
                logging.captureWarnings(True)
                stack.callback(logging.captureWarnings, False)
            else:
                stack.enter_context(_printing_to(file.stream, console))
        try:
            yield
        except BaseException as error:
            _write_down(error, file)
            raise


@contextlib.contextmanager
def _printing_to(file: TextIO, console: Console) -> Iterator[None]:
    """Whatever this process prints goes to `file`; by descriptor, so it outlives a crash."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with open(os.dup(2), "w", encoding="utf-8") as stream:
        console.stream = stream
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for printed in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    printed.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)
            console.stream = None


def _write_down(error: BaseException, file: LogFile) -> None:
    """In the file alone: the console is told by who catches it."""
    lines = [f"{error}"] if isinstance(error, UserError) else traceback.format_exception(error)
    place = (PACKAGE.name, logging.ERROR, __file__, 0, "%s", ("".join(lines).rstrip(),), None)
    file.handle(logging.LogRecord(*place))
