"""How fast a checkpoint is verified (every byte hashed) and restored, on one rank and on two.

The files have just been written, so they are read from memory, not from the disk: what is measured
is what the code costs. Restoring includes verifying. GB/s are of the whole state: with two ranks
each does half, or, of a single file, one does all.
"""

import hashlib
import shutil
import time
from typing import Any

from . import ranks
from .common import series


def work(bench: ranks.Bench, smoke: bool) -> dict[str, Any]:
    """Save once by each answer, then verify and restore in turns."""
    rounds = 2 if smoke else 9
    checkpointers = {name: bench.checkpointer(name) for name in ranks.ANSWERS}
    memory = bytes(bench.bytes // bench.size)
    actions = {"sha256 alone, from memory": lambda: hashlib.sha256(memory)}
    for name, checkpointer in checkpointers.items():
        checkpointer.save(bench.state.step)
        checkpointer.settle()
        actions[f"{name}, verify"] = checkpointer.publisher.newest_good
        actions[f"{name}, verify again"] = checkpointer.publisher.newest_good
        actions[f"{name}, restore"] = checkpointer.restore
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


if __name__ == "__main__":
    ranks.main("restore", work, ("torch", "numpy"))
