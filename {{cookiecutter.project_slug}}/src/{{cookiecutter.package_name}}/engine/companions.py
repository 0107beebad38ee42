"""What goes along with a run without being part of its steps: traces, compile caches, a tracker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .compile_cache import CompileCache
from .profiling import Profiler
from .tracking import Tracking


def companions(state: Any, directory: Path) -> Iterator[Any]:
    """Those that the settings ask for: context managers, called after a step as an observer is."""
    config = state.config
    if config.track and state.world.rank == 0:
        yield Tracking(config, directory, state.step)
    if config.compile.mode != "none":
        yield CompileCache(directory / "compile_cache", config.compile, state.world)
    if config.profile.every:
        yield Profiler(config.profile, directory / "traces", state)
