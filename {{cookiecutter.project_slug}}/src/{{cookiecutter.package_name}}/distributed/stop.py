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
    """The flags of all ranks combined: all ranks get the same flags at the same step."""

    # The number of a stop signal that a rank got; 0 if no rank got one.
    stop_signal: int = 0
    # Whether a callback of any rank asks to end the run.
    finish: bool = False
    # Whether an asynchronous save of any rank has failed.
    save_failed: bool = False

    @property
    def ends_run(self) -> bool:
        """Return whether the training loop must save and end."""
        return self.finish or self.stop_signal > 0


class Stop:
    """Handles stop signals: rank 0 prints its first one, and the training loop polls for them.

    A second Ctrl-C, or one during start-up, raises KeyboardInterrupt at once.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        # The last stop signal of this process.
        self.signal: int | None = None
        # The time of the first stop signal (time.monotonic()). Before any signal it is infinite, so
        # that a deadline counted from it is never reached.
        self.received_at = math.inf
        # The reason that a callback gave for ending the run; "" if no callback has ended it.
        self.reason = ""
        # Whether `poll` has been called; before the first call, the run is starting up.
        self.polled = False
        # The earlier handler of each signal, to restore at the end.
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        numbers = list(STOP_SIGNALS)
        # nohup starts a process with SIGHUP ignored. Then it must stay ignored.
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        # Outside the main thread, signal.signal raises ValueError. A run in another thread handles
        # no signals.
        with contextlib.suppress(ValueError):
            for number in numbers:
                self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for number, handler in self.previous.items():
            # After a stop signal, this process is about to exit, and another signal must not kill
            # it. A handler that does nothing is better than SIG_IGN, which new programs inherit.
            if self.signal is not None and handler == signal.SIG_DFL:
                handler = _ignore
            signal.signal(number, handler)
        # After an error, do not wait for the other ranks, which may be gone.
        if kind is None:
            self.group.settle()

    def poll(self, save_failed: bool = False) -> Agreed:
        """Send this rank's flags, and return the combined flags of all ranks; collective.

        With several ranks, a poll combines the flags that the ranks sent at their previous poll. So
        a rank waits only if another rank is a whole poll behind. But the first poll waits for all
        ranks and combines the flags that they send now, so that a stop during start-up takes effect
        before the first step. Raises RankError if another rank is gone or does not answer in time.
        """
        self.polled = True
        flags = [self.signal or 0, int(bool(self.reason)), int(save_failed)]
        # `exchange` returns the maximum of each flag over the ranks.
        stop_signal, finish, any_save_failed = self.group.exchange(flags)
        if finish and not self.reason:
            self.reason = "a callback of another rank"
        return Agreed(stop_signal, bool(finish), bool(any_save_failed))

    def agree_to_finish(self) -> bool:
        """Return whether a callback of any rank has ended the run; waits for all (collective)."""
        finish = self.group.any(bool(self.reason))
        if finish and not self.reason:
            self.reason = "a callback of another rank"
        return finish

    def finish(self, reason: str) -> None:
        """End the run as finished, on all ranks at the same step.

        If a callback calls this at a step with a validation, the run ends after that step.
        Otherwise the run ends after the next step at the latest.
        """
        self.reason = reason or "a callback"

    def outcome(self, agreed: Agreed) -> Literal["finished", "preempted", "regrouping"]:
        """Return the final status of a run that has saved everything."""
        if agreed.finish or not agreed.stop_signal:
            return "finished"
        # Perhaps only another rank got the signal. In an elastic job, `regrouping` waits a few
        # seconds for a signal to this rank. If none comes, another machine is leaving the job, and
        # this rank must be restarted to continue without that machine.
        if regrouping(lambda: self.signal is not None):
            return "regrouping"
        return "preempted"

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        """Remember a stop signal, and print the first one; a second Ctrl-C ends the run at once."""
        had_ctrl_c = self.signal == signal.SIGINT
        is_starting = not self.polled
        if number == signal.SIGINT and (had_ctrl_c or is_starting):
            raise KeyboardInterrupt("Ctrl-C")
        if self.signal is None:
            self.received_at = time.monotonic()
            if self.group.rank == 0:
                doing = self.group.doing if self.polled else "start-up"
                text = f"{signal.Signals(number).name}: stopping as soon as the {doing} allows\n"
                # On Ctrl-C, a terminal shows "^C" at the start of the line: write below it.
                if sys.stderr.isatty():
                    text = f"\n{text}"
                # Do not write to sys.stderr, since the signal may have interrupted such a write.
                with contextlib.suppress(OSError):
                    os.write(2, text.encode())
        self.signal = number


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """Handle a signal by doing nothing."""
