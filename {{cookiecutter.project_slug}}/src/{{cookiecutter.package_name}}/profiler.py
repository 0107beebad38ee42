"""Traces of a few steps by torch.profiler, for Perfetto."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from .device import synchronize
from .errors import UserError
from .files import replacing

log = logging.getLogger(__name__)
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints that it starts and stops


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps to trace: `wait`, `warmup`, then `active` ones, `repeat` times."""

    every: int = 0
    """Steps between traced windows in training (0: never)."""
    wait: int = 2
    warmup: int = 2
    """Warm-up steps, not recorded (the profiler starts slowly)."""
    active: int = 3
    """Steps to trace; more make large files."""
    repeat: int = 1
    shapes: bool = True
    memory: bool = True
    with_stack: bool = False
    """Record Python frames and modules: traces ten times as large."""

    def __post_init__(self) -> None:
        if self.active < 1 or self.repeat < 1 or min(self.wait, self.warmup, self.every) < 0:
            raise UserError("profile: active and repeat must be >= 1, the others >= 0")
        if 0 < self.every < self.warmup + self.active:
            window = f"its window ({self.warmup} + {self.active} steps)"
            raise UserError(f"--profile.every {self.every} is shorter than {window}")


class Profiler:
    """A callback: traces windows of steps into a directory.

    Between windows there is no torch.profiler, and `after_step` compares two integers. With `every`
    a window ends at each of its multiples, wherever the run was resumed.
    """

    def __init__(self, config: ProfileConfig, directory: Path, state: Any) -> None:
        self.config, self.directory = config, directory
        self.world, self.step = state.world, state.step
        self.written: list[Path] = []
        self.profile: profile | None = None
        self.window = config.warmup + config.active
        self.period = config.every or config.wait + self.window
        self.opens = self.step + config.wait
        if config.every:
            self.opens = -(-(self.step + self.window) // self.period) * self.period - self.window

    def __enter__(self) -> "Profiler":
        """Open the first window if it begins with the next step."""
        if self.step == self.opens:
            self._open()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.profile:
            self.profile.on_trace_ready = None
            self.profile.stop()

    def after_step(self, state: Any, record: dict[str, Any] | None = None) -> None:
        """Open a window, or advance in it."""
        self.step = state.step
        if self.step < self.opens:
            return
        if self.profile:
            self._advance(self.profile, self.step - self.opens)
        if not self.profile and self.step == self.opens:
            self._open()

    def _open(self) -> None:
        kinds = ("CPU", "CUDA") if self.world.device.type == "cuda" else ("CPU",)
        warmup, active = self.config.warmup, self.config.active
        self.profile = profile(
            activities=[getattr(ProfilerActivity, kind) for kind in kinds],
            schedule=schedule(wait=0, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=self.config.shapes,
            profile_memory=self.config.memory,
            with_stack=self.config.with_stack,
        )
        synchronize(self.world.device)
        self.profile.start()

    def _advance(self, running: profile, done: int) -> None:
        if done in (self.config.warmup, self.window):
            synchronize(self.world.device)  # the traced steps then hold only their own kernels
        running.step()
        if done == self.window:
            running.stop()
            self.profile = None
            self.opens += self.period

    def _write(self, finished: profile) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"step_{self.step:08d}_rank_{self.world.rank}.json.gz"
        self.written.append(self.directory / name)
        with replacing(self.written[-1]) as temporary:
            finished.export_chrome_trace(str(temporary))
        log.info("trace of %d steps: %s", self.config.active, self.written[-1])
