"""Log to the console and to files in a run's logs/.

    console          everything from rank 0; errors from other ranks
    train.log        rank 0; each start of the run appends to it
    rank_<n>.log     each other rank: its log and everything else that it prints

A rank's file also has the traceback of the error that ended it, or the stacks of a crash.
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
from pathlib import Path
from typing import Any, TextIO

from ..errors import UserError, printable
from ..files import naming, open_to_write

PACKAGE = logging.getLogger(__name__.partition(".")[0])
WARNINGS = logging.getLogger("py.warnings")
# The `extra` of a log call that the console does not show.
ONLY_IN_FILES = {"only_in_files": True}


class Console(logging.Handler):
    """Prints log records; a closed terminal or pipe does not end the run."""

    # The original stderr, while sys.stderr is redirected to a file.
    stream: TextIO | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record to the console."""
        if hasattr(record, "only_in_files"):
            return
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname}: {text}"
        with contextlib.suppress(OSError, ValueError):
            print(printable(text), file=self.stream or sys.stderr, flush=True)


class LogFile(logging.StreamHandler[TextIO]):
    """Appends log records to a file; a failing disk does not end the run."""

    def __init__(self, path: Path) -> None:
        super().__init__(open_to_write(path, "a"))
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        self.setFormatter(formatter)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a failed write: the warning about metrics.jsonl reports a full disk."""

    def close(self) -> None:
        """Close the file, even on a full disk."""
        super().close()
        with contextlib.suppress(OSError):
            self.stream.close()


def make_lenient(stream: TextIO) -> None:
    """Make a stream ignore write errors, since its terminal or pipe may be closed."""
    for name in ("write", "flush"):
        method = getattr(stream, name)
        setattr(stream, name, _without_os_errors(method))


def _without_os_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it returns None where it would raise an OSError."""

    def call(*arguments: Any) -> Any:
        with contextlib.suppress(OSError):
            return method(*arguments)
        return None

    return call


def log_to_console() -> None:
    """Show this package's log on the console: all records of rank 0, only errors of other ranks."""
    _open_standard_streams()
    make_lenient(sys.stderr)
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        console = Console(logging.INFO)
        console.setFormatter(logging.Formatter("%(message)s"))
    else:
        console = Console(logging.ERROR)
        console.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    PACKAGE.handlers[:] = [console]
    WARNINGS.handlers[:] = [console]
    # Log files get every record; the console filters by its own level.
    PACKAGE.setLevel(logging.DEBUG)
    # Log Python's warnings, too.
    logging.captureWarnings(True)


def _open_standard_streams() -> None:
    """Open stdin, stdout and stderr on /dev/null if the process was started without them."""
    # A new file gets the lowest free descriptor. Otherwise a checkpoint could become descriptor 1,
    # and libraries would print into it.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 3:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    # In Python, a stream that was closed at the start is None.
    if not sys.stdout:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if not sys.stderr:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@contextlib.contextmanager
def logging_in(folder: Path, group: Any) -> Iterator[None]:
    """Append the log to this rank's file in a folder, too.

    After `log_to_console`, the file also gets the stacks of a crash and, except on rank 0,
    everything that is printed. In a process of another program, these are left to that program.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"rank_{group.rank}.log" if group.rank else "train.log"
    path = folder / name
    with naming(path):
        handler = LogFile(path)
    with contextlib.ExitStack() as stack:
        stack.callback(handler.close)
        for logger in (PACKAGE, WARNINGS):
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        stack.callback(PACKAGE.setLevel, PACKAGE.level)
        # Without a level, only warnings and errors would be logged.
        if PACKAGE.level == logging.NOTSET:
            PACKAGE.setLevel(logging.INFO)
        console = _console()
        if console:
            faulthandler.enable(handler.stream)
            stack.callback(faulthandler.disable)
            # Only projects for several ranks have this method, and ranks above 0.
            if group.rank:
                stack.enter_context(group.printing_to(handler.stream, console))
        where = f"{group.log_prefix()}process {os.getpid()} on {socket.gethostname()}"
        PACKAGE.info("%s", where, extra=ONLY_IN_FILES)
        try:
            yield
        except BaseException as error:
            _log_error(handler, error)
            raise


def _console() -> Console | None:
    """Return the handler that `log_to_console` has added, if it was called."""
    for handler in PACKAGE.handlers:
        if isinstance(handler, Console):
            return handler
    return None


def _log_error(handler: logging.Handler, error: BaseException) -> None:
    """Write the error that ends the run only to the file: the caller reports it on the console."""
    if isinstance(error, UserError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    handler.handle(logging.makeLogRecord({"levelname": "ERROR", "msg": text}))
