"""Host memory and time that the ranks of one machine need to begin, under FSDP.

python -m benchmarks.sharded_start [--smoke]

How much memory each rank takes at most while `setup` builds a model of 302 million parameters
(1.2 GB), and the seconds of the slowest rank. As rendered, only rank 0 builds the whole model; with
*whole on each rank*, each does, which is how FSDP usually starts.

*From files* is a start with --init-from of a .safetensors: as rendered, no rank builds the values
that it reads; with *values built first*, the run starts as without --init-from, then reads the
file. Memory is what a process does not share with others: pages of the mapped file do not count.
All figures are of a CPU, where a rank's shards stay in host memory, too.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .common import PACKAGE, ROOT, benchmark, beside_own_packages, render, series

SIZES = {False: (6, 2048), True: (2, 64)}  # layers and width
WAYS = (
    "as rendered",
    "whole on each rank",
    "from files, as rendered",
    "from files, values built first",
)


class Peak(threading.Thread):
    """Watches the memory of this process alone, without what is mapped from files (Linux)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.now()
        self.most = self.before

    @staticmethod
    def now() -> int:
        """Bytes of memory that belong to this process."""
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    def run(self) -> None:
        """Look again and again."""
        while True:
            self.most = max(self.most, self.now())
            time.sleep(0.002)


def as_rank(folder: Path, way: str, smoke: bool) -> None:
    """Set up a run on one rank, and write what that took."""
    train = importlib.import_module(f"{PACKAGE}.train")
    config = importlib.import_module(f"{PACKAGE}.config")
    layers, width = SIZES[smoke]
    changes = {"device": "cpu", "model.layers": layers, "model.width": width}
    changes["optim.name"] = "adamw"
    changes["model.heads"] = width // 32
    from_files = way.startswith("from files")
    if from_files:
        changes["init_from"] = folder / "base.safetensors"
    settings = config.override(config.Config(), changes)
    world = train.join(settings.parallel, "cpu")
    if way == "whole on each rank":
        train.parallel.build = lambda make, world: make()
    peak, began = Peak(), time.perf_counter()
    peak.start()
    state = train.setup(settings, world, way == "from files, as rendered")
    if from_files:
        transfer = importlib.import_module(f"{PACKAGE}.checkpoint.transfer")
        group = importlib.import_module(f"{PACKAGE}.distributed").Group(world)
        transfer.load_weights(settings.init_from, state.model, None, group)
    seconds = time.perf_counter() - began
    peak.most = max(peak.most, peak.now())
    found = (peak.most - peak.before) / 1e6, seconds
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


def write_base(folder: Path, source: Path, smoke: bool) -> None:
    """Write the weights of such a model to a file, in a process of its own."""
    layers, width = SIZES[smoke]
    code = (
        "from safetensors.torch import save_file\n"
        f"from {PACKAGE}.config import Config, override\n"
        f"from {PACKAGE}.train import setup\n"
        f"sizes = {{'model.layers': {layers}, 'model.width': {width}}}\n"
        f"sizes |= {{'model.heads': {width // 32}, 'device': 'cpu'}}\n"
        "state = setup(override(Config(), sizes))\n"
        f"save_file(state.model.state_dict(), {str(folder / 'base.safetensors')!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": beside_own_packages(source)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """Start after start, the ways in turns."""
    source, found = render(folder, parallelism="fsdp"), dict[str, list[float]]()
    write_base(folder, source, smoke)
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
