"""Errors that are shown in one line, without a traceback, and the exit codes of commands."""

import atexit
import gc
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
# The rest of this package is the user's own: a traceback shows it, and leaves these out.
OURS = {"__init__", "__main__", "checkpoint", "compile", "config", "device", "distributed"}
OURS |= {"ema", "errors", "files", "fingerprint", "loading", "loss", "mixture", "profiler", "run"}
OURS |= {"sampling", "schedule", "text", "tokens", "train", "workflow"}


class UserError(ValueError):
    """An error the user can fix."""

    agreed = False  # True: every rank raised it, so one of them reports it


class RankError(RuntimeError):
    """Something failed on one rank or more; raised on all of them."""

    agreed = False  # as of UserError


def command_for(name: str, run_dir: Path) -> str:
    """What to type to train in this run directory, or to run a stage for it, with its settings."""
    named = run_dir == Path("runs") / run_dir.name
    place = ["--name", run_dir.name] if named else ["--run-dir", str(run_dir)]
    words = ["python", "-m", __package__, name, *place]
    if (settings := run_dir / "config.json").exists():
        words += ["--config", str(settings)]
    return shlex.join(words)


def exit_code(command: Callable[[], int]) -> int:
    """Run a command: 0 when all is well, 1 when something went wrong, 2 for bad input.

    Under torchrun the process ends here.
    """
    try:
        code = command()
    except (UserError, RankError, PermissionError) as error:
        code = 2 if isinstance(error, UserError) else 1
        distributed = sys.modules.get("torch.distributed")
        joined = distributed and distributed.is_initialized()
        _report(f"error: {error}", joined and not getattr(error, "agreed", False))
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # nobody reads on, as after `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes at exit
        code = 1
    except SystemExit as stop:  # of options that are wrong, or of a stage that was stopped
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        line = _in_one_line(error)
        code, text = (2, f"error: {line}") if line else (1, _traceback(error))
        if isinstance(error, OSError) and error.filename:
            line = text = f"error: {error}"  # it says enough; a run's log has the traceback
        if "RANK" in os.environ and "gloo" in str(error) and "by peer" in str(error):
            text = "error: this rank cannot go on, since another one is gone"
        if not line and "RANK" not in os.environ:
            sys.excepthook = lambda *_: print(text, file=sys.stderr)  # a debugger sees it all
            raise
        _report(text, not line)
    if "RANK" in os.environ:
        # Leave at once: finalisers of the process group may wait for ranks that are gone, and
        # threads of libraries may abort the interpreter, after which torchrun would restart all.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    atexit.register(gc.freeze)  # or Python, as it ends, looks for garbage in all of torch: 1 s
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # Stop signals often come twice, and Python removes its own handlers on its way out.
        signal.signal(number, signal.SIG_IGN)
    return code


def printable(text: str) -> str:
    """A text as it is shown: what a file says must not command a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _report(text: str, on_any_rank: object = False) -> None:
    text = printable(text)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr)
        return
    time.sleep(1.0)  # the first rank may report it for all; the launcher then ends this one
    if on_any_rank:
        print(f"[rank {os.environ['RANK']}] {text}", file=sys.stderr)


def _is_own(frame: traceback.FrameSummary) -> bool:
    """Whether it is in a file of the user's: neither ours, nor Python's, nor installed."""
    path = Path(frame.filename)
    if path.is_relative_to(HERE):
        return path.relative_to(HERE).parts[0].removesuffix(".py") not in OURS
    return path.is_absolute() and not any(map(path.is_relative_to, (sys.prefix, sys.base_prefix)))


def _traceback(error: Exception) -> str:
    """A traceback of the user's own files alone, if it comes through any."""
    whole = part = traceback.TracebackException.from_exception(error)
    while part:
        part.stack[:] = [*filter(_is_own, part.stack)] or part.stack
        part = part.__cause__ or part.__context__
    return "".join(whole.format()).rstrip()


def _in_one_line(error: Exception) -> str:
    """What to do about an error that many projects meet; nothing for any other."""
    stack = traceback.extract_tb(error.__traceback__)
    at = ([*filter(_is_own, stack)] or stack)[-1]
    text = f"{at.filename}:{at.lineno}: {error}".partition("\n")[0]
    if isinstance(error, ModuleNotFoundError):
        return f"{text}; `{sys.executable} -m pip install -e .` installs what pyproject.toml names"
    if isinstance(error, RuntimeError) and "double" in str(error).lower():
        return (
            f"{text}; float64, as numpy makes it, meets float32 weights: convert it in data.py, "
            "as in torch.from_numpy(x).float()"
        )
    return ""
