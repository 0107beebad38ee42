"""Settings that the baseline tries besides the given ones: micro-batch sizes and loader workers."""

import contextlib
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ..distributed import leave
from ..run.hardware import in_units, usable_cores
from ..sampling import Loader, micro_batches
from ..train import State
from . import baseline
from .chain import flag, recommend, typed_settings
from .expected import hold_to, read_expected
from .interleaved import WINDOWS, Way, speedup_of, time_interleaved, with_loader, without_loader
from .processes import free_host_memory
from .stage import Stage, StageConfig
from .timing import Steps, peak_memory, record_steps

BUDGET = 60.0  # seconds for all sizes
# A value with this fraction of the best throughput is as good, if it takes less memory.
NEAR_BEST = 0.97
# Windows of steps that are timed for each value, at least.
LEAST_WINDOWS = WINDOWS[0]


def measure(config: StageConfig) -> int:
    """Measure the baseline and other settings; return 0 when the gate is passed, else 1."""
    expected = read_expected(config.workflow.expect)
    stage = Stage("baseline", config)
    state, steps = baseline.judge_steps(stage)
    if config.workflow.expect:
        hold_to(stage, config.workflow.expect, expected)
    try_micro_batches(stage, state)
    wait = float(steps.waits.mean())
    waited = wait / float(steps.seconds.mean())
    workers = max(2, 2 * config.train.loader_workers)
    advice = f"{baseline.CHEAPER}, or read ahead with --train.loader-workers {workers}"
    slow = waited >= baseline.DATA_WAIT_LIMIT and wait >= baseline.NEGLIGIBLE_WAIT
    # What is typed stays, so the gate must not pass on another number.
    if slow and "train.loader_workers" not in typed_settings(sys.argv[2:]):
        better = try_loader_workers(stage, state, waited)
        if better:
            print(f"     steps wait {waited:.1%} of the time; with the workers recommended:")
            steps = better
        rejected = stage.figures.get("rejected", [])
        if better or any("loader-workers" in text for text in rejected):
            # More workers are recommended, or were tried in vain.
            advice = baseline.CHEAPER
    baseline.judge_waits(stage, steps, advice)
    world = state.world
    # Nothing may refer to the model when the process group ends.
    del state
    leave(world)
    return stage.close()


def reject(stage: Stage, setting: str, value: Any, why: str) -> None:
    """Record a value that was tried and is not recommended, and why."""
    stage.figures.setdefault("rejected", []).append(f"{flag(setting)} {value}: {why}")


def first_line(error: Exception) -> str:
    """Return the first line of an error with its type, cut to 100 characters."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:100]


def choose(
    stage: Stage, setting: str, given: int, seconds: dict[str, list[float]], refused: str = ""
) -> int | None:
    """Recommend the smallest of the fastest values; return it, or None if `given` is as good.

    `seconds` has the seconds per step by value. All other values are recorded as rejected, and the
    best one too where `refused` says why it must not be recommended.
    """
    medians = {int(value): np.median(windows) for value, windows in seconds.items()}
    fastest = min(medians.values())
    best = min(value for value in medians if NEAR_BEST * medians[value] <= fastest)
    chosen = None
    for value in sorted(medians.keys() - {given}):
        speedup, verdict = speedup_of(seconds[str(given)], seconds[str(value)])
        if value == best and verdict == "faster" and not refused:
            recommend(stage, setting, value, speedup)
            chosen = value
            continue
        if verdict == "faster":
            verdict = "faster, but not the best"
        reject(stage, setting, value, f"{refused or verdict}, {speedup} times as fast")
    return chosen


def try_micro_batches(stage: Stage, state: State) -> None:
    """Find the throughput and the peak memory of micro-batch sizes, and recommend one."""
    batch = state.config.train.global_batch_size
    setting = "train.micro_batch_size"
    given = min(state.config.train.micro_batch_size, batch)
    too_large = ""
    ways: dict[str, Way] = {}
    peaks: dict[int, int] = {}
    for size in sizes_to_try(given, batch, stage.figures["step_seconds"]["median"]):
        plan = micro_batches(batch, size, state.world.rank, state.world.size)
        try:
            way = without_loader(dataclasses.replace(state, plan=plan))
            peaks[size] = peak_of(way, state)
            ways[str(size)] = way
        except Exception as error:
            # It is out of memory, or at a limit of a kernel.
            reject(stage, setting, size, first_line(error))
            too_large = f"; {stage.figures['rejected'][-1]}"
        # Outside of `except`, where the traceback would keep the tensors of that step alive.
        if str(size) not in ways:
            state.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            break
        # On a CPU the next size, twice as large, would take up to twice the memory.
        free = free_host_memory()
        if size >= given and state.world.device.type == "cpu" and peaks[size] > free:
            too_large = f"; more: {in_units(free)} are free"
            break
    if len(ways) < 2:
        return
    seconds = time_interleaved(ways)
    median: dict[int, float] = {}
    texts: list[str] = []
    for size in sorted(peaks):
        step = float(np.median(seconds[str(size)]))
        median[size] = step
        texts.append(f"{size}: {batch / step:,.0f} samples/s, {in_units(peaks[size])}")
    measured = "; ".join(texts) + too_large
    wanted = "measured, with the peak memory"
    stage.check("micro_batch", True, measured=measured, wanted=wanted)
    refused = ""
    if any(isinstance(module, _BatchNorm) for module in state.model.modules()):
        refused = "batch statistics change with it"
    best = choose(stage, setting, given, seconds, refused)
    if best is None:
        best = given
    stage.figures["micro_batch"] = {
        "best": best,
        "median_step_seconds": median,
        "peak_memory_bytes": peaks,
    }


def sizes_to_try(given: int, most: int, step_seconds: float) -> list[int]:
    """Return the given size, then a quarter and half of it, then doubled sizes up to `most`.

    Only as many as time allows; larger sizes are preferred to smaller ones.
    """
    sizes = [given]
    size = 2 * given
    while size < most:
        sizes.append(size)
        size = 2 * size
    if given < most:
        sizes.append(most)
    sizes += [given // 2, given // 4]
    in_time = int(BUDGET / (LEAST_WINDOWS * step_seconds))
    affordable = {size for size in sizes[:in_time] if size > 0}
    smaller = sorted(size for size in affordable if size < given)
    larger = sorted(size for size in affordable if size > given)
    first = [given] if given in affordable else []
    return [*first, *smaller, *larger]


def peak_of(way: Way, state: State) -> int:
    """Return the peak bytes in two steps: allocated on a GPU, else resident in this process."""
    if state.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(state.world.device)
    else:
        # This resets the peak on Linux. Other systems have no such file.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    way(2)
    return peak_memory(state.world.device)


def try_loader_workers(stage: Stage, state: State, waited: float) -> Steps | None:
    """Recommend the fewest loader workers that are about the fastest; return steps with them.

    `waited` is the fraction of the time that steps wait for data now. They are tried with the
    micro-batch that is recommended. None if nothing is faster.
    """
    # A stream starts its own workers.
    if state.loader.size is None:
        return None
    train = state.config.train
    source = state.loader.source
    world = state.world
    given = train.loader_workers
    setting = "train.loader_workers"
    size = train.micro_batch_size
    recommended = stage.figures.get("recommended", {})
    if "train.micro_batch_size" in recommended:
        size = recommended["train.micro_batch_size"]["value"]
    plan = micro_batches(train.global_batch_size, size, world.rank, world.size)

    def reading(workers: int) -> State:
        """Return the state with a loader of this many workers."""
        loader = Loader(
            source.dataset, source.order, plan, workers, state.loader.pin, source.augments
        )
        return dataclasses.replace(state, plan=plan, loader=loader)

    ways = {str(given): with_loader(reading(given))}
    step_seconds = stage.figures["step_seconds"]["median"]
    for count in workers_to_try(given, waited, step_seconds, world.device):
        print(f"     trying {count} loader workers ...", flush=True)
        way = with_loader(reading(count))
        try:
            way(1)
        except Exception as error:
            # The dataset may not be readable in another process.
            reject(stage, setting, count, first_line(error))
        else:
            ways[str(count)] = way
    if len(ways) < 2:
        return None
    # The largest number is a multiple of the others, so each window has whole rounds of workers.
    seconds = time_interleaved(ways, multiple=max(int(count) for count in ways))
    best = choose(stage, setting, given, seconds)
    if best is None:
        return None
    state = reading(best)
    with contextlib.closing(state.loader):
        # The first round starts the workers.
        record_steps(state, best)
        return record_steps(state, best * math.ceil(baseline.MEASURED / best))


def workers_to_try(given: int, waited: float, seconds: float, device: torch.device) -> list[int]:
    """Return two numbers of loader workers above the given one that may end the wait.

    Fewer if steps of so many `seconds` would take too long. Of these numbers and the given one, the
    largest is a multiple of each: see `with_loader`.
    """
    ranks_here = torch.cuda.device_count() if device.type == "cuda" else 1
    # If each worker has a core.
    enough = math.ceil(max(1, given) / max(0.01, 1 - waited))
    most = min(enough, max(4, 2 * usable_cores() // ranks_here))
    # Steps that fit into a window.
    longest = BUDGET / (3 * LEAST_WINDOWS * seconds)
    counts: list[int] = []
    for power in range(7):
        count = max(1, given) << power
        if given < count < 2 * most and count <= longest:
            counts.append(count)
    return counts[-2:]
