"""A command line with commands: which one is meant, its options as settings, its exit code."""

import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist
import tyro

from .distributed import launched_ranks
from .errors import RankError, UserError

T = TypeVar("T")
Command = Callable[[list[str]], int]
PROGRAM = f"python -m {__package__.split('.')[0]}"


def ask(command: Command, kind: type[T], words: list[str], more: str = "", **how: T) -> T:
    """Settings of some kind from the words behind a command; its docstring is the help."""
    prog = f"{PROGRAM} {command.__name__}"
    return tyro.cli(kind, prog=prog, description=command.__doc__ + more, args=words, **how)


def dispatch(commands: Iterable[Command], words: list[str], many_ranks: Iterable[str]) -> int:
    """Run the command that the first word names; those in `many_ranks` also under torchrun."""
    known = {command.__name__: command for command in commands}
    name, *rest = words or ["--help"]
    lines = [f"  {name:<12}{command.__doc__}" for name, command in known.items()]
    usage = "\n".join([f"usage: {PROGRAM} COMMAND [--help] [options]", "", *lines])
    if name in ("-h", "--help"):
        print(usage)
        return 0
    if name not in known:
        raise UserError(f"there is no command {name!r}\n{usage}")
    if launched_ranks() > 1 and name not in many_ranks:
        raise UserError(f"{name} starts what it needs itself: run it without torchrun")
    return known[name](rest)


def leave(number: int, frame: types.FrameType | None) -> None:
    """Handle a stop signal by leaving, so that what was started is ended as well."""
    signal.signal(number, signal.SIG_IGN)  # it often comes twice
    sys.exit(128 + number)


def exit_code(command: Callable[[], int]) -> int:
    """Run a command: 0 when all is well, 1 when something went wrong, 2 for bad input."""
    try:
        code = command()
    except (UserError, RankError, PermissionError) as error:
        code = 2 if isinstance(error, UserError) else 1
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        else:
            time.sleep(1.0)  # the first rank may say it for all; the launcher then ends this one
            if dist.is_initialized() and not getattr(error, "agreed", False):
                print(f"[rank {os.environ['RANK']}] error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:  # of options that are wrong, or `leave`
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception:
        if "RANK" not in os.environ:
            raise
        traceback.print_exc()
        code = 1
    if "RANK" in os.environ:
        # After a failure the process group cannot be left in order: its finalisers may wait for
        # ranks that are gone. After success, threads of libraries may still abort the interpreter
        # on its way out (seen, on a busy machine), and torchrun would start it all again. What is
        # to be kept has been written by now, so leave at once.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # Stop signals often come twice, and on its way out Python takes its own handlers back.
        signal.signal(number, signal.SIG_IGN)
    return code
