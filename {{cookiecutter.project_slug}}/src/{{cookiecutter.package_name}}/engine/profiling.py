"""Traces of a few steps by torch.profiler: for Perfetto, and as a table of the top operators."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from . import UserError
from .control import World

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
    """Traces windows of steps into a directory; call it after each training step."""

    def __init__(
        self, config: ProfileConfig, directory: Path, world: World, first_step: int = 0
    ) -> None:
        self.config, self.directory, self.world = config, directory, world
        self.steps_done = first_step
        self.written: list[Path] = []
        self.table = ""
        repeating = config.every > 0
        wait = config.every - config.warmup - config.active if repeating else config.wait
        activities = [ProfilerActivity.CPU]
        if world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(
            activities=activities,
            schedule=schedule(
                wait=wait,
                warmup=config.warmup,
                active=config.active,
                repeat=0 if repeating else config.repeat,
            ),
            on_trace_ready=self._write,
            record_shapes=config.shapes,
            profile_memory=config.memory,
        )

    @property
    def steps(self) -> int:
        """Steps that one run of `profile` takes."""
        one = self.config.wait + self.config.warmup + self.config.active
        return one * self.config.repeat

    def __enter__(self) -> "Profiler":
        """Start."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.profile.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop; a window that is half done is thrown away."""
        self.profile.on_trace_ready = None
        self.profile.stop()

    def __call__(self, state: Any = None, record: dict[str, Any] | None = None) -> None:
        """Mark the end of a training step."""
        self.steps_done += 1
        self.profile.step()

    def _write(self, finished: profile) -> None:
        path = self.directory / f"step_{self.steps_done:08d}_rank_{self.world.rank}.json.gz"
        finished.export_chrome_trace(str(path))
        self.written.append(path)
        key = "self_cpu_time_total"
        if self.world.device.type == "cuda":
            key = "self_device_time_total"
        self.table = finished.key_averages().table(
            sort_by=key, row_limit=12, max_name_column_width=48, header="top operators"
        )
        log.info("trace of steps up to %d: %s", self.steps_done, path)


def trace_steps(config: ProfileConfig, directory: Path, state: Any, step: Any) -> Profiler:
    """Trace steps of a training that was set up, by `step(state, batches)`."""
    profiler = Profiler(replace(config, every=0), directory, state.world)
    with memory_snapshot(directory / "memory.pickle", state.world), profiler:
        for _ in range(profiler.steps):
            step(state, state.loader.next())
            profiler()
    return profiler


@contextlib.contextmanager
def memory_snapshot(path: Path, world: World) -> Iterator[None]:
    """Record CUDA allocations into `path`, for pytorch.org/memory_viz; nothing on other devices."""
    if world.device.type != "cuda":
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
        log.info("memory snapshot: %s", path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
