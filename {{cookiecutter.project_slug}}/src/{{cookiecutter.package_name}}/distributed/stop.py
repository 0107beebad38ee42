"""Handle stop signals, so that all ranks act on them at the same step."""

import contextlib
import math
import os
import signal
import sys
import time
import types
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import STOP_SIGNALS
from . import Group, regrouping

# Exit code of a rank whose run ends as "regrouping" (EX_TEMPFAIL of sysexits.h). torchrun restarts
# the ranks after any exit code except 0.
TO_BE_RESTARTED = 75


@dataclass(frozen=True)
class Agreed:
    """Flags that any rank has set; all ranks see the same flags at the same step."""

    # The number of the stop signal; 0 if no rank got one.
    stop_signal: int = 0
    # Whether a callback asks to end the run.
    finish: bool = False
    # Whether an asynchronous save has failed.
    save_failed: bool = False

    @property
    def ends_run(self) -> bool:
        """Tell whether the loop must save and end."""
        return self.finish or self.stop_signal > 0


class Stop:
    """Handles stop signals: rank 0 prints the first one, and the loop polls for them.

    A second Ctrl-C, or one during start-up, raises KeyboardInterrupt at once.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        # The last stop signal of this process.
        self.signal: int | None = None
        # The time of the first one (time.monotonic()). While there is none, it is infinite, so that
        # a deadline counted from it is never reached.
        self.received_at = math.inf
        # The reason given by the callback that ends the run; "" if none has ended it.
        self.reason = ""
        # Whether the loop has polled; before its first poll, the run is starting up.
        self.polled = False
        # The handlers to restore at the end.
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        numbers = list(STOP_SIGNALS)
        # nohup ignores SIGHUP, and so does this run then.
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        # In a thread other than the main one, signal.signal raises ValueError; a run there handles
        # no signals.
        with contextlib.suppress(ValueError):
            for number in numbers:
                self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for number, handler in self.previous.items():
            # A second signal must not kill a stopped run that is about to exit. Unlike SIG_IGN,
            # child processes do not inherit a handler that does nothing.
            if self.signal is not None and handler == signal.SIG_DFL:
                handler = _ignore
            signal.signal(number, handler)
        # After an error, do not wait for the other ranks, which may be gone.
        if kind is None:
            self.group.settle()

    def poll(self, save_failed: bool = False) -> Agreed:
        """Send this rank's flags, and return the flags that any rank has set; collective.

        Each poll returns the flags sent at the previous poll, so that a rank waits only for one
        that is a whole poll behind. But the first poll waits for all ranks and returns the flags
        just sent: a stop during start-up takes effect before the first step.
        """
        self.polled = True
        flags = [self.signal or 0, int(bool(self.reason)), int(save_failed)]
        # The result has the maximum of each flag over the ranks.
        stop_signal, finish, any_save_failed = self.group.exchange(flags)
        if finish and not self.reason:
            self.reason = "a callback of another rank"
        return Agreed(stop_signal, bool(finish), bool(any_save_failed))

    def agree_to_finish(self) -> bool:
        """Return whether a callback of any rank has ended the run; collective, waits for all."""
        finish = self.group.any(bool(self.reason))
        if finish and not self.reason:
            self.reason = "a callback of another rank"
        return finish

    def finish(self, reason: str) -> None:
        """End the run as finished, on all ranks at the same step.

        The run ends after the current step if a callback calls this after the step's validation,
        otherwise after the next step.
        """
        self.reason = reason or "a callback"

    def outcome(self, agreed: Agreed) -> Literal["finished", "preempted", "regrouping"]:
        """Return the final status of a run that has saved everything."""
        if agreed.finish or not agreed.stop_signal:
            return "finished"
        # Any rank may have got the signal. In an elastic job, `regrouping` waits a few seconds for
        # this rank's own signal; without one, only another machine is leaving.
        if regrouping(lambda: self.signal is not None):
            return "regrouping"
        return "preempted"

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        is_second = self.signal == signal.SIGINT
        is_starting = not self.polled
        if number == signal.SIGINT and (is_second or is_starting):
            raise KeyboardInterrupt("Ctrl-C")
        if self.signal is None:
            self.received_at = time.monotonic()
            if self.group.rank == 0:
                doing = self.group.doing if self.polled else "start-up"
                text = f"{signal.Signals(number).name}: stopping as soon as the {doing} allows\n"
                # A terminal shows "^C" at the start of the line.
                if sys.stderr.isatty():
                    text = f"\n{text}"
                # Do not use sys.stderr, since the signal may have interrupted a write to it.
                with contextlib.suppress(OSError):
                    os.write(2, text.encode())
        self.signal = number


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """Handle a signal by doing nothing."""
