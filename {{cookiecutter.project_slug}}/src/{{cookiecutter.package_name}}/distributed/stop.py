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

# Exit code after "regrouping" (EX_TEMPFAIL): any code except 0 makes torchrun restart the ranks.
TO_BE_RESTARTED = 75


@dataclass(frozen=True)
class Agreed:
    """Requests of any rank, which all ranks see at the same step."""

    # The number of the signal; 0 if no rank got one.
    stop_signal: int = 0
    # Whether a callback asks to end the run.
    finish: bool = False
    save_failed: bool = False

    @property
    def ends_run(self) -> bool:
        """Tell whether the loop must save and end."""
        return self.finish or self.stop_signal > 0


class Stop:
    """Handles stop signals: the handler logs the first one and sets a flag, which the loop polls.

    A second Ctrl-C, or one during start-up, raises KeyboardInterrupt at once.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        # The last stop signal of this process, and the time of the first one (time.monotonic()).
        self.signal: int | None = None
        self.received_at = math.inf
        # The reason given by the callback that ends the run.
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
        # Only the main thread can handle signals; a run in another thread handles none.
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
        if kind is None:
            self.group.settle()

    def poll(self, save_failed: bool = False) -> Agreed:
        """Send this rank's requests, and return those that all ranks agree on.

        Each poll returns the flags sent at the previous poll, so that a rank waits only for one
        that is a whole poll behind. But the first poll waits for all: a stop during start-up takes
        effect before the first step.
        """
        self.polled = True
        flags = [self.signal or 0, int(bool(self.reason)), int(save_failed)]
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

        That is this step if a callback calls it after a validation, otherwise the next one.
        """
        self.reason = reason or "a callback"

    def outcome(self, agreed: Agreed) -> Literal["finished", "preempted", "regrouping"]:
        """Return the final status of a run that has saved everything."""
        if agreed.finish or not agreed.stop_signal:
            return "finished"
        if regrouping(lambda: self.signal is not None):
            return "regrouping"
        return "preempted"

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGINT and (self.signal == signal.SIGINT or not self.polled):
            raise KeyboardInterrupt("Ctrl-C")
        if self.signal is None:
            self.received_at = time.monotonic()
            if self.group.rank == 0:
                doing = self.group.doing if self.polled else "start-up"
                said = f"{signal.Signals(number).name}: stopping as soon as the {doing} allows\n"
                # A terminal shows "^C" at the start of the line.
                if sys.stderr.isatty():
                    said = f"\n{said}"
                # Not with sys.stderr, since the signal may have interrupted a write to it.
                with contextlib.suppress(OSError):
                    os.write(2, said.encode())
        self.signal = number


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """Handle a signal by doing nothing."""
