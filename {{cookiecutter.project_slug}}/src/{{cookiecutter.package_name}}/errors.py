"""Errors that are shown in one line, without a traceback, and the exit codes of commands."""

import atexit
import gc
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

# The exit code of a rank that an error of the code ended before its first step was done: it would
# come again, so launch.py does not start the ranks again. (EX_SOFTWARE of sysexits.h)
FAILED_AT_START = 70
# Errors that may not come again: of files, memory, the network, a GPU. By name, since torch's are
# known only once torch is imported.
PASSING = {"OSError", "MemoryError", "OutOfMemoryError", "AcceleratorError", "DistError"}
PASSING |= {"RankError"}
# Words of such errors that torch raises as plain RuntimeErrors.
PASSING_WORDS = ("gloo", "DataLoader worker", "CUDA error")
# Whether this process has done a step.
stepped = threading.Event()

# After one of these a run saves and stops.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class UserError(ValueError):
    """An error the user can fix."""


class RankError(RuntimeError):
    """Something failed on one rank or more; raised on all of them."""


def command_for(name: str, run_dir: Path) -> str:
    """What to type to train in this run directory, or to run a stage for it, with its settings."""
    words = ["python", "-m", __package__, name]
    if run_dir.parent == Path("runs"):
        words += ["--name", run_dir.name]
    else:
        words += ["--run-dir", str(run_dir)]
    settings = run_dir / "config.json"
    # `train` takes the settings of the run that it continues; the stages have to be told.
    if name != "train" and settings.exists():
        words += ["--config", str(settings)]
    return shlex.join(words)


def run_main(command: Callable[[], int]) -> int:
    """Run a command: 0 when all is well, 1 when something went wrong, 2 for bad input.

    Under torchrun the process ends here.
    """
    try:
        code = command()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # nobody reads any more, as after `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes at exit
        code = 1
    except SystemExit as stop:  # of options that are wrong, or of a stage that was stopped
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        line = _in_one_line(error)
        if not line and "RANK" not in os.environ:
            raise  # Python prints the traceback, or a debugger stops here
        code = 1
        if isinstance(error, UserError):
            code = 2
        elif "RANK" in os.environ and _would_repeat(error):
            code = FAILED_AT_START
        _report(line or traceback.format_exc().rstrip())
    if "RANK" in os.environ:
        # Leave at once: finalisers of the process group may wait for ranks that are gone, and
        # threads of libraries may abort the interpreter, after which torchrun would restart all.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    # Python would look for garbage in all of torch as it ends, which takes a second.
    atexit.register(gc.freeze)
    for number in STOP_SIGNALS:
        # Stop signals often come twice, and Python removes its own handlers on its way out.
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)
    return code


def note_step() -> None:
    """Note that this process has done a step: an error from here on may not come again."""
    stepped.set()


def _would_repeat(error: Exception) -> bool:
    """Whether a restart would end by the same error: one of the code, before the first step."""
    if stepped.is_set():
        return False
    for kind in type(error).__mro__:
        if kind.__name__ in PASSING:
            return False
    text = str(error)
    return not any(word in text for word in PASSING_WORDS)


def _report(text: str) -> None:
    """Print an error to stderr; the first rank of a machine before the others."""
    rank = ""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Most errors are of all ranks: the first reports it, and the launcher ends this one.
        time.sleep(1.0)
        rank = f"[rank {os.environ['RANK']}] "
    print(rank + printable(text), file=sys.stderr)


def _in_one_line(error: Exception) -> str:
    """The line that says all about an error; nothing for one that needs its traceback."""
    text = str(error)
    if isinstance(error, UserError | RankError):
        return f"error: {text}"
    if isinstance(error, OSError) and error.filename:
        return f"error: {text}"
    if "RANK" in os.environ and "gloo" in text and "by peer" in text:
        return "error: this rank cannot continue, since another one is gone"
    if type(error).__name__ == "OutOfMemoryError":  # torch's
        ways = "--train.activation-checkpointing or a smaller --train.micro-batch-size"
        if (Path(__file__).parent / "workflow/fit.py").exists():
            ways += f" (`python -m {__package__} fit`, with the same options, says what fits)"
        return f"error: {text.rstrip('.')}. Try {ways}"
    return ""


def printable(text: str) -> str:
    """A text as it is shown: what a file says must not command a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
