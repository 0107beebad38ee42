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

# Seconds for all micro-batch sizes together, and again for all numbers of loader workers.
BUDGET = 60.0
# A smaller value with this fraction of the best throughput is preferred, to save memory.
NEAR_BEST = 0.97
# The minimum number of timed windows of steps for each value.
LEAST_WINDOWS = WINDOWS[0]


def measure(config: StageConfig) -> int:
    """Measure the baseline and search for faster settings; return 1 if a check failed, else 0."""
    expected = read_expected(config.workflow.expect)
    stage = Stage("baseline", config)
    state, steps = baseline.judge_steps(stage)
    if config.workflow.expect:
        hold_to(stage, config.workflow.expect, expected)
    try_micro_batches(stage, state)
    wait = float(steps.waits.mean())
    waited = wait / float(steps.seconds.mean())
    more_workers = max(2, 2 * config.train.loader_workers)
    advice = f"{baseline.CHEAPER}, or read ahead with --train.loader-workers {more_workers}"
    waits_for_data = waited >= baseline.DATA_WAIT_LIMIT and wait >= baseline.NEGLIGIBLE_WAIT
    # A number of workers that the user typed is not changed, so `judge_waits` must not judge
    # another one. The arguments follow the name of the command.
    if waits_for_data and "train.loader_workers" not in typed_settings(sys.argv[2:]):
        faster_steps = try_loader_workers(stage, state, waited)
        if faster_steps:
            print(f"     steps wait for data {waited:.1%} of the time; with recommended workers:")
            steps = faster_steps
        rejected = stage.figures.get("rejected", [])
        if faster_steps or any("loader-workers" in text for text in rejected):
            # More workers are recommended already, or did not help.
            advice = baseline.CHEAPER
    baseline.judge_waits(stage, steps, advice)
    world = state.world
    # The process group must outlive the model, so drop the last reference to the model.
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

    Returns it, or None. `seconds` has, for each value (as text), the seconds per step of each
    window. All other values are recorded as rejected, and so is the best one if `refused` gives a
    reason against it.
    """
    medians = {int(value): np.median(windows) for value, windows in seconds.items()}
    fastest = min(medians.values())
    near_fastest = [value for value in medians if NEAR_BEST * medians[value] <= fastest]
    best = min(near_fastest)
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
    # The reason, if not all sizes could be tried.
    why_stopped = ""
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
            why_stopped = f"; {stage.figures['rejected'][-1]}"
        # Clean up after an error, but not inside `except`: there the traceback would keep the
        # step's tensors alive.
        if str(size) not in ways:
            state.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            break
        # On a CPU, twice the size may need as much memory again, which must be free. Below the
        # given size this is not checked: twice such a size is at most the given one, which fits.
        free = free_host_memory()
        if size >= given and state.world.device.type == "cpu" and peaks[size] > free:
            why_stopped = f"; larger sizes not tried: only {in_units(free)} are free"
            break
    if len(ways) < 2:
        return
    seconds = time_interleaved(ways)
    median_seconds: dict[int, float] = {}
    texts: list[str] = []
    for size in sorted(peaks):
        step = float(np.median(seconds[str(size)]))
        median_seconds[size] = step
        texts.append(f"{size}: {batch / step:,.0f} samples/s, {in_units(peaks[size])}")
    measured = "; ".join(texts) + why_stopped
    wanted = "measured, with the peak memory"
    stage.check("micro_batch", True, measured=measured, wanted=wanted)
    # The reason why a faster size is not recommended.
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
        "median_step_seconds": median_seconds,
        "peak_memory_bytes": peaks,
    }


def sizes_to_try(given: int, most: int, step_seconds: float) -> list[int]:
    """Return the given size, then a quarter and half of it, then doubled sizes up to `most`.

    If time does not allow all of them, smaller sizes are left out first, then the largest.
    """
    # All sizes, the most important first.
    sizes = [given]
    size = 2 * given
    while size < most:
        sizes.append(size)
        size = 2 * size
    if given < most:
        sizes.append(most)
    sizes += [given // 2, given // 4]
    # The number of sizes for which there is time, if each window has a single step.
    in_time = int(BUDGET / (LEAST_WINDOWS * step_seconds))
    # Half and a quarter of a small size may be 0.
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
    tuned = reading(best)
    with contextlib.closing(tuned.loader):
        # The first round starts the workers, so it is not returned.
        record_steps(tuned, best)
        # Measure complete rounds, with one step for each worker.
        rounds = math.ceil(baseline.MEASURED / best)
        return record_steps(tuned, best * rounds)


def workers_to_try(given: int, waited: float, seconds: float, device: torch.device) -> list[int]:
    """Return up to two numbers of loader workers, above the given one, that may end the wait.

    There are fewer if steps of this many `seconds` would take too long. The largest number is a
    multiple of the others and of the given one: see `with_loader`.
    """
    # Later runs may use all GPUs of this machine, whose ranks share its cores.
    ranks_here = torch.cuda.device_count() if device.type == "cuda" else 1
    # Without the wait, a step takes only 1 - waited of its time. To deliver batches at that speed,
    # the number of workers must grow by the inverse, if each has a core.
    start = max(1, given)
    enough = math.ceil(start / max(0.01, 1 - waited))
    # At most two workers for each core, but at least four.
    limit = max(4, 2 * usable_cores() // ranks_here)
    most = min(enough, limit)
    # Each window has at least one step for each worker. This is the most for which there is time,
    # with up to three numbers of workers to compare.
    longest = BUDGET / (3 * LEAST_WINDOWS * seconds)
    counts: list[int] = []
    for power in range(7):
        count = start * 2**power
        # The limit `2 * most` includes the first count that reaches `most`.
        if given < count < 2 * most and count <= longest:
            counts.append(count)
    return counts[-2:]
