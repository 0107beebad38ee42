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

# Exit code of a rank that fails before the end of its first step, with an error that would repeat
# after a restart. The launcher then does not restart the ranks. (EX_SOFTWARE of sysexits.h)
FAILED_AT_START = 70
# Errors of files, memory, the network or a GPU, which may not occur again after a restart. They are
# listed by class name, so that this module need not import torch for its classes.
PASSING = {"OSError", "MemoryError", "OutOfMemoryError", "AcceleratorError", "DistError"}
# A RankError may report such an error of another rank.
PASSING |= {"RankError"}
# Packages that raise network errors.
NETWORK_PACKAGES = {"aiohttp", "botocore", "httpcore", "httpx", "urllib3"}
# Other errors that may not occur again are plain RuntimeErrors, with one of these texts in them.
PASSING_WORDS = ("gloo", "DataLoader worker", "CUDA error", "cuDNN error")
# Set once a run in this process has completed a step, with its callbacks, under torchrun. Without
# torchrun it is never set.
stepped = threading.Event()

# When a run gets one of these signals, it saves and stops.
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

    After Ctrl-C the code is 130. Under torchrun this does not return but ends the process, and the
    code may also be FAILED_AT_START.
    """
    try:
        code = command()
    except KeyboardInterrupt:
        # As in shells: 128 + the number of SIGINT.
        code = 130
    except SystemExit as stop:
        # SystemExit comes from wrong options, a stage that was stopped, or the user's own code.
        code = 0
        if isinstance(stop.code, int):
            code = stop.code
        elif stop.code is not None:
            # The code is a text. Like Python itself, print the text, and exit with code 1.
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
            # The reader of stdout has ended, such as head in `--help | head`. Connect stdout to
            # /dev/null, since Python flushes stdout once more at exit, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        else:
            _report(line or traceback.format_exc().rstrip())
    if "RANK" in os.environ:
        # Leave at once. Finalizers of the process group may wait for ranks that are gone, and
        # library threads may abort the interpreter; then torchrun would restart all ranks.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    # Without gc.freeze, Python would scan all of torch for garbage at exit, which takes a second.
    atexit.register(gc.freeze)
    for number in STOP_SIGNALS:
        # Stop signals often come twice. Python removes its signal handlers while it exits, so the
        # second signal would kill this process. Do not ignore SIGINT: Ctrl-C can still end a
        # process that hangs while it exits.
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)
    return code


def note_step() -> None:
    """Note that this process has completed a step: an error after that may not repeat."""
    stepped.set()


def _would_repeat(error: Exception) -> bool:
    """Return whether the same error would occur again after a restart.

    This is assumed of each error before the end of the first step, except errors of files, memory,
    the network or a GPU.
    """
    if stepped.is_set():
        return False
    # Also check the bases of the error's class: a FileNotFoundError is an OSError.
    for kind in type(error).__mro__:
        package = kind.__module__.partition(".")[0]
        if kind.__name__ in PASSING or package in NETWORK_PACKAGES:
            return False
    text = str(error)
    return not any(word in text for word in PASSING_WORDS)


def _stdout_is_closed() -> bool:
    """Return whether stdout is a pipe or a terminal whose reader is gone."""
    poll = select.poll()
    # With an empty mask of events, poll reports only errors and closed ends of descriptor 1.
    poll.register(1, 0)
    return bool(poll.poll(0))


def _report(text: str) -> None:
    """Print an error to stderr; the first rank of a machine prints before its other ranks."""
    rank = ""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Most errors occur on all ranks. While this rank waits, the first rank reports the error
        # and exits. Then torchrun stops this rank, so the error is printed only once.
        time.sleep(1.0)
        rank = f"[rank {os.environ['RANK']}] "
    print(rank + printable(text), file=sys.stderr)


def _in_one_line(error: Exception) -> str:
    """Return an error as one line; "" if it needs its traceback."""
    text = str(error)
    if isinstance(error, UserError | RankError):
        return f"error: {text}"
    # The message of an OSError with a file name names the file, so it needs no traceback.
    if isinstance(error, OSError) and error.filename:
        return f"error: {text}"
    # gloo's message is "Connection closed by peer" or "Connection reset by peer".
    if "RANK" in os.environ and "gloo" in text and "by peer" in text:
        return "error: lost the connection to another rank: see the first error of any rank"
    # Compare the name of the class, since torch may not have been imported.
    if type(error).__name__ == "OutOfMemoryError":
        ways = "--train.activation-checkpointing or a smaller --train.micro-batch-size"
        if (Path(__file__).parent / "workflow/fit.py").exists():
            ways += f" (`python -m {__package__} fit` with the same options shows what fits)"
        return f"error: {text.rstrip('.')}. Try {ways}"
    return ""


def printable(text: str) -> str:
    """Escape control characters: text from a file must not send commands to a terminal."""
    shown: list[str] = []
    for character in text:
        if character.isprintable() or character in "\n\t":
            shown.append(character)
        else:
            # ascii() returns the escaped character between quotes.
            shown.append(ascii(character)[1:-1])
    return "".join(shown)
