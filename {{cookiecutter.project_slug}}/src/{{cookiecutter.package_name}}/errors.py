"""Errors that are shown in one line, without a traceback, and the exit codes of commands."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable


class UserError(ValueError):
    """An error the user can fix."""

    agreed = False  # True: every rank raised it, so one of them reports it


class RankError(RuntimeError):
    """Something failed on one rank or more; raised on all of them."""

    agreed = False  # as of UserError


def exit_code(command: Callable[[], int]) -> int:
    """Run a command: 0 when all is well, 1 when something went wrong, 2 for bad input.

    Under torchrun the process ends here.
    """
    try:
        code = command()
    except (UserError, RankError, PermissionError) as error:
        code = 2 if isinstance(error, UserError) else 1
        _report(error, getattr(error, "agreed", False))
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:  # of options that are wrong, or of a stage that was stopped
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        code = 1
        if isinstance(error, OSError) and error.filename:
            _report(error, False)  # it says enough; a run's log has the traceback
        elif "RANK" in os.environ:
            traceback.print_exc()
        else:
            raise
    if "RANK" in os.environ:
        # Leave at once: finalisers of the process group may wait for ranks that are gone, and
        # threads of libraries may abort the interpreter, after which torchrun would restart all.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # Stop signals often come twice, and Python removes its own handlers on its way out.
        signal.signal(number, signal.SIG_IGN)
    return code


def printable(text: str) -> str:
    """A text as it is shown: what a file says must not command a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _report(error: Exception, agreed: bool) -> None:
    text = printable(f"error: {error}")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr)
        return
    time.sleep(1.0)  # the first rank may report it for all; the launcher then ends this one
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized() and not agreed:
        print(f"[rank {os.environ['RANK']}] {text}", file=sys.stderr)
