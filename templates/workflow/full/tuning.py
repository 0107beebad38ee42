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
from ..run.hardware import free_host_memory, in_units, peak_memory, usable_cores
from ..sampling import Loader, shares
from ..train import State
from . import baseline
from .chain import flag, recommend, typed_settings
from .expected import hold_to, read_expected
from .interleaved import (
    WINDOWS,
    Interval,
    Way,
    speedup_of,
    time_interleaved,
    with_loader,
    without_loader,
)
from .stage import Stage, StageConfig
from .timing import Steps, record_steps

BUDGET = 60.0  # seconds for all sizes
NEAR_BEST = 0.97  # of the best throughput: as good, if it takes less memory
MEASURED = 40  # steps with the loader workers that are recommended


def measure(config: StageConfig) -> int:
    """The baseline, with what it tries; 0 when the gate is passed, 1 when it is not."""
    file = config.workflow.expect
    expected = read_expected(file)

    stage = Stage("baseline", config)
    state, steps = baseline.judge_steps(stage)
    if file:
        hold_to(stage, file, expected)
    try_micro_batches(stage, state)
    # What is typed stays, so the gate must not pass on another number.
    stays = "train.loader_workers" in typed_settings(sys.argv[2:])
    slow = baseline.waits_too_long(steps) and not stays
    better = try_loader_workers(stage, state, baseline.share_waited(steps)) if slow else None
    workers = 2 * config.train.loader_workers or 2
    advice = f"{baseline.CHEAPER}, or read ahead with --train.loader-workers {workers}"
    if better or any("loader-workers" in text for text in stage.figures.get("rejected", ())):
        advice = baseline.CHEAPER
    baseline.judge_waits(stage, steps, advice, better)
    world = state.world
    del state
    leave(world)
    return stage.close()


def reject(stage: Stage, name: str, value: Any, why: str, factor: Interval | None = None) -> None:
    """Note what was tried and is not handed on, and why."""
    why = "faster, but not the best" if why == "faster" else why
    times = f", {factor} times as fast" if factor else ""
    text = f"{flag(name)} {value}: {why}{times}"
    stage.figures.setdefault("rejected", []).append(text)


def try_micro_batches(stage: Stage, state: State) -> None:
    """Find the throughput and the peak memory of micro-batch sizes, and recommend one."""
    train, peaks, ways = state.config.train, dict[int, int](), dict[str, Way]()
    given, too_large = min(train.micro_batch_size, train.global_batch_size), ""
    a_step = stage.figures["step_seconds"]["median"]
    for size in sizes_to_try(given, train.global_batch_size, a_step):
        plan, why = shares(train.global_batch_size, size, state.world.rank, state.world.size), ""
        try:
            way = without_loader(dataclasses.replace(state, plan=plan))
            peaks[size] = peak_of(way, state)
        except Exception as error:  # out of memory, or a limit of a kernel
            if size == given:
                raise
            why = f"{type(error).__name__}: {error}".partition("\n")[0][:100]
        if why:  # here nothing holds the tensors of the step that failed any more
            reject(stage, "train.micro_batch_size", size, why)
            too_large = f"; {size}: {why}"
            state.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            break
        ways[str(size)] = way
        free = free_host_memory()
        if size >= given and state.world.device.type == "cpu" and free and peaks[size] > free:
            too_large = f"; more: {in_units(free)} are free"  # twice the size is twice the memory
            break
    if len(ways) < 2:
        return
    seconds = time_interleaved(ways)
    median = {int(size): float(np.median(each)) for size, each in seconds.items()}
    rates = {size: train.global_batch_size / median[size] for size in sorted(median)}
    parts = [f"{size}: {rates[size]:,.0f} samples/s, {in_units(peaks[size])}" for size in rates]
    measured, wanted = "; ".join(parts) + too_large, "measured, with the peak memory"
    stage.check("micro_batch", True, measured=measured, wanted=wanted)
    best = min(size for size in rates if rates[size] >= NEAR_BEST * max(rates.values()))
    figures = {"best": best, "median_step_seconds": median, "peak_memory_bytes": peaks}
    stage.figures["micro_batch"] = figures
    alike = not any(isinstance(module, _BatchNorm) for module in state.model.modules())
    for size in sorted(set(median) - {given}):
        speedup, verdict = speedup_of(seconds[str(given)], seconds[str(size)])
        if size == best and verdict == "faster" and alike:
            recommend(stage, "train.micro_batch_size", size, speedup)
        elif size == best < given and peaks[size] < NEAR_BEST * peaks[given]:
            saved = f"{in_units(peaks[size])} in place of {in_units(peaks[given])}"
            stage.advise(f"--train.micro-batch-size {size} is about as fast, with {saved}")
        else:
            why = "batch statistics change with it" if size == best and not alike else verdict
            reject(stage, "train.micro_batch_size", size, why, speedup)


def sizes_to_try(given: int, most: int, step_seconds: float) -> list[int]:
    """The given size first, then half and a quarter, then doubled up to the global batch.

    Only as many as time allows, the larger ones before the smaller.
    """
    larger = [given << i for i in range(1, most.bit_length()) if given << i < most]
    wanted = [given, *larger, *[most] * (given < most), given // 2, given // 4]
    affordable = {n for n in wanted[: int(BUDGET / (WINDOWS[0] * step_seconds))] if n}
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

    counts = workers_to_try(given, waited, stage.figures["step_seconds"]["median"], world.device)
    if not counts:
        return None
    print(f"     trying loader workers: {', '.join(map(str, counts))} ...", flush=True)
    ways = {str(given): with_loader(reading(given))}
    for count in counts:
        way = with_loader(reading(count))
        try:
            way(1)
        except Exception as error:  # what cannot be read in another process
            why = f"{type(error).__name__}: {error}".partition("\n")[0][:100]
            reject(stage, "train.loader_workers", count, why)
        else:
            ways[str(count)] = way
    counts = [count for count in counts if str(count) in ways]
    if not counts:
        return None
    seconds = time_interleaved(ways, multiple=counts[-1])
    median = {count: float(np.median(seconds[str(count)])) for count in counts}
    compared = {n: speedup_of(seconds[str(given)], seconds[str(n)]) for n in counts}
    faster = [count for count in counts if compared[count][1] == "faster"]
    good = [n for n in faster if NEAR_BEST * median[n] <= min(median[it] for it in faster)]
    best = min(good, default=None)
    for count, (speedup, verdict) in compared.items():
        if count == best:
            recommend(stage, "train.loader_workers", count, speedup)
        else:
            reject(stage, "train.loader_workers", count, verdict, speedup)
    if best is None:
        return None
    state = reading(best)
    with contextlib.closing(state.loader):
        record_steps(state, best)
        return record_steps(state, best * math.ceil(MEASURED / best))


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
