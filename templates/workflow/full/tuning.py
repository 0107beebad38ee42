"""What the baseline tries beside the given settings: micro-batch sizes, and loader workers."""

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
from ..sampling import Loader, shares
from ..train import State
from . import baseline
from .chain import flag, recommend, typed_settings
from .expected import hold_to, read_expected
from .interleaved import WINDOWS, Way, speedup_of, time_interleaved, with_loader, without_loader
from .processes import free_host_memory
from .stage import Stage, StageConfig
from .timing import Steps, peak_memory, record_steps

BUDGET = 60.0  # seconds for all sizes
NEAR_BEST = 0.97  # of the best throughput: as good, if it takes less memory


def measure(config: StageConfig) -> int:
    """The baseline, with what it tries; 0 when the gate is passed, 1 when it is not."""
    expected = read_expected(config.workflow.expect)
    stage = Stage("baseline", config)
    state, steps = baseline.judge_steps(stage)
    if config.workflow.expect:
        hold_to(stage, config.workflow.expect, expected)
    try_micro_batches(stage, state)
    wait, workers = float(steps.waits.mean()), 2 * config.train.loader_workers or 2
    waited = wait / float(steps.seconds.mean())
    advice = f"{baseline.CHEAPER}, or read ahead with --train.loader-workers {workers}"
    slow = waited >= baseline.DATA_WAIT_LIMIT and wait >= baseline.WORTH_A_WORD
    # What is typed stays, so the gate must not pass on another number.
    if slow and "train.loader_workers" not in typed_settings(sys.argv[2:]):
        if better := try_loader_workers(stage, state, waited):
            print(f"     steps wait {waited:.1%} of the time; with the workers recommended:")
            steps = better
        if better or any("loader-workers" in text for text in stage.figures.get("rejected", ())):
            advice = baseline.CHEAPER
    baseline.judge_waits(stage, steps, advice)
    world = state.world
    del state
    leave(world)
    return stage.close()


def reject(stage: Stage, setting: str, value: Any, why: Any) -> None:
    """Note what was tried and is not handed on, and why."""
    if isinstance(why, Exception):
        why = f"{type(why).__name__}: {why}".partition("\n")[0][:100]
    stage.figures.setdefault("rejected", []).append(f"{flag(setting)} {value}: {why}")


def choose(
    stage: Stage, setting: str, given: int, seconds: dict[str, list[float]], refused: str = ""
) -> int | None:
    """Recommend the smallest of the fastest values, and return it, if it beats the given one."""
    # Not if it is `refused`, for that reason. All others are noted as rejected.
    median, chosen = {int(value): np.median(each) for value, each in seconds.items()}, None
    best = min(n for n in median if NEAR_BEST * median[n] <= min(median.values()))
    for value in sorted(median.keys() - {given}):
        speedup, verdict = speedup_of(seconds[str(given)], seconds[str(value)])
        if value == best and verdict == "faster" and not refused:
            recommend(stage, setting, value, speedup)
            chosen = value
        else:
            verdict = "faster, but not the best" if verdict == "faster" else verdict
            reject(stage, setting, value, f"{refused or verdict}, {speedup} times as fast")
    return chosen


def try_micro_batches(stage: Stage, state: State) -> None:
    """Find the throughput and the peak memory of micro-batch sizes, and recommend one."""
    batch, setting, too_large = state.config.train.global_batch_size, "train.micro_batch_size", ""
    given, ways, peaks = min(state.config.train.micro_batch_size, batch), {}, {}
    for size in sizes_to_try(given, batch, stage.figures["step_seconds"]["median"]):
        plan = shares(batch, size, state.world.rank, state.world.size)
        try:
            way = without_loader(dataclasses.replace(state, plan=plan))
            peaks[size] = peak_of(way, state)
            ways[str(size)] = way
        except Exception as error:  # out of memory, or a limit of a kernel
            reject(stage, setting, size, error)
            too_large = f"; {stage.figures['rejected'][-1]}"
        if str(size) not in ways:  # here nothing holds the tensors of that step any more
            state.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            break
        free = free_host_memory()
        if size >= given and state.world.device.type == "cpu" and peaks[size] > free:
            too_large = f"; more: {in_units(free)} are free"  # twice the size is twice the memory
            break
    if len(ways) < 2:
        return
    seconds = time_interleaved(ways)
    median = {size: float(np.median(seconds[str(size)])) for size in sorted(peaks)}
    parts = [f"{n}: {batch / median[n]:,.0f} samples/s, {in_units(peaks[n])}" for n in median]
    measured, wanted = "; ".join(parts) + too_large, "measured, with the peak memory"
    stage.check("micro_batch", True, measured=measured, wanted=wanted)
    statistics = any(isinstance(module, _BatchNorm) for module in state.model.modules())
    refused = "batch statistics change with it" if statistics else ""
    best = choose(stage, setting, given, seconds, refused) or given
    figures = {"best": best, "median_step_seconds": median, "peak_memory_bytes": peaks}
    stage.figures["micro_batch"] = figures


def sizes_to_try(given: int, most: int, step_seconds: float) -> list[int]:
    """The given size first, then half and a quarter, then doubled up to the global batch.

    Only as many as time allows, the larger ones before the smaller.
    """
    larger = [given << i for i in range(1, most.bit_length()) if given << i < most]
    sizes = [given, *larger, *[most] * (given < most), given // 2, given // 4]
    affordable = {n for n in sizes[: int(BUDGET / (WINDOWS[0] * step_seconds))] if n}
    return sorted(affordable, key=lambda size: (size != given, size > given, size))


def peak_of(way: Way, state: State) -> int:
    """Peak bytes in two steps: on a GPU allocated, else resident, with all that Python holds."""
    if state.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(state.world.device)
    else:
        with contextlib.suppress(OSError):  # Linux: start the peak of this process anew
            Path("/proc/self/clear_refs").write_text("5")
    way(2)
    return peak_memory(state.world.device)


def try_loader_workers(stage: Stage, state: State, waited: float) -> Steps | None:
    """Recommend the fewest loader workers that are about the fastest; steps with them.

    `waited` is the share of the time that steps wait for data as it is. They are tried with the
    micro-batch that is recommended. None if nothing is faster.
    """
    if state.loader.size is None:  # a stream, which has workers of its own
        return None
    train, source, world = state.config.train, state.loader.source, state.world
    given, recommended = train.loader_workers, stage.figures.get("recommended", {})
    size = recommended.get("train.micro_batch_size", {"value": train.micro_batch_size})["value"]
    plan = shares(train.global_batch_size, size, world.rank, world.size)

    def reading(workers: int) -> State:
        loader = Loader(source.dataset, source.order, plan, workers, state.loader.pin)
        return dataclasses.replace(state, plan=plan, loader=loader)

    ways, setting = {str(given): with_loader(reading(given))}, "train.loader_workers"
    a_step = stage.figures["step_seconds"]["median"]
    for count in workers_to_try(given, waited, a_step, world.device):
        print(f"     trying {count} loader workers ...", flush=True)
        way = with_loader(reading(count))
        try:
            way(1)
        except Exception as error:  # what cannot be read in another process
            reject(stage, setting, count, error)
        else:
            ways[str(count)] = way
    if len(ways) < 2:
        return None
    seconds = time_interleaved(ways, multiple=max(map(int, ways)))
    if best := choose(stage, setting, given, seconds):
        state = reading(best)
        with contextlib.closing(state.loader):
            record_steps(state, best)
            return record_steps(state, best * math.ceil(baseline.MEASURED / best))
    return None


def workers_to_try(given: int, waited: float, seconds: float, device: torch.device) -> list[int]:
    """Two numbers of loader workers above the given one that may end a wait, as time allows.

    Of the numbers, and the given one, the largest is a multiple: see `with_loader`.
    """
    sharing = torch.cuda.device_count() if device.type == "cuda" else 1  # ranks of this machine
    enough = math.ceil(max(1, given) / max(0.01, 1 - waited))  # if each has a core
    most = min(enough, max(4, 2 * usable_cores() // sharing))
    longest = BUDGET / (3 * WINDOWS[0] * seconds)  # window, in steps of so many seconds
    counts = [max(1, given) << power for power in range(7)]
    return [n for n in counts if given < n < 2 * most and n <= longest][-2:]
