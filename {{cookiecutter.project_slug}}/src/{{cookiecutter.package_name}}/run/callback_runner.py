"""Call callbacks from the loop. callbacks.py documents them; `_run` (train.py) lists them."""

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger(__name__)


def enter(callbacks: Iterable[Any], stack: contextlib.ExitStack) -> list[Any]:
    """Enter the callbacks that are context managers, and return all callbacks.

    `stack` exits them. A callback marked `harmless` is wrapped, so that its errors are caught.
    """
    entered: list[Any] = []
    for callback in callbacks:
        if getattr(callback, "harmless", False):
            to_call: Any = Harmless(callback)
        else:
            to_call = callback
        # Look at the callback itself, since Harmless always has __enter__.
        if hasattr(callback, "__enter__"):
            stack.enter_context(to_call)
        entered.append(to_call)
    return entered


def find_methods(name: str, callbacks: Iterable[Any]) -> list[Callable[..., None]]:
    """Return the method of this name from each callback that has one."""
    return [getattr(callback, name) for callback in callbacks if hasattr(callback, name)]


class Harmless:
    """Wrapper of a callback whose first error disables it with a warning; the run continues."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.failed = False
        # Exits the callback if it was entered.
        self.entered = contextlib.ExitStack()

    def __getattr__(self, name: str) -> Callable[..., None]:
        # AttributeError if the callback has no such method, so that `find_methods` leaves it out.
        method = getattr(self.callback, name)

        def call_if_enabled(*arguments: Any) -> None:
            if not self.failed:
                self._call(method, *arguments)

        return call_if_enabled

    def __enter__(self) -> None:
        self._call(self.entered.enter_context, self.callback)

    def __exit__(self, *exception: object) -> None:
        """Exit the callback if it was entered, even after an error."""
        self._call(self.entered.__exit__, *exception)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception as error:
            if not self.failed:
                kind = type(self.callback).__name__
                log.warning("%s is disabled after an error; training continues: %r", kind, error)
            self.failed = True
