"""Stop signals, and how all processes act on them at the same step."""

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

# The exit code after "regrouping" (EX_TEMPFAIL): any but 0 makes torchrun start the ranks again.
TO_BE_RESTARTED = 75


@dataclass(frozen=True)
class Agreed:
    """What any rank has asked for; all ranks read the same at the same step."""

    # The number of the signal, 0 if no rank got one.
    stop_signal: int = 0
    # Whether a callback ends the run.
    finish: bool = False
    save_failed: bool = False

    @property
    def ends_run(self) -> bool:
        """Whether the loop is to save and to end."""
        return self.finish or self.stop_signal > 0


class Stop:
    """Handles the stop signals: the handler reports the first and sets a flag; the loop polls.

    A second Ctrl-C, or one during start-up, raises KeyboardInterrupt at once.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        # The last stop signal that this process got, and when it got the first one, by
        # time.monotonic().
        self.signal: int | None = None
        self.received_at = math.inf
        # What the callback says that ends the run.
        self.reason = ""
        # Whether the loop has begun to poll: before that, the run is in its start-up.
        self.polled = False
        # The handlers that were there before.
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        numbers = list(STOP_SIGNALS)
        # nohup ignores it.
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        # Only the main thread can handle signals; in another one a run handles none.
        with contextlib.suppress(ValueError):
            for number in numbers:
                self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for number, handler in self.previous.items():
            # A run that is about to exit, since it was stopped, must not die of a second signal.
            # Unlike SIG_IGN, child processes do not inherit a function that does nothing.
            if self.signal is not None and handler == signal.SIG_DFL:
                handler = _ignore
            signal.signal(number, handler)
        if kind is None:
            self.group.settle()

    def poll(self, save_failed: bool = False) -> Agreed:
        """Share what this rank was asked for, and whether its save failed; what all ranks agree on.

        Each poll returns the flags sent at the poll before, so that no rank waits. Only the first
        poll waits: a stop during start-up takes effect before the first step.
        """
        self.polled = True
        flags = [self.signal or 0, int(bool(self.reason)), int(save_failed)]
        stop_signal, finish, any_save_failed = self.group.exchange(flags)
        if finish and not self.reason:
            self.reason = "a callback of another rank"
        return Agreed(stop_signal, bool(finish), bool(any_save_failed))

    def finishes_now(self) -> bool:
        """Tell whether a callback of any rank has ended the run; waits for all ranks."""
        finish = self.group.any(bool(self.reason))
        if finish and not self.reason:
            self.reason = "a callback of another rank"
        return finish

    def finish(self, reason: str) -> None:
        """End the run as finished, on all ranks at the same step: this one or the next."""
        self.reason = reason or "a callback"

    def outcome(self, agreed: Agreed) -> Literal["finished", "preempted", "regrouping"]:
        """The final status of a run that has saved everything, from what it ended for."""
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
                # A terminal shows "^C" on the line.
                if sys.stderr.isatty():
                    said = f"\n{said}"
                # Not by sys.stderr: the signal may have interrupted a call of it.
                with contextlib.suppress(OSError):
                    os.write(2, said.encode())
        self.signal = number


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """A signal handler that does nothing."""
