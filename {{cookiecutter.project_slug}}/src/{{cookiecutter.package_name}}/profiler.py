"""Traces of a few steps by torch.profiler, for Perfetto and for `traces`."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from .distributed import World
from .errors import UserError
from .sampling import WAITING

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps to trace: `wait`, `warmup`, then `active` ones, `repeat` times."""

    every: int = 0
    """While training, trace a window every this many steps (0: never)."""
    wait: int = 2
    warmup: int = 2
    """Steps with the profiler on whose events are thrown away (its start-up is slow)."""
    active: int = 3
    """Traced steps; more make a trace heavy."""
    repeat: int = 1
    shapes: bool = True
    memory: bool = True

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if self.active < 1 or self.repeat < 1 or min(self.wait, self.warmup, self.every) < 0:
            raise UserError("profile: active and repeat must be >= 1, the others >= 0")
        if 0 < self.every < self.warmup + self.active:
            raise UserError(
                f"--profile.every {self.every} is shorter than the window it traces "
                f"({self.warmup} + {self.active} steps)"
            )


class Profiler:
    """Traces windows of steps into a directory; call it after each training step.

    torch.profiler exists only while a window is open: between windows a call compares two
    integers, and nothing is registered with torch that could slow an operator down. With `every`
    a window ends at each of its multiples, wherever the run was resumed.
    """

    def __init__(self, config: ProfileConfig, directory: Path, state: Any) -> None:
        self.config, self.directory, self.state = config, directory, state
        self.world: World = state.world
        self.written: list[Path] = []
        self.profile: profile | None = None
        self.window = config.warmup + config.active
        if config.every:
            self.period = config.every
            self.opens = -(-(state.step + self.window) // self.period) * self.period - self.window
        else:
            self.period = config.wait + self.window
            self.opens = state.step + config.wait

    @property
    def steps(self) -> int:
        """Steps that all windows of `profile` take."""
        return self.period * self.config.repeat

    def __enter__(self) -> "Profiler":
        """Open the first window if it begins with the next step."""
        self(self.state)
        return self

    def __exit__(self, *exception: object) -> None:
        """Throw a window away that is half done."""
        if self.profile:
            self.profile.on_trace_ready = None
            self._close()

    def __call__(self, state: Any, record: dict[str, Any] | None = None) -> None:
        """Mark the end of a training step."""
        if state.step < self.opens:
            return
        if self.profile:
            self._step(state.step)
        if not self.profile and state.step == self.opens:
            self._open()

    def _open(self) -> None:
        """Start to warm up, or to trace at once."""
        activities = [ProfilerActivity.CPU]
        if self.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.state.loader.next = record_function(WAITING)(self.state.loader.next)
        self.profile = profile(
            activities=activities,
            schedule=schedule(
                wait=0, warmup=self.config.warmup, active=self.config.active, repeat=1
            ),
            on_trace_ready=self._write,
            record_shapes=self.config.shapes,
            profile_memory=self.config.memory,
        )
        self._wait_for_device()
        self.profile.start()

    def _step(self, step: int) -> None:
        done = step - self.opens
        if done in (self.config.warmup, self.window):
            self._wait_for_device()  # so that the traced steps hold their own kernels and no others
        self.profile.step()
        if done == self.window:
            self._close()
            self.opens += self.period

    def _close(self) -> None:
        self.profile.stop()
        self.profile = None
        del self.state.loader.next  # the annotated one, which hid the method

    def _wait_for_device(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def _write(self, finished: profile) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"step_{self.state.step:08d}_rank_{self.world.rank}.json.gz"
        self.written.append(self.directory / name)
        finished.export_chrome_trace(str(self.written[-1]))
        log.info("trace of %d steps: %s", self.config.active, self.written[-1])


def trace_steps(config: ProfileConfig, directory: Path, state: Any, step: Any) -> list[Path]:
    """Trace steps of a training that was set up, by `step(state, batches)`; the files written."""
    profiler = Profiler(replace(config, every=0), directory, state)
    snapshot = directory / f"memory_rank_{state.world.rank}.pickle"
    with memory_snapshot(snapshot, state.world), profiler:
        for _ in range(profiler.steps):
            step(state, state.loader.next())
            profiler(state)
    return profiler.written


@contextlib.contextmanager
def memory_snapshot(path: Path, world: World) -> Iterator[None]:
    """Record CUDA allocations into `path`, for pytorch.org/memory_viz; nothing on other devices."""
    if world.device.type != "cuda":
        yield
        return
    # Python's stacks alone: those of C++ would slow the traced steps down.
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        yield
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        log.info("memory snapshot: %s", path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
