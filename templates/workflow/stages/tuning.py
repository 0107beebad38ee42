"""What the baseline tries beside the given settings: micro-batch sizes, and loader workers.

All ways of one trial share the model and the optimizer, and take their steps in turns.
"""

import contextlib
import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..config import Config
from ..run.hardware import free_host_memory, in_units, peak_memory, usable_cores
from ..sampling import Loader, shares
from ..train import State
from . import baseline
from .chain import recommend, reject
from .stage import Stage
from .timing import Steps, record_steps
from .turns import TURNS, Way, in_turns, take_steps, times_as_fast

BUDGET = 60.0  # seconds for the micro-batch sizes
NEAR_BEST = 0.97  # of the best throughput: as good, if it takes less memory
WORKERS = (2, 4, 1)  # in the order in which they are tried, as time allows
READ_AHEAD = 2  # micro-batches of each loader worker
MEASURED = 20  # steps


def measure(config: Config) -> int:
    """The baseline, with what it tries; 0 when the gate is passed, 1 when it is not."""
    return baseline.measure(config, tune)


def tune(stage: Stage, state: State, step_seconds: float, waits: bool) -> Steps | None:
    """Try micro-batch sizes, and loader workers if it `waits`; steps with those recommended."""
    try_micro_batches(stage, state, step_seconds)
    return try_loader_workers(stage, state, step_seconds) if waits else None


def with_train(state: State, **changes: int) -> State:
    """The same model and optimizer, going through the data by other settings of `train`."""
    train = dataclasses.replace(state.config.train, **changes)
    config = dataclasses.replace(state.config, train=train)
    world, loader = state.world, state.loader
    plan = shares(train.global_batch_size, train.micro_batch_size, world.rank, world.size)
    data = loader.source
    other = Loader(data.dataset, data.order, plan, train.loader_workers, loader.pin)
    return dataclasses.replace(state, config=config, plan=plan, loader=other)


def try_micro_batches(stage: Stage, state: State, step_seconds: float) -> None:
    """Find the throughput and the peak memory of micro-batch sizes, and recommend one."""
    train, memory = state.config.train, dict[int, int]()
    given = min(train.micro_batch_size, train.global_batch_size)
    ways: dict[str, Way] = {}
    too_large = ""
    for size in sizes_to_try(given, train.global_batch_size, step_seconds):
        way = partial(take_steps, with_train(state, micro_batch_size=size))
        try:
            memory[size] = peak_of(way, state)
        except torch.OutOfMemoryError:
            too_large = f"; {size}: out of memory"
            state.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            reject(stage, "train.micro_batch_size", size, "out of memory")
            break
        ways[str(size)] = way
        free = free_host_memory()
        if state.world.device.type == "cpu" and free is not None and memory[size] > free:
            too_large = f"; more: {in_units(free)} are free"  # twice the size is twice the memory
            break
    if len(ways) < 2:
        return
    seconds = in_turns(ways, state.world.device)
    median = {int(size): float(np.median(each)) for size, each in seconds.items()}
    parts = [
        f"{size}: {train.global_batch_size / median[size]:,.0f} samples/s, {in_units(memory[size])}"
        for size in median
    ]
    stage.check(
        "micro_batch",
        True,
        measured="; ".join(parts) + too_large,
        wanted="measured, with the peak memory",
    )
    best = min(size for size in median if min(median.values()) >= NEAR_BEST * median[size])
    rest = {"median_step_seconds": median, "peak_memory_bytes": memory}
    stage.figures["micro_batch"] = {"best": best, **rest}
    for size in sorted(set(median) - {given}):
        speedup, verdict = times_as_fast(seconds[str(given)], seconds[str(size)])
        if size == best and verdict == "faster":
            recommend(stage, "train.micro_batch_size", size, speedup)
        elif size == best < given and memory[size] < NEAR_BEST * memory[given]:
            saved = f"{in_units(memory[size])} in place of {in_units(memory[given])}"
            stage.advise(f"--train.micro-batch-size {size} is about as fast, with {saved}")
        else:
            reject(stage, "train.micro_batch_size", size, verdict, speedup)


def sizes_to_try(given: int, most: int, step_seconds: float) -> list[int]:
    """Half and a quarter of the given size, then doubled up to the global batch, as time allows."""
    larger = [given << i for i in range(1, most.bit_length()) if given << i < most]
    wanted = [given, *larger, *[most] * (given < most), given // 2, given // 4]
    affordable = int(BUDGET / (TURNS[0] * step_seconds))
    return sorted({size for size in wanted[:affordable] if size})


def peak_of(way: Way, state: State) -> int:
    """Peak bytes in two steps: on a GPU allocated, else resident, with all that Python holds."""
    if state.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(state.world.device)
    else:
        with contextlib.suppress(OSError):  # Linux: start the peak of this process anew
            Path("/proc/self/clear_refs").write_text("5")
    way(2)
    return peak_memory(state.world.device)


def try_loader_workers(stage: Stage, state: State, step_seconds: float) -> Steps | None:
    """Recommend the loader workers that are fastest; steps with them, None if none are faster."""
    given, ahead = state.config.train.loader_workers, READ_AHEAD * max(WORKERS)
    affordable = int(BUDGET / (TURNS[0] * ahead * step_seconds))
    counts = [n for n in WORKERS if n != given and n <= usable_cores()][: max(1, affordable)]
    print(f"     trying loader workers: {', '.join(map(str, counts))} ...", flush=True)
    with contextlib.ExitStack() as stack:
        ways: dict[str, Way] = {}
        for count in (given, *counts):
            way = with_train(state, loader_workers=count)
            stack.callback(way.loader.close)
            ways[str(count)] = partial(take_steps, way)
        seconds = in_turns(ways, state.world.device, untimed=1 + ahead // len(state.plan))
        median = {count: float(np.median(seconds[str(count)])) for count in counts}
        best = min(n for n in counts if min(median.values()) >= NEAR_BEST * median[n])
        for count in counts:
            speedup, verdict = times_as_fast(seconds[str(given)], seconds[str(count)])
            if count == best and verdict == "faster":
                recommend(stage, "train.loader_workers", count, speedup)
            else:
                reject(stage, "train.loader_workers", count, verdict, speedup)
    if "train.loader_workers" not in stage.figures.get("recommended", {}):
        return None
    with contextlib.closing((way := with_train(state, loader_workers=best)).loader):
        take_steps(way, ahead)
        return record_steps(way, MEASURED)
