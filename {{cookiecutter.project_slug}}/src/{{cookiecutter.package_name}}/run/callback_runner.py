"""The callbacks of a run, and how the loop calls them; callbacks.py says what they are."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..compile import Compiling
from ..distributed import Group
from ..profiler import Profiler
from .bad_steps import BadSteps
from .tracker import tracking

log = logging.getLogger(__name__)
METHODS = ("before_step", "after_step", "after_validation")


def built_in(
    state: Any, train_step: Callable[..., None], run_dir: Path, group: Group, writing: tuple
) -> Iterator[Any]:
    """The callbacks between the watchdog's and your own, in the order in which they are called."""
    config = state.config
    yield BadSteps(config.train, train_step, group)
    yield from writing  # the record, to which the callbacks before may have added figures
    if config.track and state.world.rank == 0:
        yield from tracking(config, run_dir, state.step)
    if config.profile.every:
        yield Profiler(config.profile, run_dir / "traces", state)
    if config.compile.mode != "none":
        yield Compiling()


def enter(callbacks: Iterable[Any], stack: contextlib.ExitStack) -> Iterator[Any]:
    """The callbacks as the loop calls them; context managers are entered, and left by `stack`."""
    for callback in callbacks:
        if getattr(callback, "harmless", False):
            callback = Harmless(callback)
        if hasattr(callback, "__enter__"):
            stack.enter_context(callback)
        yield callback


def methods(callbacks: list[Any]) -> Iterator[list[Callable[..., None]]]:
    """Their bound methods by name, looked up once so that a step calls them directly."""
    for name in METHODS:
        yield [getattr(one, name) for one in callbacks if hasattr(one, name)]


class Harmless:
    """A callback whose errors do not end the run: the first is a warning, and disables it."""

    def __init__(self, callback: Any) -> None:
        self.callback, self.failed, self.entered = callback, False, contextlib.ExitStack()
        for name in METHODS:
            if method := getattr(callback, name, None):
                setattr(self, name, functools.partial(self._call, method))

    def __enter__(self) -> None:
        if hasattr(self.callback, "__enter__"):
            self._call(self.entered.enter_context, self.callback)

    def __exit__(self, *exception: Any) -> None:
        """Leave the callback if it was entered, even after an error."""
        self._call(self.entered.__exit__, *exception, always=True)

    def _call(self, method: Callable[..., Any], *arguments: Any, always: bool = False) -> None:
        try:
            if always or not self.failed:
                method(*arguments)
        except Exception as error:
            if not self.failed:
                kind = type(self.callback).__name__
                log.warning("%s is disabled after an error; training continues: %r", kind, error)
            self.failed = True
