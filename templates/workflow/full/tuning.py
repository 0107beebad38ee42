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

from ..adds_up import need_not_add_up
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

# The seconds for timing all micro-batch sizes, and again for timing all numbers of loader workers.
BUDGET = 60.0
# The smallest value that reaches this fraction of the best throughput is the best value, since
# smaller values save memory.
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
    # If the user typed --train.loader-workers, that number is used in any case, so do not try
    # others. In `sys.argv`, the arguments follow the program and the command.
    if waits_for_data and "train.loader_workers" not in typed_settings(sys.argv[2:]):
        faster_steps = try_loader_workers(stage, state, waited)
        if faster_steps:
            print(f"     steps wait for data {waited:.1%} of the time; with recommended workers:")
            steps = faster_steps
        rejected = stage.figures.get("rejected", [])
        if faster_steps or any("loader-workers" in text for text in rejected):
            # More workers are already recommended, or were tried in vain. So do not advise them.
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
    """Recommend and return the best value of a setting if it is faster than `given`, else None.

    The best value is the smallest one that is nearly as fast as the fastest. `seconds` has the
    values as text, each with the seconds per step of its windows. `refused` may give a reason
    against any change. All values that are not recommended, except `given`, are rejected.
    """
    medians = {int(value): np.median(windows) for value, windows in seconds.items()}
    shortest = min(medians.values())
    near_fastest = [value for value in medians if NEAR_BEST * medians[value] <= shortest]
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
    # The reason for stopping before all sizes were tried, as a part of the result.
    why_stopped = ""
    ways: dict[str, Way] = {}
    peaks: dict[int, int] = {}
    memory_is_short = False
    for size in sizes_to_try(given, batch, stage.figures["step_seconds"]["median"]):
        # Smaller sizes come after the given one, and are tried in any case.
        if memory_is_short and size > given:
            break
        plan = micro_batches(batch, size, state.world.rank, state.world.size)
        try:
            way = without_loader(dataclasses.replace(state, plan=plan))
            peaks[size] = peak_of(way, state)
            ways[str(size)] = way
        except Exception as error:
            # The step ran out of memory, or exceeded a limit of a kernel.
            reject(stage, setting, size, first_line(error))
            why_stopped = f"; {stage.figures['rejected'][-1]}"
        # After an error, clean up and stop. This is not inside `except`, since there the traceback
        # would keep the step's tensors alive.
        if str(size) not in ways:
            state.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            break
        # On a CPU, twice this size may need twice the memory, so as much as the peak must be free.
        # Below the given size this is not checked, since twice such a size is known to fit.
        free = free_host_memory()
        if size >= given and state.world.device.type == "cpu" and peaks[size] > free:
            why_stopped = f"; larger sizes not tried: only {in_units(free)} are free"
            memory_is_short = True
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
    if need_not_add_up():
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

    If time does not allow all of them, smaller sizes than `given` are left out first, and then the
    largest sizes. The result is empty if time does not even allow `given`.
    """
    # All sizes, the most important ones first.
    sizes = [given]
    size = 2 * given
    while size < most:
        sizes.append(size)
        size = 2 * size
    if given < most:
        sizes.append(most)
    sizes += [given // 2, given // 4]
    # The number of sizes for which there is time if each window has only one step.
    in_time = int(BUDGET / (LEAST_WINDOWS * step_seconds))
    # Half and a quarter of a small size may be 0.
    affordable = {size for size in sizes[:in_time] if size > 0}
    smaller = sorted(size for size in affordable if size < given)
    larger = sorted(size for size in affordable if size > given)
    first = [given] if given in affordable else []
    return [*first, *smaller, *larger]


def peak_of(way: Way, state: State) -> int:
    """Take two steps; return their peak bytes: allocated on a GPU, else resident on the host."""
    if state.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(state.world.device)
    else:
        # Writing 5 resets the peak of this process on Linux. Other systems do not have this file.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    way(2)
    return peak_memory(state.world.device)


def try_loader_workers(stage: Stage, state: State, waited: float) -> Steps | None:
    """Recommend the smallest number of loader workers that is nearly as fast as the fastest.

    `waited` is the fraction of time that steps wait for data with the given number. Numbers are
    tried with the recommended micro-batch size, if there is one. Returns steps that were measured
    with the recommended number, or None if no number is faster.
    """
    # A stream, whose size is unknown, has no loader workers. If need be, it prefetches by itself.
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

    def state_with(workers: int) -> State:
        """Return the state with a new loader that has this number of workers."""
        loader = Loader(
            source.dataset, source.order, plan, workers, state.loader.pin, source.augments
        )
        return dataclasses.replace(state, plan=plan, loader=loader)

    ways = {str(given): with_loader(state_with(given))}
    step_seconds = stage.figures["step_seconds"]["median"]
    for count in workers_to_try(given, waited, step_seconds, world.device):
        print(f"     trying {count} loader workers ...", flush=True)
        way = with_loader(state_with(count))
        try:
            way(1)
        except Exception as error:
            # The dataset may not be readable in another process.
            reject(stage, setting, count, first_line(error))
        else:
            ways[str(count)] = way
    if len(ways) < 2:
        return None
    # In a round, each worker delivers one batch. The largest number of workers is a multiple of the
    # others. So if it divides the number of steps of a window, the window has complete rounds for
    # each of these numbers.
    seconds = time_interleaved(ways, multiple=max(int(count) for count in ways))
    best = choose(stage, setting, given, seconds)
    if best is None:
        return None
    tuned = state_with(best)
    with contextlib.closing(tuned.loader):
        # Leave out the first round of steps, in which the workers start.
        record_steps(tuned, best)
        # Measure complete rounds, with one step for each worker.
        rounds = math.ceil(baseline.MEASURED / best)
        return record_steps(tuned, best * rounds)


def workers_to_try(given: int, waited: float, seconds: float, device: torch.device) -> list[int]:
    """Return up to two larger numbers of loader workers than `given`, which may end the wait.

    `waited` is the fraction of time that steps wait for data, and `seconds` the time of a step.
    The largest number is a multiple of the others and of `given`, so that a window of steps can
    have complete rounds of any number of workers.
    """
    # Later runs may have a rank on each GPU of this machine. These ranks share its cores.
    ranks_here = torch.cuda.device_count() if device.type == "cuda" else 1
    # If a step never waited, it would take only the fraction `1 - waited` of its time. Batches must
    # then arrive 1 / (1 - waited) times as fast. This takes 1 / (1 - waited) times as many workers
    # if each has a core: twice as many if steps now wait half of the time.
    start = max(1, given)
    enough = math.ceil(start / max(0.01, 1 - waited))
    # Use at most two workers for each core of a rank, but allow four in any case.
    limit = max(4, 2 * usable_cores() // ranks_here)
    most = min(enough, limit)
    # Each window has at least one step for each worker, and up to three numbers of workers are
    # timed. So this is the largest number for which there is time.
    most_in_time = BUDGET / (3 * LEAST_WINDOWS * seconds)
    counts: list[int] = []
    for power in range(7):
        count = start * 2**power
        if count > most_in_time:
            break
        if count > given:
            counts.append(count)
        if count >= most:
            break
    return counts[-2:]
