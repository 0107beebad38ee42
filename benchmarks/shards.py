"""Token files in thousands: what each rank pays to begin, and to read a sample anywhere in them.

The files are sparse, of a gibibyte each: what is measured is finding, opening and reading them, not
the disk behind. Their names, sizes and a megabyte of probes are all that is read at the start.
"""

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .common import PACKAGE, benchmark, render, series

BATCH, SIZE = 64, 1 << 30  # samples; bytes of a file
GLOBAL_BATCHES = (256, 4096, 65536)
ORDER = "ids of a global batch"


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """Datasets over some number of files, then the order of samples in large global batches."""
    source = render(folder)
    sys.path.insert(0, str(source))
    names = ("data", "config", "sampling")
    data, configuration, sampling = (importlib.import_module(f"{PACKAGE}.{name}") for name in names)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))  # as most systems have it
    batches, rounds = (2, 2) if smoke else (100, 9)
    found: dict[str, dict[str, Any]] = {}
    for files in (100, 1_000) if smoke else (100, 1_000, 10_000):
        place = folder / f"{files} files"
        place.mkdir()
        for number in range(files):
            with open(place / f"train_{number:05}.bin", "wb") as file:
                file.truncate(SIZE)
        changes = {"data.path": place, "data.vocabulary": 50257, "data.context": 1024}
        config = configuration.override(configuration.preset(), changes)
        starts, reads, first = [], [], []
        for round_ in range(rounds):
            began = time.perf_counter()
            training, _, _ = data.build_datasets(config)
            starts.append(time.perf_counter() - began)
            order = sampling.GlobalBatches(len(training), BATCH, seed=round_)
            for kind in (first, reads):  # with no file open, then with some
                began = time.perf_counter()
                for step in range(batches):
                    training.__getitems__(order.ids(step).tolist())
                kind.append((time.perf_counter() - began) / (batches * BATCH) * 1e6)
        name = f"{files:,} files"
        found[f"{name}: to begin"] = series(starts, "s")
        found[f"{name}: a sample, first pass"] = series(first, "us")
        found[f"{name}: a sample, again"] = series(reads, "us")
        held = sum("/train_" in _target(fd) for fd in os.listdir("/proc/self/fd"))
        found[f"{name}: held open"] = series([held], "files")
    for size in GLOBAL_BATCHES:
        order = sampling.GlobalBatches(10**12, size, seed=0)
        times = []
        for step in range(20 if smoke else 500):
            began = time.perf_counter()
            order.ids(step)
            times.append((time.perf_counter() - began) * 1e3)
        each = [float(np.mean(part)) for part in np.array_split(times, rounds)]
        found[f"{ORDER} of {size:,}"] = series(each, "ms")
    return {"settings": {"batch": BATCH, "file_mb": SIZE >> 20}, "series": found}


def table(results: Path) -> dict[str, str]:
    """For the page of scaling: a row for each number of files, and the ids of global batches."""
    result = json.loads((results / "shards.json").read_text("utf-8"))
    middle = {name: entry["median"] for name, entry in result["series"].items()}
    head = "| files of 1 GiB | start, ms | first read of a sample, µs | second read, µs |"
    lines = [head, "|---|---|---|---|"]
    for size in dict.fromkeys(name.split(":")[0] for name in middle if ":" in name):
        cells = (
            size.removesuffix(" files"),
            f"{1e3 * middle[f'{size}: to begin']:,.0f}",
            f"{middle[f'{size}: a sample, first pass']:,.0f}",
            f"{middle[f'{size}: a sample, again']:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    orders = [
        f"{1e3 * value:,.0f} µs for {name.removeprefix(ORDER + ' of ')} samples"
        for name, value in middle.items()
        if name.startswith(ORDER)
    ]
    machine, packages = result["machine"], result["versions"].items()
    lines += [
        "",
        f"Computing the ids of a global batch takes {', '.join(orders)}. (The times per id in "
        "[Benchmarks](../evidence/benchmarks.md#the-order-of-samples) are longer: they include the "
        "conversion to a Python list.)",
        "",
        f"`{result['command']}`, {result['date']}: the files are sparse, so this measures how long "
        f"it takes to find, open and read them, not the disk. {machine['cpu']}, "
        f"{machine['cores']} cores, "
        f"{machine['system']}, {machine['file_system']}, "
        f"[load](../evidence/benchmarks.md#how-to-read-the-tables) {machine['load_before']}. "
        f"{', '.join(f'{name} {version}' for name, version in packages)}.",
    ]
    held = max(value for name, value in middle.items() if name.endswith(": held open"))
    size, seconds = [item for item in middle.items() if item[0].endswith(": to begin")][-1]
    most = {"most_files": size.partition(" ")[0], "most_start": f"{seconds:.1f}"}
    return {"shards": "\n".join(lines), "held": f"{held:.0f}", **most}


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # it was for the listing
        return ""


if __name__ == "__main__":
    benchmark("shards", measure, ("torch", "numpy"))
