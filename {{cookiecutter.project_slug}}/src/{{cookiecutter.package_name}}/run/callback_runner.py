"""The callbacks of a run, and how the loop calls them; callbacks.py says what they are."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..compile import Compiling
from ..distributed import Group
from .bad_steps import BadSteps
from .tracker import TRACKERS

log = logging.getLogger(__name__)


def built_in(
    state: Any, train_step: Callable[..., None], run_dir: Path, group: Group, yours: tuple
) -> Iterator[Any]:
    """The callbacks behind the watchdog, yours and the journal among them, in their order."""
    config = state.config
    state.checkpointer.remember(yours)
    yield BadSteps(config.train, train_step, group)
    yield from yours
    if config.track and state.world.rank == 0:
        yield from (tracker(config, run_dir, state.step) for tracker in TRACKERS)
    if config.profile.every:
        from ..profiler import Profiler

        yield Profiler(config.profile, run_dir / "traces", state)
    if config.compile.mode != "none":
        yield Compiling()


def enter(callbacks: Iterable[Any], stack: contextlib.ExitStack) -> Iterator[Any]:
    """The callbacks as the loop calls them; context managers are entered, and left by `stack`."""
    for callback in callbacks:
        guarded = Harmless(callback) if getattr(callback, "harmless", False) else callback
        if hasattr(callback, "__enter__"):
            stack.enter_context(guarded)
        yield guarded


def methods(callbacks: list[Any]) -> Iterator[list[Callable[..., None]]]:
    """Their bound methods by name, looked up once so that a step calls them directly."""
    for name in ("before_step", "after_step", "after_validation"):
        yield [getattr(one, name) for one in callbacks if hasattr(one, name)]


class Harmless:
    """A callback whose errors do not end the run: the first is a warning, and disables it."""

    def __init__(self, callback: Any) -> None:
        self.callback, self.failed, self.entered = callback, False, contextlib.ExitStack()

    def __getattr__(self, name: str) -> Callable[..., None]:
        method = getattr(self.callback, name)
        return lambda *arguments: None if self.failed else self._call(method, *arguments)

    def __enter__(self) -> None:
        self._call(self.entered.enter_context, self.callback)

    def __exit__(self, *exception: object) -> None:
        """Leave the callback if it was entered, even after an error."""
        self._call(self.entered.__exit__, *exception)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception as error:
            if not self.failed:
                kind = type(self.callback).__name__
                log.warning("%s is disabled after an error; training continues: %r", kind, error)
            self.failed = True
