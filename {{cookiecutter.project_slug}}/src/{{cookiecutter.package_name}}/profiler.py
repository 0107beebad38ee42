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
# Two warnings that do not apply. The profiler drops a window's events after the window, but
# `_write` has written them by then. And users set the number of warm-up steps themselves.
warnings.filterwarnings("ignore", ".*Profiler (clears events|won't be using warmup)")


class Profiler:
    """Callback that writes traces of windows of steps: `warmup` steps, then `active` recorded ones.

    A window ends at each step that is a multiple of `every`, also in a resumed run. If `every` is
    shorter than a window, windows follow one another without a gap.
    """

    def __init__(self, config: "ProfileConfig", directory: Path, state: "State") -> None:
        self.config = config
        self.directory = directory
        self.world = state.world
        self.step = state.step
        self.written: list[Path] = []
        # The number of steps in a window.
        self.window = config.warmup + config.active
        # The number of steps from the end of one window to the end of the next.
        self.period = max(config.every, self.window)
        # Before step `first`, trace nothing: a run that resumes inside a window waits for the next
        # period, which has a whole window.
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
        # Do not write an incomplete window.
        self.profile.on_trace_ready = None
        self.profile.stop()

    def after_step(self, state: "State", record: dict[str, Any] | None = None) -> None:
        """Advance the profiler within a window; between windows, leave it alone."""
        self.step = state.step
        # How many steps of the period follow the next step: 0 if the next step ends the period.
        steps_after_next = self.period - 1 - self.step % self.period
        records_from_next = steps_after_next == self.config.active - 1
        window_ended = steps_after_next == self.period - 1
        # Synchronize where recording begins and where it ends, so that a trace has exactly the
        # kernels of its own steps.
        if records_from_next or window_ended:
            synchronize(self.world.device)
        if steps_after_next < self.window or window_ended:
            self.profile.step()

    def _action_now(self, _: int) -> ProfilerAction:
        """Return the profiler's action for the next step of the run."""
        if self.step < self.first:
            return ProfilerAction.NONE
        # Use the run's step, not the profiler's own count: that starts at 0 in each process, and
        # leaves out the steps between windows.
        return self.action(self.step)

    def _write(self, finished: profile) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"step_{self.step:08d}_rank_{self.world.rank}.json.gz"
        with replacing(path) as temporary:
            finished.export_chrome_trace(str(temporary))
        self.written.append(path)
        log.info("trace of %d steps: %s", self.config.active, path)
