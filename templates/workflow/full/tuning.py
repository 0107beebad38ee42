"""Search for faster micro-batch sizes and numbers of loader workers, as part of the baseline."""

import contextlib
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ..adds_up import is_declared
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

# Seconds for all sizes together.
BUDGET = 60.0
# A smaller value with this fraction of the best throughput is preferred, to save memory.
NEAR_BEST = 0.97
# The minimum number of timed windows of steps for each value.
LEAST_WINDOWS = WINDOWS[0]


def measure(config: StageConfig) -> int:
    """Measure the baseline and search for faster settings; return 0 if all checks pass, else 1."""
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
    # A typed number of workers stays, so the check must not use another one.
    if slow and "train.loader_workers" not in typed_settings(sys.argv[2:]):
        better = try_loader_workers(stage, state, waited)
        if better:
            print(f"     steps wait for data {waited:.1%} of the time; with recommended workers:")
            steps = better
        rejected = stage.figures.get("rejected", [])
        if better or any("loader-workers" in text for text in rejected):
            # More workers are recommended already, or did not help.
            advice = baseline.CHEAPER
    baseline.judge_waits(stage, steps, advice)
    world = state.world
    # No reference to the model may remain when the process group ends.
    del state
    leave(world)
    return stage.close()


def reject(stage: Stage, setting: str, value: Any, why: str) -> None:
    """Record a value that was tried but is not recommended, with the reason."""
    stage.figures.setdefault("rejected", []).append(f"{flag(setting)} {value}: {why}")


def first_line(error: Exception) -> str:
    """Return an error's type and first line, at most 100 characters."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:100]


def choose(
    stage: Stage, setting: str, given: int, seconds: dict[str, list[float]], refused: str = ""
) -> int | None:
    """Recommend the smallest value within 3 % of the fastest, if it is faster than `given`.

    Returns it, or None. `seconds` has the seconds per step for each value. All other values are
    recorded as rejected, and so is the best one if `refused` gives a reason against it.
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
    """Measure throughput and peak memory of several micro-batch sizes, and recommend one."""
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
            # The step ran out of memory, or exceeded a limit of a kernel.
            reject(stage, setting, size, first_line(error))
            too_large = f"; {stage.figures['rejected'][-1]}"
        # Not inside `except`, where the traceback would keep the step's tensors alive.
        if str(size) not in ways:
            state.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            break
        # On a CPU the next size, twice as large, would need up to twice the memory.
        free = free_host_memory()
        if size >= given and state.world.device.type == "cpu" and peaks[size] > free:
            too_large = f"; larger sizes not tried: only {in_units(free)} are free"
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
        refused = "it changes the batch statistics"
    if is_declared():
        refused = "it changes the loss (ADDS_UP = False in model.py)"
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

    It returns only as many as time allows, and prefers larger sizes.
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
        # This resets the peak on Linux. Other systems do not have this file.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    way(2)
    return peak_memory(state.world.device)


def try_loader_workers(stage: Stage, state: State, waited: float) -> Steps | None:
    """Recommend the smallest number of loader workers that is about the fastest.

    `waited` is the fraction of time that steps wait for data now. Workers are tried with the
    recommended micro-batch size. Returns steps measured with them, or None if nothing is faster.
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
    # The largest number is a multiple of the others, so each window has complete rounds of workers.
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
    """Return up to two numbers of loader workers, above the given one, that may end the wait.

    There are fewer if steps of this many `seconds` would take too long. The largest number is a
    multiple of the others and of the given one: see `with_loader`.
    """
    ranks_here = torch.cuda.device_count() if device.type == "cuda" else 1
    # Enough workers to end the wait, if each has a core.
    enough = math.ceil(max(1, given) / max(0.01, 1 - waited))
    most = min(enough, max(4, 2 * usable_cores() // ranks_here))
    # The number of steps that fit into a window.
    longest = BUDGET / (3 * LEAST_WINDOWS * seconds)
    counts: list[int] = []
    for power in range(7):
        count = max(1, given) << power
        if given < count < 2 * most and count <= longest:
            counts.append(count)
    return counts[-2:]
