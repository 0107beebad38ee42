"""Traces of a few steps by torch.profiler, for Perfetto."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from .device import synchronize
from .files import replacing

log = logging.getLogger(__name__)
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints that it starts and stops
# Each window is written at its end; its warm-up is for the user to choose.
warnings.filterwarnings("ignore", ".*Profiler (clears events|won't be using warmup)")


class Profiler:
    """A callback: traces windows of steps into a directory.

    A window ends at each multiple of `every`, wherever the run was resumed; of its own length, if
    that is more.
    """

    def __init__(self, config: Any, directory: Path, state: Any) -> None:
        self.config, self.directory, self.world = config, directory, state.world
        self.written: list[Path] = []
        self.step, self.window = state.step, config.warmup + config.active
        self.period = max(config.every, self.window)
        wait = self.period - self.window
        action = schedule(wait=wait, warmup=config.warmup, active=config.active)
        kinds = ("CPU", "CUDA") if self.world.device.type == "cuda" else ("CPU",)
        self.profile = profile(
            activities=[getattr(ProfilerActivity, kind) for kind in kinds],
            schedule=lambda _: action(self.step),
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
        left = self.period - 1 - self.step % self.period  # steps of the period after the next one
        if left in (self.config.active - 1, self.period - 1):
            synchronize(self.world.device)  # the traced steps then hold only their own kernels
        if left < self.window or left == self.period - 1:
            self.profile.step()

    def _write(self, finished: profile) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.written.append(self.directory / f"step_{self.step:08d}_rank_{self.world.rank}.json.gz")
        with replacing(self.written[-1]) as temporary:
            finished.export_chrome_trace(str(temporary))
        log.info("trace of %d steps: %s", self.config.active, self.written[-1])
