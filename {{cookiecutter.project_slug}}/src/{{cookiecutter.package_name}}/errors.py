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
    except Exception:
        if "RANK" not in os.environ:
            raise
        traceback.print_exc()
        code = 1
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


def _report(error: Exception, agreed: bool) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr)
        return
    time.sleep(1.0)  # the first rank may report it for all; the launcher then ends this one
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized() and not agreed:
        print(f"[rank {os.environ['RANK']}] error: {error}", file=sys.stderr)
