"""Trace windows of training steps with torch.profiler, to view in Perfetto."""

import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from .device import synchronize
from .files import replacing

if TYPE_CHECKING:
    from .config import ProfileConfig
    from .train import State

log = logging.getLogger(__name__)
# By default, Kineto prints a line whenever it starts and stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
# These warnings do not apply: each window is written when it ends, and the user sets the warm-up.
warnings.filterwarnings("ignore", ".*Profiler (clears events|won't be using warmup)")


class Profiler:
    """Callback that traces windows of steps (warm-up and recorded ones) into a directory.

    A window ends at each multiple of `every`, also in a resumed run. If `every` is shorter than a
    window, one ends at each multiple of the window's length.
    """

    def __init__(self, config: "ProfileConfig", directory: Path, state: "State") -> None:
        self.config = config
        self.directory = directory
        self.world = state.world
        self.step = state.step
        self.written: list[Path] = []
        # The number of steps in a window, and from the end of one window to the end of the next.
        self.window = config.warmup + config.active
        self.period = max(config.every, self.window)
        # Windows begin from step `first` on. A run that is resumed inside a window waits for the
        # next whole one.
        position = state.step % self.period
        self.first = state.step
        if position > self.period - self.window:
            self.first += self.period - position
        self.action = schedule(
            wait=self.period - self.window, warmup=config.warmup, active=config.active
        )
        activities = [ProfilerActivity.CPU]
        if self.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(
            activities=activities,
            schedule=self._action_now,
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )

    def __enter__(self) -> "Profiler":
        self.profile.start()
        return self

    def __exit__(self, *exception: object) -> None:
        # An incomplete window is not written.
        self.profile.on_trace_ready = None
        self.profile.stop()

    def after_step(self, state: "State", record: dict[str, Any] | None = None) -> None:
        """Advance the profiler within a window; between windows it is left alone."""
        self.step = state.step
        # The number of steps that follow the next step in its period: 0 if it is the last one.
        steps_after_next = self.period - 1 - self.step % self.period
        records_from_next = steps_after_next == self.config.active - 1
        window_ended = steps_after_next == self.period - 1
        # Synchronize only where recording begins or ends: then a trace has exactly the kernels of
        # its own steps.
        if records_from_next or window_ended:
            synchronize(self.world.device)
        if steps_after_next < self.window or window_ended:
            self.profile.step()

    def _action_now(self, _: int) -> ProfilerAction:
        """Return the profiler's action for the next step of the run."""
        if self.step < self.first:
            return ProfilerAction.NONE
        # Ignore the profiler's own count, which starts at 0 in each process and lacks the steps
        # between windows.
        return self.action(self.step)

    def _write(self, finished: profile) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"step_{self.step:08d}_rank_{self.world.rank}.json.gz"
        with replacing(path) as temporary:
            finished.export_chrome_trace(str(temporary))
        self.written.append(path)
        log.info("trace of %d steps: %s", self.config.active, path)
