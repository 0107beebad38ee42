"""How fast a checkpoint is verified (every byte hashed) and restored, on one rank and on two.

The files have just been written, so they are read from memory, not from the disk: what is measured
is what the code costs. A restore verifies, lets the optimizer allocate its state, then loads;
"load" is that last part alone. GB/s are of the whole state: to verify, two ranks divide it; to
load, each reads all of it that it holds.
"""

import hashlib
import os
import shutil
import time
from functools import partial
from typing import Any

import torch

from . import ranks
from .common import series


def work(bench: ranks.Bench, smoke: bool) -> dict[str, Any]:
    """Save once by each answer, then verify and restore in turns."""
    rounds = 2 if smoke else 9
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // bench.size))  # as launch.sh does
    checkpointers = {name: bench.checkpointer(name) for name in ranks.ANSWERS}
    memory = os.urandom(bench.bytes // bench.size)
    actions = {"sha256 alone, from memory": lambda: hashlib.sha256(memory)}
    for name, checkpointer in checkpointers.items():
        checkpointer.save(bench.state.step)
        checkpointer.settle()
        actions[f"{name}, verify"] = checkpointer.publisher.newest_good
        actions[f"{name}, restore"] = checkpointer.restore
        newest = checkpointer.publisher.newest_good()
        actions[f"{name}, load"] = partial(load, bench, name, checkpointer, *newest)
    bench.calm()
    rates: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            bench.barrier()
            started = time.perf_counter()
            action()
            seconds = bench.largest(time.perf_counter() - started)
            rates[name].append(bench.bytes / seconds / 1e9)
    for checkpointer in checkpointers.values():
        checkpointer.close()
    bench.barrier()
    if bench.rank == 0:
        shutil.rmtree(bench.folder / "runs")
    return {
        "settings": {"rounds": rounds},
        "series": {name: series(values, "GB/s") for name, values in rates.items()},
    }


def load(bench: ranks.Bench, name: str, checkpointer: Any, path: Any, manifest: Any) -> None:
    """Load what is verified into a state that is there."""
    module = bench.part(name, "checkpoint.checkpointer")
    create, module.create_optimizer_state = module.create_optimizer_state, lambda optimizer: None
    try:
        checkpointer.load(path, manifest)
    finally:
        module.create_optimizer_state = create


if __name__ == "__main__":
    ranks.main("restore", work, ("torch", "numpy"))
