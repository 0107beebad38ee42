"""Traces of a few steps by torch.profiler, for Perfetto."""

import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerAction, ProfilerActivity, profile

from .device import synchronize
from .files import replacing

if TYPE_CHECKING:
    from .config import ProfileConfig

log = logging.getLogger(__name__)
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints that it starts and stops
warnings.filterwarnings("ignore", ".*Profiler clears events")  # each window is written at its end


class Profiler:
    """A callback: traces windows of steps into a directory.

    With `every` a window ends at each of its multiples, wherever the run was resumed.
    """

    def __init__(self, config: "ProfileConfig", directory: Path, state: Any) -> None:
        self.config, self.directory, self.world = config, directory, state.world
        self.written: list[Path] = []
        self.window = config.warmup + config.active
        self.period = config.every or config.wait + self.window
        self.step, self.start = state.step, 0 if config.every else state.step
        kinds = ("CPU", "CUDA") if self.world.device.type == "cuda" else ("CPU",)
        self.profile = profile(
            activities=[getattr(ProfilerActivity, kind) for kind in kinds],
            schedule=self._action,
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )

    def __enter__(self) -> "Profiler":
        self.profile.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.profile.on_trace_ready = None
        self.profile.stop()

    def after_step(self, state: Any, record: dict[str, Any] | None = None) -> None:
        """Go on to the next step of a window; between windows torch's profiler is left alone."""
        self.step = state.step
        left = self._left()
        if left in (self.config.active - 1, self.period - 1):
            synchronize(self.world.device)  # the traced steps then hold only their own kernels
        if left < self.window or left == self.period - 1:
            self.profile.step()

    def _left(self) -> int:
        """Steps that follow the next one in its period, which a window ends."""
        return self.period - 1 - (self.step - self.start) % self.period

    def _action(self, _: int) -> ProfilerAction:
        """What the profiler does in the next step."""
        left = self._left()
        if left < self.config.active:
            return ProfilerAction.RECORD if left else ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if left < self.window else ProfilerAction.NONE

    def _write(self, finished: profile) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.written.append(self.directory / f"step_{self.step:08d}_rank_{self.world.rank}.json.gz")
        with replacing(self.written[-1]) as temporary:
            finished.export_chrome_trace(str(temporary))
        log.info("trace of %d steps: %s", self.config.active, self.written[-1])
