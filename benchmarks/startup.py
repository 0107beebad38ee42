"""Seconds to render a project, seconds to its first step, and what installing it brings along.

The first step is timed from the start of the command to the line that reports it, with everything
installed and compiled to bytecode. Packages are counted after a real installation of each into an
empty folder, beside the requirements of lightning-hydra-template (its newest commit, bddbc24 of
2023), with the same torch.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .common import PACKAGE, ROOT, benchmark, beside_own_packages, render, series

LIGHTNING_HYDRA_TEMPLATE = [
    *("torch>=2.0.0", "torchvision>=0.15.0", "lightning>=2.0.0", "torchmetrics>=0.11.4"),
    *("hydra-core==1.3.2", "hydra-colorlog==1.2.0", "hydra-optuna-sweeper==1.2.0"),
    *("rootutils", "pre-commit", "rich", "pytest"),
]


def seconds_of(*arguments: str, **environment: str) -> float:
    """Seconds of a Python process, from its start to its end."""
    command, started = [sys.executable, *arguments], time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment})
    return time.perf_counter() - started


def seconds_to_first_step(source: Path, run_dir: Path, preset: str) -> float:
    """Until a new run reports its first step; it is ended there."""
    command = [sys.executable, "-m", PACKAGE, "train", "--preset", preset, "--device", "cpu"]
    started = time.perf_counter()
    with subprocess.Popen(
        [*command, "--train.log-every", "1", "--run-dir", str(run_dir)],
        env={**os.environ, "PYTHONPATH": beside_own_packages(source)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        line = next((line for line in process.stderr if line.startswith("step 1/")), None)
        seconds = time.perf_counter() - started
        process.send_signal(signal.SIGKILL)
    if line is None:
        sys.exit("the run ended before its first step")
    return seconds


def installation(folder: Path, *wanted: str) -> tuple[int, float]:
    """Packages and megabytes that pip puts into an empty folder for `wanted`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    tested = (ROOT / "constraints.txt").read_text().splitlines()
    same = next(line for line in tested if line.startswith("torch=="))  # not our optuna: too new
    subprocess.run([*command, same, *wanted], check=True)
    sizes = (path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return len(list(folder.glob("*.dist-info"))), sum(sizes) / 1e6


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """Everything, in turns."""
    rounds, preset = (1, "tiny") if smoke else (9, "default")
    project = folder / "project"
    project.mkdir()
    source = render(project)
    if not smoke:
        seconds_to_first_step(source, folder / "runs" / "warm-up", preset)
    cookiecutter = ("-m", "cookiecutter", str(ROOT), "--no-input", "--output-dir")
    own = {"COOKIECUTTER_CONFIG": str(project / "cookiecutter.json")}  # not the user's
    found: dict[str, list[float]] = {}
    for round_ in range(rounds):
        for name, figure in (
            ("import of cookiecutter", seconds_of("-c", "import cookiecutter.main")),
            ("render", seconds_of(*cookiecutter, str(folder / "renders" / str(round_)), **own)),
            ("import of torch", seconds_of("-c", "import torch")),
            ("first step", seconds_to_first_step(source, folder / "runs" / str(round_), preset)),
        ):
            found.setdefault(name, []).append(figure)
    result = {name: series(values, "s") for name, values in found.items()}
    if not smoke:
        for name, wanted in (
            ("ours", [str(source.parent)]),
            ("lightning-hydra-template", LIGHTNING_HYDRA_TEMPLATE),
        ):
            packages, megabytes = installation(folder / f"installed-{name}", *wanted)
            result[f"{name}: packages"] = series([packages], "packages")
            result[f"{name}: size"] = series([megabytes], "MB")
    return {"settings": {"rounds": rounds}, "series": result}


if __name__ == "__main__":
    benchmark("startup", measure, ("torch", "numpy", "tyro", "cookiecutter", "pip"))
