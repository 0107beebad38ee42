"""Stop signals, and how all processes act on them at the same step."""

import contextlib
import math
import os
import signal
import sys
import time
import types
from typing import Any, Literal

from ..errors import STOP_SIGNALS
from . import Group, regrouping

FINISH = 1024  # takes the place of a stop signal, above them all, when a callback ends the run
TO_BE_RESTARTED = 75  # exit code (EX_TEMPFAIL) after "regrouping": any but 0 makes torchrun restart


class Stop:
    """Takes over the stop signals: the handler reports the first and sets a flag; the loop polls.

    A second Ctrl-C, or one during start-up, raises KeyboardInterrupt at once.
    """

    since = math.inf  # when this process got a stop signal
    reason = ""  # of the callback that ends the run

    def __init__(self, group: Group) -> None:
        self.group = group
        self.signal: int | None = None
        self.polled = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        Stop.since = math.inf
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [n for n in STOP_SIGNALS if n != signal.SIGHUP or not nohup]
        with contextlib.suppress(ValueError):  # none is handled in other threads
            self.previous = {n: signal.signal(n, self._handle) for n in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for number, handler in self.previous.items():
            # A run that is about to exit, since it was stopped, must not die of a second signal.
            # A function that does nothing: unlike SIG_IGN, child processes do not inherit it.
            stopping = self.signal is not None and handler == signal.SIG_DFL
            signal.signal(number, (lambda *_: None) if stopping else handler)
        if kind is None:
            self.group.settle()

    def poll(self, failed: bool = False) -> tuple[int, bool]:
        """Agree on a stop signal (or 0), and on whether a save failed on any rank."""
        # Each poll returns the flags sent at the poll before, so that no rank waits. Only the first
        # poll waits: a stop during start-up takes effect before the first step.
        self.polled = True
        word = FINISH if self.reason else self.signal or 0
        stop_signal, any_failed = self.group.exchange([word, int(failed)])
        if stop_signal == FINISH:
            self.reason = self.reason or "a callback of another rank"
        return stop_signal, bool(any_failed)

    def finish(self, reason: str) -> None:
        """End the run as finished, on all ranks at the same step: this one or the next."""
        self.reason = reason or "a callback"

    def outcome(self, stop_signal: int) -> Literal["finished", "preempted", "regrouping"]:
        """The final status of a run that has saved everything, from the agreed stop signal."""
        if stop_signal in (0, FINISH):
            return "finished"
        return "regrouping" if regrouping(lambda: self.signal is not None) else "preempted"

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGINT and (self.signal == signal.SIGINT or not self.polled):
            raise KeyboardInterrupt("Ctrl-C")
        if self.signal is None:
            Stop.since = time.monotonic()
            if self.group.rank == 0:
                doing = self.group.doing if self.polled else "start-up"
                said = f"{signal.Signals(number).name}: stopping as soon as the {doing} allows\n"
                with contextlib.suppress(OSError):  # not by a stream, which may be in use
                    os.write(2, ("\n" * sys.stderr.isatty() + said).encode())
        self.signal = number
