"""What it costs to go to any sample of 10^3 to 10^12, mixed or not, beside DistributedSampler.

A seek, for ours, is: make the order anew, go to the middle of the hundredth epoch, take a batch.
For DistributedSampler: set that epoch, pass over half of it. Then ids are taken batch by batch.
Memory is what the peak of a fresh process grows by: Python's tracer does not see torch's own.
"""

import importlib
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.utils.data import DistributedSampler

from .common import PACKAGE, benchmark, render, series

BATCH, EPOCH = 256, 100
Target = Callable[[int, int, int], tuple[float, float]]


class Numbered:
    """A dataset that has nothing but a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def ours(size: int, position: int, batches: int) -> tuple[float, float]:
    """Seconds of a seek to a position in the stream; seconds an id of the batches that follow."""
    sampling = importlib.import_module(f"{PACKAGE}.sampling")
    return sought(lambda: sampling.GlobalBatches(size, BATCH, seed=0), position, batches)


def mixed(size: int, position: int, batches: int) -> tuple[float, float]:
    """The same of a mixture, seven tenths from one source and three from another."""
    mixture, tenth = importlib.import_module(f"{PACKAGE}.mixture"), size // 10
    sizes, weights = [7 * tenth, 3 * tenth], {"a": 7, "b": 3}
    return sought(lambda: mixture.MixedBatches(sizes, weights, BATCH, seed=0), position, batches)


def sought(make: Callable[[], Any], position: int, batches: int) -> tuple[float, float]:
    """Seconds to make an order and go to a position; seconds an id of the batches that follow."""
    step = position // BATCH
    started = time.perf_counter()
    order = make()
    order.ids(step)
    there = time.perf_counter()
    for following in range(step, step + batches):
        order.ids(following).tolist()
    return there - started, (time.perf_counter() - there) / (batches * BATCH)


def distributed_sampler(size: int, position: int, batches: int) -> tuple[float, float]:
    """The same for DistributedSampler, on one rank."""
    sampler = DistributedSampler(Numbered(size), num_replicas=1, rank=0, seed=0)
    epoch, within = divmod(position, size)
    started = time.perf_counter()
    sampler.set_epoch(epoch)
    ids = iter(sampler)
    for _ in itertools.islice(ids, within):
        pass
    there = time.perf_counter()
    taken = sum(len(list(itertools.islice(ids, BATCH))) for _ in range(batches))
    return there - started, (time.perf_counter() - there) / taken


def contenders(smoke: bool) -> dict[str, tuple[Target, int, int]]:
    """What is measured: how, the number of samples, the position to seek."""
    chosen: dict[str, tuple[Target, int, int]] = {
        "ours, 10^12 samples, to sample 0": (ours, 10**12, 0),
        "ours, 10^12 samples, to sample 0 again": (ours, 10**12, 0),
        "ours, 10^12 samples, to the last million": (ours, 10**12, 10**12 - 10**6),
        "ours, 10^12 samples, to the last sample": (ours, 10**12, 10**12 - 1),
    }
    for name, target, powers in (
        ("ours", ours, (3, 6, 9, 12)),
        ("ours, a mixture", mixed, (3, 6, 9, 12)),
        ("DistributedSampler", distributed_sampler, (3,) if smoke else (3, 6, 7)),
    ):
        for power in powers:
            size = 10**power
            chosen[f"{name}, 10^{power} samples"] = (target, size, EPOCH * size + size // 2)
    return chosen


def growth(target: Target, *arguments: int) -> float:
    """Megabytes by which the peak of a fresh process grows."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_growth, args=(sender, target, *arguments))
    process.start()
    sender.close()  # the process alone has it now: should it die, recv says so
    grown = receiver.recv()
    process.join()
    return grown


def _growth(sender: Connection, target: Target, *arguments: int) -> None:
    target(5000, 0, 1)  # what any first use needs
    before = _peak()
    target(*arguments)
    sender.send((_peak() - before) / 1024)


def _peak() -> int:
    # This program's alone; what getrusage says goes back to before the process became it.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """Ours in turns, then the peer's, whose hundreds of megabytes would be in ours' way."""
    source = render(folder, samples="mixture")
    sys.path.insert(0, str(source))
    batches = 2 if smoke else 256
    many, few = (2, 2) if smoke else (51, 9)
    rounds = {ours: many, mixed: many, distributed_sampler: few}
    chosen = contenders(smoke)
    found: dict[str, list[float]] = {}
    for contender, times in rounds.items():
        turns = [item for item in chosen.items() if item[1][0] is contender]
        for name, (target, size, position) in turns * times:
            seek, each = target(size, position, batches if size > 10**5 else 1)
            found.setdefault(f"{name}: seek", []).append(seek * 1e6)
            found.setdefault(f"{name}: an id", []).append(each * 1e9)
    units = {"seek": "us", "an id": "ns"}
    result = {name: series(values, units[name.split(": ")[1]]) for name, values in found.items()}
    if Path("/proc/self/status").exists():
        for name, arguments in list(chosen.items())[4:][: 1 if smoke else None]:
            grown = (growth(*arguments, batches) for _ in range(1 if smoke else 3))
            result[f"{name}: memory"] = series(grown, "MB")
    return {"settings": {"batch": BATCH, "epoch": EPOCH}, "series": result}


if __name__ == "__main__":
    benchmark("sampler", measure, ("torch", "numpy"))
