"""Log to the console and to files in a run's logs/.

    console          rank 0: what it prints, and its log from INFO on; other ranks: only errors
    train.log        rank 0: its whole log; each start of the run appends to it
    rank_<n>.log     each other rank: its whole log, and everything else that it prints

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

# The logger of this package, and the logger to which Python's warnings go.
PACKAGE = logging.getLogger(__name__.partition(".")[0])
WARNINGS = logging.getLogger("py.warnings")
# Pass this as `extra` to a log call that the console must not show.
ONLY_IN_FILES = {"only_in_files": True}


class Console(logging.Handler):
    """Prints log records; a closed terminal or pipe does not end the run."""

    # The original stderr, while sys.stderr is redirected to a file.
    stream: TextIO | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record to the console."""
        if hasattr(record, "only_in_files"):
            return
        try:
            text = self.format(record)
        # As in logging's own handlers, a mistake in a log call must not end the run. An example is
        # text as the argument of %d.
        except Exception:
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname}: {text}"
        # Python raises ValueError if the stream was closed in this process.
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
        """Ignore a failed write: on a full disk, the journal warns of its own failed writes."""

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
    """Show the package's log on the console: rank 0's from INFO on, other ranks' from ERROR on."""
    _open_standard_streams()
    make_lenient(sys.stderr)
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        console = Console(logging.INFO)
        console.setFormatter(logging.Formatter("%(message)s"))
    else:
        console = Console(logging.ERROR)
        console.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    # Replace the handlers, so that a second call does not show each record twice.
    PACKAGE.handlers[:] = [console]
    WARNINGS.handlers[:] = [console]
    # Log files get every record. The console leaves out records below its own level.
    PACKAGE.setLevel(logging.DEBUG)
    # Log Python's warnings, too.
    logging.captureWarnings(True)


def _open_standard_streams() -> None:
    """Open stdin, stdout and stderr on /dev/null if the process was started without them."""
    # A new file gets the lowest free descriptor. If descriptor 1 stayed free, a checkpoint could
    # get it, and libraries would print into the checkpoint. So open /dev/null until the descriptors
    # 0, 1 and 2 are taken.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 3:
        # Subprocesses inherit the standard streams.
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    # Python sets a stream to None if its descriptor was closed when the process started.
    if not sys.stdout:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if not sys.stderr:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@contextlib.contextmanager
def logging_in(folder: Path, group: Any) -> Iterator[None]:
    """Inside the block, also append the log to this rank's file in `folder`.

    If this process has called `log_to_console`, the file also gets the stacks of a crash and,
    except on rank 0, everything that is printed. Otherwise the process belongs to another program,
    which decides where its output goes.
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
        level_before = PACKAGE.level
        stack.callback(PACKAGE.setLevel, level_before)
        # If no level were set, only warnings and errors would be logged.
        if level_before == logging.NOTSET:
            PACKAGE.setLevel(logging.INFO)
        console = _console()
        if console:
            faulthandler.enable(handler.stream)
            stack.callback(faulthandler.disable)
            # Rank 0 prints to the console. Only a Group for several ranks has `printing_to`.
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
    """Write the error that ends the run to a log file; the caller reports it on the console."""
    if isinstance(error, UserError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    handler.handle(logging.makeLogRecord({"levelname": "ERROR", "msg": text}))
