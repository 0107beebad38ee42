"""Show errors in one line without a traceback, and choose the exit codes of commands."""

import atexit
import gc
import os
import select
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

# Exit code of a rank that fails before its first step with an error that would repeat, so that
# launch.py does not restart the ranks. (EX_SOFTWARE of sysexits.h)
FAILED_AT_START = 70
# Errors that a restart may avoid: of files, memory, the network or a GPU. They are listed by name,
# since torch's classes exist only once torch is imported.
PASSING = {"OSError", "MemoryError", "OutOfMemoryError", "AcceleratorError", "DistError"}
PASSING |= {"RankError"}
# Packages whose errors are of the network.
NETWORK_PACKAGES = {"aiohttp", "botocore", "httpcore", "httpx", "urllib3"}
# Words by which to recognize such errors that torch raises as plain RuntimeErrors.
PASSING_WORDS = ("gloo", "DataLoader worker", "CUDA error", "cuDNN error")
# Whether this process has completed a step.
stepped = threading.Event()

# On one of these signals a run saves and stops.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class UserError(ValueError):
    """An error that the user can fix; commands show its message without a traceback."""


class RankError(RuntimeError):
    """A failure on one or more ranks; it is raised on all of them."""


def command_for(name: str, run_dir: Path) -> str:
    """Return the command line that trains in this run directory, or runs a stage for it."""
    words = ["python", "-m", __package__, name]
    if run_dir.parent == Path("runs"):
        words += ["--name", run_dir.name]
    else:
        words += ["--run-dir", str(run_dir)]
    settings = run_dir / "config.json"
    # `train` reads the saved settings of the run itself; the stages need --config.
    if name != "train" and settings.exists():
        words += ["--config", str(settings)]
    return shlex.join(words)


def run_main(command: Callable[[], int]) -> int:
    """Run a command; return exit code 0 on success, 1 when something failed, 2 for bad input.

    Under torchrun this ends the process.
    """
    try:
        code = command()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:
        # Raised for wrong options, by a stage that was stopped, or by the project's own code.
        code = 0
        if isinstance(stop.code, int):
            code = stop.code
        elif stop.code is not None:
            # Python prints such a text, and exits with code 1.
            _report(str(stop.code))
            code = 1
            if "RANK" in os.environ and not stepped.is_set():
                code = FAILED_AT_START
    except Exception as error:
        line = _in_one_line(error)
        reader_is_gone = isinstance(error, BrokenPipeError) and _stdout_is_closed()
        if not line and not reader_is_gone and "RANK" not in os.environ:
            # Python prints the traceback, or a debugger stops here.
            raise
        code = 1
        if isinstance(error, UserError):
            code = 2
        elif "RANK" in os.environ and _would_repeat(error):
            code = FAILED_AT_START
        if reader_is_gone:
            # As after `--help | head`. Python flushes stdout again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        else:
            _report(line or traceback.format_exc().rstrip())
    if "RANK" in os.environ:
        # Leave at once. Finalizers of the process group may wait for ranks that are gone, and
        # library threads may abort the interpreter; then torchrun would restart all ranks.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    # Without this, Python would scan all of torch for garbage at exit, which takes a second.
    atexit.register(gc.freeze)
    for number in STOP_SIGNALS:
        # Stop signals often come twice, and Python removes its own handlers as it exits.
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)
    return code


def note_step() -> None:
    """Note that this process has completed a step: later errors may not repeat on a restart."""
    stepped.set()


def _would_repeat(error: Exception) -> bool:
    """Tell whether a restart would fail in the same way: an error in code before the first step."""
    if stepped.is_set():
        return False
    for kind in type(error).__mro__:
        package = kind.__module__.partition(".")[0]
        if kind.__name__ in PASSING or package in NETWORK_PACKAGES:
            return False
    text = str(error)
    return not any(word in text for word in PASSING_WORDS)


def _stdout_is_closed() -> bool:
    """Tell whether nobody reads this process's stdout any more."""
    poll = select.poll()
    # Without flags, it reports only errors and closed ends.
    poll.register(1, 0)
    return bool(poll.poll(0))


def _report(text: str) -> None:
    """Print an error to stderr, on the first rank of a machine before the others."""
    rank = ""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Most errors occur on all ranks. The first one reports it, and meanwhile the launcher ends
        # this one.
        time.sleep(1.0)
        rank = f"[rank {os.environ['RANK']}] "
    print(rank + printable(text), file=sys.stderr)


def _in_one_line(error: Exception) -> str:
    """Return an error as one line; "" if it needs its traceback."""
    text = str(error)
    if isinstance(error, UserError | RankError):
        return f"error: {text}"
    if isinstance(error, OSError) and error.filename:
        return f"error: {text}"
    if "RANK" in os.environ and "gloo" in text and "by peer" in text:
        return "error: lost the connection to another rank: see the first error of any rank"
    # By name, since torch may not be imported.
    if type(error).__name__ == "OutOfMemoryError":
        ways = "--train.activation-checkpointing or a smaller --train.micro-batch-size"
        if (Path(__file__).parent / "workflow/fit.py").exists():
            ways += f" (`python -m {__package__} fit` with the same options shows what fits)"
        return f"error: {text.rstrip('.')}. Try {ways}"
    return ""


def printable(text: str) -> str:
    """Escape control characters: text from a file must not send commands to a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
