"""Stop signals, and the control word that carries them to all ranks."""

import logging
import signal
import types
from typing import Any

import torch
import torch.distributed as dist

from .agreement import Group

log = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Control:
    """The control word: what any rank wants all ranks to do, read one step after it was sent.

    Signal handlers only set a flag. Each step every rank starts an all-reduce of its flags and
    reads the one of the step before, so nobody waits and all act at the same step. Only the first
    one is waited for: a stop that came during start-up is heeded before the first step.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.signal: int | None = None
        self.previous: dict[int, Any] = {}
        self.pending: dist.Work | None = None
        self.heeded = False

    def __enter__(self) -> "Control":
        """Take over the stop signals (in the main thread; elsewhere they are left alone)."""
        try:
            self.previous = {n: signal.signal(n, self._handle) for n in STOP_SIGNALS}
        except ValueError:
            log.debug("not in the main thread: stop signals are not handled")
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Give the signals back; no collective is left unfinished after a regular end."""
        for number, handler in self.previous.items():
            # Told to stop, it does; told once more on its way out, it must not die of that.
            deaf = self.signal is not None and handler == signal.SIG_DFL
            signal.signal(number, _hear_no_more if deaf else handler)
        if kind is None and self.pending is not None:
            self.group.wait(self.pending)

    def exchange(self, failed: bool = False) -> tuple[int, bool]:
        """Send this rank's flags; return (stop signal or 0, a save failed) as of the last call."""
        self.heeded = True
        if self.group.group is None:
            return self.signal or 0, failed
        if self.pending is None:
            self._send(failed)
        self.group.wait(self.pending)
        stop, any_failed = self.word.tolist()
        self._send(failed)
        return stop, bool(any_failed)

    def _send(self, failed: bool) -> None:
        self.word = torch.tensor([self.signal or 0, failed], dtype=torch.int32)
        self.pending = self.group.all_max(self.word)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGINT and (self.signal == signal.SIGINT or not self.heeded):
            raise KeyboardInterrupt  # a second Ctrl-C means now, as does one during start-up
        self.signal = number


TO_BE_RESTARTED = 75


class Stop(Control):
    """The control word of the loop."""

    def poll(self, failed: bool) -> tuple[int, bool]:
        """Send this rank's flags; return those of the last call."""
        return self.exchange(failed)

    def outcome(self, stop_signal: int) -> str:
        """How a run has ended for this rank."""
        from .elastic import outcome

        return outcome(stop_signal, self)


def _hear_no_more(number: int, frame: types.FrameType | None) -> None:
    """Unlike SIG_IGN, nothing that a child process would inherit."""
