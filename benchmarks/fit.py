"""How long `fit` takes, on one core, for a model of 64 billion parameters on 64 ranks.

python -m benchmarks.fit [--smoke]

FSDP, micro-batches of 1, 2 and 4 samples of 4,096 bytes, with and without recomputation. Host
memory is the most that the process had resident: the model alone would take 258 GB.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .common import PACKAGE, benchmark, beside_own_packages, render, series

LARGE = ("--model.layers", "80", "--model.width", "8192", "--model.heads", "64")
LARGE += ("--data.context", "4096", "--train.global-batch-size", "256")
RANKS = ("--ranks", "64", "--device", "H100")


def one_core() -> None:
    """Keep a process to one core, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """Start after start of the command."""
    source = render(folder, parallelism="fsdp", workflow="full")
    tiny = ("--preset", "tiny", "--train.global-batch-size", "64")
    words = [sys.executable, "-m", PACKAGE, "fit", *RANKS, *(tiny if smoke else LARGE)]
    seconds, memory = list[float](), list[float]()
    for _ in range(1 if smoke else 3):
        started = time.perf_counter()
        process = subprocess.Popen(
            words,
            env=os.environ | {"PYTHONPATH": beside_own_packages(source), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            preexec_fn=one_core,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, "nothing fits"
        seconds.append(time.perf_counter() - started)
        memory.append(used.ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6))
    figures = {"seconds": series(seconds, "s"), "host memory": series(memory, "GB")}
    return {"settings": {"ranks": 64}, "series": figures}


if __name__ == "__main__":
    benchmark("fit", measure, ("torch",))
