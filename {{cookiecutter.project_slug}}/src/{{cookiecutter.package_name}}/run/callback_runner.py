"""How the loop enters and calls its callbacks; callbacks.py says what they are."""

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

log = logging.getLogger(__name__)
METHODS = ("before_step", "after_step", "after_validation")


def enter(callbacks: Iterable[Any], stack: contextlib.ExitStack) -> Iterator[Any]:
    """The callbacks as the loop calls them; context managers are entered, and left by `stack`."""
    for callback in callbacks:
        one = Harmless(callback) if getattr(callback, "harmless", False) else callback
        if hasattr(one, "__enter__"):
            stack.enter_context(one)
        yield one


def methods(callbacks: list[Any]) -> Iterator[list[Callable[..., None]]]:
    """Their bound methods by name, looked up once so that a step calls them directly."""
    for name in METHODS:
        yield [getattr(one, name) for one in callbacks if hasattr(one, name)]


class Harmless:
    """A callback whose errors do not end the run: the first is a warning, then it is left out."""

    def __init__(self, callback: Any) -> None:
        self.callback, self.failed = callback, False
        self.stack = contextlib.ExitStack()
        for name in METHODS:
            if hasattr(callback, name):
                setattr(self, name, functools.partial(self._call, getattr(callback, name)))

    def __enter__(self) -> "Harmless":
        if hasattr(self.callback, "__enter__"):
            self._call(self.stack.enter_context, self.callback)
        return self

    def __exit__(self, *exception: Any) -> None:
        """Leave it if it was entered, even after an error."""
        if self.failed:
            with contextlib.suppress(Exception):
                self.stack.__exit__(*exception)
        self._call(self.stack.__exit__, *exception)

    def _call(self, method: Callable[..., object], *arguments: Any) -> None:
        if self.failed:
            return
        try:
            method(*arguments)
        except Exception as error:
            self.failed = True
            name = type(self.callback).__name__
            log.warning("%s is left out from here on, training is not: %r", name, error)


class GarbageCollection:
    """A callback: Python's cycle collector runs at log steps only, where the host waits anyway.

    Elsewhere it would stop one process, and all that wait for it, at a random moment. Reference
    counts free almost all that a step drops.
    """

    def __enter__(self) -> "GarbageCollection":
        """Turn the collector off; what is there by now stays for the run."""
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(self, *exception: object) -> None:
        gc.enable()
        gc.unfreeze()

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Collect at log steps."""
        if record is not None:
            gc.collect(1)
