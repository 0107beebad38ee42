"""Tokens/s and MFU of GPT-2's size on one GPU, eager and compiled, beside nanoGPT's own loop.

python -m benchmarks.gpt2 --nanogpt FOLDER     (a clone of github.com/karpathy/nanoGPT)

Both train the same shape on the same random tokens with the same micro-batch, in turns, each by its
own command. A step's time is that between two of the lines which a program prints, as they arrive:
what a user would wait for. Random tokens cost what others cost, and what is learnt does not matter.
"""

import argparse
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from .common import PACKAGE, RESULTS, machine, render, series, versions

CONTEXT, LAYERS, WIDTH, HEADS, VOCABULARY = 1024, 12, 768, 12, 50304
EVERY, WARMUP = 10, 30  # steps between lines; steps that are not counted


def seconds_per_step(
    command: list[str], folder: Path, pattern: str, **environment: str
) -> list[float]:
    """Of the steps between two lines that match `pattern` (a step's number), after the warm-up."""
    seen: list[tuple[int, float]] = []
    with subprocess.Popen(
        [sys.executable, "-u", *command],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.match(pattern, line):
                seen.append((int(found[1]), time.perf_counter()))
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{''.join(lines[-20:])}")
    counted = [(step, at) for step, at in seen if step >= WARMUP and step % EVERY == 0]
    return [(b - a) / EVERY for (_, a), (_, b) in itertools.pairwise(counted)]


def ours(source: Path, data: Path, work: Path, steps: int, batch: int, mode: str) -> list[float]:
    """Seconds per step of a default render."""
    settings = {
        "--data.path": data,
        "--run-dir": work / f"ours-{mode}-{time.time_ns()}",
        "--train.steps": steps,
        "--train.global-batch-size": batch,
        "--train.micro-batch-size": batch,
        "--train.log-every": EVERY,
        "--train.validate-every": 0,
        "--train.validate-samples": batch,
        "--checkpoint.every": 0,
        "--compile.mode": mode,
    }
    words = [str(word) for pair in settings.items() for word in pair]
    command = ["-m", PACKAGE, "train", "--preset", "gpt2_124m", *words]
    return seconds_per_step(command, work, r"step (\d+)/", PYTHONPATH=str(source))


def nanogpt(clone: Path, data: Path, work: Path, steps: int, batch: int, mode: str) -> list[float]:
    """Seconds per step of nanoGPT's train.py."""
    link = clone / "data" / "random_tokens"
    if not link.exists():
        link.symlink_to(data, target_is_directory=True)
    settings = {
        "dataset": link.name,
        "out_dir": work / "nanogpt",
        "max_iters": steps,
        "batch_size": batch,
        "gradient_accumulation_steps": 1,
        "log_interval": EVERY,
        "eval_interval": 10 * steps,
        "eval_iters": 1,
        "compile": mode != "none",
    }
    words = [f"--{name}={value}" for name, value in settings.items()]
    try:
        return seconds_per_step(["train.py", *words], clone, r"iter (\d+):")
    finally:
        link.unlink()


def main() -> None:
    """Measure, print, write results/gpt2.json."""
    import torch

    parser = argparse.ArgumentParser("python -m benchmarks.gpt2", description=__doc__)
    parser.add_argument("--nanogpt", type=Path, help="a clone to measure beside us")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here: this benchmark means nothing on a CPU")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        work = Path(name)
        source = render(work)
        data = work / "tokens"
        data.mkdir()
        generator = np.random.default_rng(0)
        for part, size in (("train", 20_000_000), ("val", 200_000)):
            generator.integers(0, 50257, size, dtype=np.uint16).tofile(data / f"{part}.bin")
        contenders: dict[str, Any] = {}
        for mode in ("full", "blocks", "none"):
            contenders[f"ours, {mode}"] = (ours, source, mode)
        for mode in ("full", "none") if given.nanogpt else ():
            contenders[f"nanoGPT, {mode}"] = (nanogpt, given.nanogpt.resolve(), mode)
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(given.rounds):
            for name, (run, place, mode) in contenders.items():
                found[name] += run(place, data, work, given.steps, given.micro_batch, mode)
        sys.path.insert(0, str(source))
        peak = importlib.import_module(f"{PACKAGE}.run.hardware").peak_flops(torch.device("cuda"))
    tokens = given.micro_batch * CONTEXT
    # Six FLOPs a weight and token, and the attention's: twelve times layers x width x context.
    weights = 12 * LAYERS * WIDTH**2 + VOCABULARY * WIDTH
    flops = tokens * (6 * weights + 12 * LAYERS * WIDTH * CONTEXT)
    result: dict[str, Any] = {"machine": machine(), "versions": versions("torch", "numpy")}
    result["gpu"] = torch.cuda.get_device_name()
    result["series"] = {}
    for name, seconds in found.items():
        result["series"][f"{name}: tokens/s"] = series((tokens / s for s in seconds), "tokens/s")
        line = f"{name:<20} {result['series'][f'{name}: tokens/s']['median']:>12,.0f} tokens/s"
        if peak:
            mfu = series((100 * flops / s / peak for s in seconds), "%")
            result["series"][f"{name}: MFU"] = mfu
            line += f" {mfu['median']:>6.1f} % MFU"
        print(line)
    (given.out / "gpt2.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
