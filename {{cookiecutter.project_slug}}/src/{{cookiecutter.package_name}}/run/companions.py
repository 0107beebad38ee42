"""What goes along with a run without being part of its steps: traces, compile caches, a tracker."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..compile import ShelteredCompilers
from ..compile_cache import CompileCache
from ..distributed import Group
from ..profiler import Profiler
from .bad_steps import StopAtBadStep
from .tracking import Tracking


def companions(
    state: Any, directory: Path, train_step: Callable[..., None], group: Group
) -> Iterator[Any]:
    """Those that the settings ask for: context managers, called after a step as an observer is."""
    config = state.config
    if config.train.on_bad_step == "stop":
        yield StopAtBadStep(train_step, group)
    if config.track and state.world.rank == 0:
        yield Tracking(config, directory, state.step)
    if config.compile.mode != "none":
        yield CompileCache(directory / "compile_cache", config.compile, state.world)
        yield ShelteredCompilers()
    if config.profile.every:
        yield Profiler(config.profile, directory / "traces", state)


@contextlib.contextmanager
def garbage_collected_by_hand() -> Iterator[None]:
    """Keep Python's cycle collector from stopping one rank, and with it all, at a random moment.

    Almost all that a step drops is freed by counting references; the journal collects the few
    cycles (of activation checkpointing, of saves) at log steps, where the host waits anyway.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
