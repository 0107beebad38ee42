"""How many steps, and seconds, Muon takes to AdamW's loss: the default language model, three seeds.

AdamW has the rate that was the best of 2e-3, 3e-3, 4e-3, 6e-3 and 9e-3 (seed 0); Muon has its
default. Each schedule ends with its run's last step. The bits per byte are of text that no run
has seen; the seconds are those of the steps.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .common import PACKAGE, benchmark, beside_own_packages, render, series

STEPS = 300
ADAMW = {"optim.name": "adamw", "optim.learning-rate": "4e-3"}
CONTENDERS: dict[str, tuple[float, dict[str, str]]] = {  # part of the steps, settings
    "AdamW": (1.0, ADAMW),
    "Muon, 0.75 of the steps": (0.75, {}),
    "Muon, half of the steps": (0.5, {}),
    "Muon, all steps": (1.0, {}),
}


def train(source: Path, run_dir: Path, settings: dict[str, Any]) -> tuple[float, float]:
    """Bits per byte at the end, and seconds of all steps."""
    settings = {"run-dir": run_dir, "device": "cpu", "train.validate-every": 10**6} | settings
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    outcome = subprocess.run(
        [sys.executable, "-m", PACKAGE, "train", *words],
        env={**os.environ, "PYTHONPATH": beside_own_packages(source)},
        capture_output=True,
        text=True,
    )
    if outcome.returncode:
        sys.exit(outcome.stdout + outcome.stderr)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    starts = [0, *(record["step"] for record in records)]
    lengths = [record["step"] - start for record, start in zip(records, starts, strict=False)]
    seconds = sum(r["step_seconds"] * n for r, n in zip(records, lengths, strict=True))
    return records[-1]["validation_bits_per_byte"], seconds


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """All contenders in turns, seed by seed."""
    source = render(folder, parallelism="single", checkpoint="dcp", tracker="none")
    steps, seeds = (4, 1) if smoke else (STEPS, 3)
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        for name, (part, settings) in CONTENDERS.items():
            more = {"train.seed": seed, "train.steps": int(part * steps), "checkpoint.every": 0}
            run_dir = folder / f"{name}-{seed}"
            found.setdefault(name, []).append(train(source, run_dir, settings | more))
    result = {}
    for name, runs in found.items():
        bits, seconds = zip(*runs, strict=True)
        first = found["AdamW"]
        result[f"{name}: bits per byte"] = series(bits, "bits")
        result[f"{name}: training"] = series(seconds, "s")
        if name != "AdamW":
            more_bits = (bit - other for bit, (other, _) in zip(bits, first, strict=True))
            ratios = (second / other for second, (_, other) in zip(seconds, first, strict=True))
            result[f"{name}: bits per byte over AdamW's"] = series(more_bits, "bits")
            result[f"{name}: training, of AdamW's"] = series(ratios, "x")
    return {"settings": {"steps": steps, "seeds": seeds}, "series": result}


if __name__ == "__main__":
    benchmark("optimizer", measure, ("torch", "numpy"))
