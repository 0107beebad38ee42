"""Host memory and time that the ranks of one machine need to begin, under FSDP.

python -m benchmarks.sharded_start [--smoke]

What each rank holds at most while `setup` builds a model of 302 million parameters (1.2 GB), beyond
what it held before, and the seconds of the slowest rank. As rendered, only rank 0 builds the whole
model; *whole on each rank* is how FSDP usually begins. All figures are of a CPU, where a rank's
shards stay in host memory, too.
"""

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .common import PACKAGE, ROOT, benchmark, beside_own_packages, render, series

SIZES = {False: (6, 2048), True: (2, 64)}  # layers and width
WAYS = ("as rendered", "whole on each rank")


def resident() -> int:
    """The most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def as_rank(folder: Path, way: str, smoke: bool) -> None:
    """Set up a run on one rank, and write what that took."""
    train = importlib.import_module(f"{PACKAGE}.train")
    config = importlib.import_module(f"{PACKAGE}.config")
    layers, width = SIZES[smoke]
    changes = {"device": "cpu", "model.layers": layers, "model.width": width}
    changes["model.heads"] = width // 32
    settings = config.override(config.Config(), changes)
    world = train.join(settings.parallel, "cpu")
    if way != WAYS[0]:
        train.parallel.build = lambda make, world: make()
    before, began = resident(), time.perf_counter()
    train.setup(settings, world)
    found = (resident() - before) / 1e6, time.perf_counter() - began
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    train.leave(world)


def start(folder: Path, source: Path, ranks: int, way: str, smoke: bool) -> Any:
    """The megabytes of each rank of one start, and the seconds of each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "benchmarks.sharded_start"]
    command += ["--as-rank", str(folder), "--way", way, *["--smoke"] * smoke]
    paths = os.pathsep.join([str(ROOT), beside_own_packages(source)])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return zip(*found, strict=True)


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """Start after start, the ways in turns."""
    source, found = render(folder, parallelism="fsdp"), dict[str, list[float]]()
    for _ in range(1 if smoke else 3):
        for ranks in (2,) if smoke else (1, 2, 4):
            for way in WAYS:
                each, seconds = start(folder, source, ranks, way, smoke)
                label = f"{ranks} rank{'s' * (ranks > 1)}, {way}"
                found.setdefault(f"{label}: together", []).append(sum(each))
                if ranks > 1:
                    found.setdefault(f"{label}: the largest", []).append(max(each))
                found.setdefault(f"{label}: seconds", []).append(max(seconds))
    return {
        "settings": {"layers": SIZES[smoke][0], "width": SIZES[smoke][1]},
        "series": {
            name: series(values, "s" if name.endswith("seconds") else "MB")
            for name, values in found.items()
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--as-rank", type=Path)
    parser.add_argument("--way")
    given, rest = parser.parse_known_args()
    if given.as_rank:
        as_rank(given.as_rank, given.way, "--smoke" in rest)
    else:
        benchmark("sharded_start", measure, ("torch",))
