"""Samples per second of the default run alone, and beside a busy process on every core.

python -m benchmarks.busy [--smoke]

OpenMP's waiting threads spin, by default for long, and so keep other work off the cores. A render
bounds that (GOMP_SPINCOUNT in its `__main__.py`): *as rendered*. Here it runs with other bounds as
well, in turns, in an environment that says nothing else about it. What the bound costs is the
median of each round's own comparison, since a machine's speed changes from round to round.
"""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .common import PACKAGE, benchmark, beside_own_packages, render, series

OURS, UNBOUND = "as rendered", "without a bound"
VALUES: dict[str, dict[str, str]] = {
    OURS: {},
    UNBOUND: {"GOMP_SPINCOUNT": "300000"},  # libgomp's own
    **{f"GOMP_SPINCOUNT={count}": {"GOMP_SPINCOUNT": count} for count in ("1000", "10000")},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}
OF_OPENMP = re.compile("OMP_|GOMP_|KMP_")
SETTINGS = ("--device", "cpu", "--no-track", "--checkpoint.every", "0", "--train.log-every", "5")
SETTINGS += ("--train.validate-every", "0", "--train.validate-samples", "1")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def speed(source: Path, run_dir: Path, preset: str, steps: int, setting: dict[str, str]) -> float:
    """Samples per second, the median of a run's log lines but the first."""
    words = ("train", "--preset", preset, "--train.steps", str(steps), "--run-dir", str(run_dir))
    plain = {name: value for name, value in os.environ.items() if not OF_OPENMP.match(name)}
    subprocess.run(
        [sys.executable, "-m", PACKAGE, *words, *SETTINGS],
        check=True,
        capture_output=True,
        env=plain | {"PYTHONPATH": beside_own_packages(source)} | setting,
    )
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    return statistics.median([line["samples_per_second"] for line in lines][1:])


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """Run after run, the settings in turns: all of them, then twice those that are compared."""
    rounds, steps, preset = (1, 10, "tiny") if smoke else (9, 60, "default")
    source, found = render(folder), dict[str, list[float]]()
    for round_ in range(rounds):
        everything = round_ % 3 == 0
        names = [*VALUES][: None if everything and not smoke else 2]
        for name in reversed(names) if round_ % 2 else names:
            for beside in (0, cores()) if everything and not (smoke and name == UNBOUND) else (0,):
                run_dir = folder / f"runs/{round_}-{name}-{beside}"
                with busy(beside):
                    figure = speed(source, run_dir, preset, steps, VALUES[name])
                where = "beside others" if beside else "alone"
                found.setdefault(f"{name}, {where}", []).append(figure)
    bound, unbound = (found[f"{name}, alone"] for name in (OURS, UNBOUND))
    slower = (100 * (1 - a / b) for a, b in zip(bound, unbound, strict=True))
    return {
        "settings": {"rounds": rounds, "steps": steps},
        "series": {name: series(values, "samples/s") for name, values in found.items()}
        | {"slower by the bound, alone": series(slower, "%")},
    }


if __name__ == "__main__":
    benchmark("busy", measure, ("torch", "numpy", "tyro"))
