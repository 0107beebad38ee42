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

# Exit code of a rank that fails before the end of its first step with an error that would repeat,
# so that launch.py does not restart the ranks. (EX_SOFTWARE of sysexits.h)
FAILED_AT_START = 70
# Errors that a restart may avoid: of files, memory, the network or a GPU. They are listed by name,
# since torch's classes exist only once torch is imported.
PASSING = {"OSError", "MemoryError", "OutOfMemoryError", "AcceleratorError", "DistError"}
# A RankError may report such an error of another rank.
PASSING |= {"RankError"}
# Packages that raise network errors.
NETWORK_PACKAGES = {"aiohttp", "botocore", "httpcore", "httpx", "urllib3"}
# Words in the messages of errors that a restart may avoid, but that are plain RuntimeErrors.
PASSING_WORDS = ("gloo", "DataLoader worker", "CUDA error", "cuDNN error")
# Whether this process has completed a step of a distributed run; a stage never sets it.
stepped = threading.Event()

# On one of these signals a run saves and stops.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class UserError(ValueError):
    """An error that the user can fix; commands show its message without a traceback."""


class RankError(RuntimeError):
    """A failure on one or more ranks; `Group.together` raises it on all of them."""


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

    After Ctrl-C the code is 130. Under torchrun the process ends here, and its code may also be
    FAILED_AT_START.
    """
    try:
        code = command()
    except KeyboardInterrupt:
        # As in shells: 128 + the number of SIGINT.
        code = 130
    except SystemExit as stop:
        # Raised for wrong options, by a stage that was stopped, or by the project's own code.
        code = 0
        if isinstance(stop.code, int):
            code = stop.code
        elif stop.code is not None:
            # Python itself would print such a text, and exit with code 1.
            _report(str(stop.code))
            code = 1
            if "RANK" in os.environ and not stepped.is_set():
                code = FAILED_AT_START
    except Exception as error:
        line = _in_one_line(error)
        reader_is_gone = isinstance(error, BrokenPipeError) and _stdout_is_closed()
        is_handled = line or reader_is_gone or "RANK" in os.environ
        if not is_handled:
            # Let Python print the traceback, or a debugger stop here.
            raise
        code = 1
        if isinstance(error, UserError):
            code = 2
        elif "RANK" in os.environ and _would_repeat(error):
            code = FAILED_AT_START
        if reader_is_gone:
            # As after `--help | head`. Python flushes stdout again at exit, which must not fail.
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
        # Stop signals often come twice, and Python removes its own handlers as it exits: the second
        # one would kill this process. Ctrl-C can still end a process that hangs as it exits.
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)
    return code


def note_step() -> None:
    """Note that this process has completed a step: later errors may not repeat on a restart."""
    stepped.set()


def _would_repeat(error: Exception) -> bool:
    """Tell whether a restart would fail in the same way.

    It would if the error comes before the end of the first step, and is not one of files, memory,
    the network or a GPU.
    """
    if stepped.is_set():
        return False
    # The bases of its class count, too: a FileNotFoundError is an OSError.
    for kind in type(error).__mro__:
        package = kind.__module__.partition(".")[0]
        if kind.__name__ in PASSING or package in NETWORK_PACKAGES:
            return False
    text = str(error)
    return not any(word in text for word in PASSING_WORDS)


def _stdout_is_closed() -> bool:
    """Tell whether nobody reads this process's stdout any more."""
    poll = select.poll()
    # With an empty mask of events, poll reports only errors and closed ends of descriptor 1.
    poll.register(1, 0)
    return bool(poll.poll(0))


def _report(text: str) -> None:
    """Print an error to stderr, on the first rank of a machine before the others."""
    rank = ""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Most errors occur on all ranks. While this rank waits, the first one reports the error and
        # exits; torchrun then stops this one.
        time.sleep(1.0)
        rank = f"[rank {os.environ['RANK']}] "
    print(rank + printable(text), file=sys.stderr)


def _in_one_line(error: Exception) -> str:
    """Return an error as one line; "" if it needs its traceback."""
    text = str(error)
    if isinstance(error, UserError | RankError):
        return f"error: {text}"
    # Such a message names the file, so it needs no traceback.
    if isinstance(error, OSError) and error.filename:
        return f"error: {text}"
    # gloo's message is "Connection closed by peer" or "Connection reset by peer".
    if "RANK" in os.environ and "gloo" in text and "by peer" in text:
        return "error: lost the connection to another rank: see the first error of any rank"
    # Compare the name of the class, since torch may not be imported.
    if type(error).__name__ == "OutOfMemoryError":
        ways = "--train.activation-checkpointing or a smaller --train.micro-batch-size"
        if (Path(__file__).parent / "workflow/fit.py").exists():
            ways += f" (`python -m {__package__} fit` with the same options shows what fits)"
        return f"error: {text.rstrip('.')}. Try {ways}"
    return ""


def printable(text: str) -> str:
    """Escape control characters: text from a file must not send commands to a terminal."""
    # ascii() returns the escaped character between quotes.
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
