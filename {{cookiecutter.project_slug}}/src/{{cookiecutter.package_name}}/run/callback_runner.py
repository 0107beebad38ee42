"""Prepare callbacks for the training loop, which calls their methods.

callbacks.py documents callbacks, and `_run` (train.py) lists those of a run.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger(__name__)


def enter(callbacks: Iterable[Any], stack: contextlib.ExitStack) -> list[Any]:
    """Enter the callbacks that are context managers, and return all callbacks.

    `stack` exits the entered ones. A callback marked `harmless` is wrapped in Harmless, which
    catches its errors.
    """
    all_to_call: list[Any] = []
    for callback in callbacks:
        if getattr(callback, "harmless", False):
            to_call: Any = Harmless(callback)
        else:
            to_call = callback
        # Check the callback itself, since its Harmless wrapper always has __enter__.
        if hasattr(callback, "__enter__"):
            stack.enter_context(to_call)
        all_to_call.append(to_call)
    return all_to_call


def find_methods(name: str, callbacks: Iterable[Any]) -> list[Callable[..., None]]:
    """Return the method with this name of each callback that has one."""
    return [getattr(callback, name) for callback in callbacks if hasattr(callback, name)]


class Harmless:
    """Wraps a callback: its first error disables it and logs a warning, and the run continues."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.failed = False
        # Holds the callback once it is entered, so that `__exit__` exits only an entered callback.
        self.entered = contextlib.ExitStack()

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Raises AttributeError if the callback has no such method. Then hasattr in `find_methods`
        # returns False.
        method = getattr(self.callback, name)

        def call_if_enabled(*arguments: Any) -> None:
            if not self.failed:
                self._call(method, *arguments)

        return call_if_enabled

    def __enter__(self) -> None:
        self._call(self.entered.enter_context, self.callback)

    def __exit__(self, *exception: object) -> None:
        """Exit the callback if it was entered, even if an error has disabled it."""
        self._call(self.entered.__exit__, *exception)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception as error:
            if not self.failed:
                kind = type(self.callback).__name__
                log.warning("%s is disabled after an error; training continues: %r", kind, error)
            self.failed = True
