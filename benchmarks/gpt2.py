"""Tokens/s and MFU of GPT-2's size on one GPU, eager and compiled, beside nanoGPT's own loop.

Both train the same shape on the same random tokens with the same micro-batch, in turns, each by its
own command. A step's time is that between two of the lines which a program prints, as they arrive:
what a user would wait for. Random tokens cost what others cost, and what is learnt does not matter.
"""

import importlib
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .common import PACKAGE, beside_own_packages, series

CONTEXT, LAYERS, WIDTH, HEADS, VOCABULARY = 1024, 12, 768, 12, 50304
EVERY, WARMUP = 10, 30  # steps between lines; steps that are not counted


def seconds_per_step(
    command: list[str], folder: Path, pattern: str, **environment: str
) -> list[float]:
    """Between two lines that match `pattern` (a step's number), after the warm-up."""
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
        for line in process.stdout or ():
            lines.append(line)
            if found := re.match(pattern, line):
                seen.append((int(found[1]), time.perf_counter()))
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{''.join(lines[-20:])}")
    counted = [(step, at) for step, at in seen if step >= WARMUP and step % EVERY == 0]
    return [(b - a) / EVERY for (_, a), (_, b) in itertools.pairwise(counted)]


def ours(bench: Any, steps: int, batch: int, mode: str) -> list[float]:
    """Seconds per step of a default render."""
    settings = {
        "--run-dir": bench.work / f"ours-{mode}-{time.time_ns()}",
        "--train.steps": steps,
        "--train.global-batch-size": batch,
        "--train.micro-batch-size": batch,
        "--train.log-every": EVERY,
        "--train.validate-every": 0,
        "--train.validate-samples": batch,
        "--checkpoint.every": 0,
        "--compile.mode": mode,
    }
    command, _ = bench.command("train", *(str(word) for pair in settings.items() for word in pair))
    path = beside_own_packages(bench.source)
    return seconds_per_step(command[1:], bench.work, r"step (\d+)/", PYTHONPATH=path)


def nanogpt(where: tuple[Path, Path, Path], steps: int, batch: int, mode: str) -> list[float]:
    """Seconds per step of nanoGPT's train.py; `where`: its clone, the tokens, and to work in."""
    clone, data, work = where
    link = clone / "data" / "random_tokens"
    if not link.exists():
        link.unlink(missing_ok=True)  # of a run that was killed
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


def random_tokens(folder: Path, vocabulary: int) -> Path:
    """A folder of tokens as both programs read them."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for part, size in (("train", 20_000_000), ("val", 200_000)):
        generator.integers(0, vocabulary - 47, size, dtype=np.uint16).tofile(folder / f"{part}.bin")
    return folder


def flops_per_token() -> int:
    """Six for each weight, and the attention's: twelve times layers x width x context."""
    weights = 12 * LAYERS * WIDTH**2 + VOCABULARY * WIDTH
    return 6 * weights + 12 * LAYERS * WIDTH * CONTEXT


def measure(bench: Any) -> dict[str, dict[str, Any]]:
    """A round: each contender once; tokens/s of its steps, and MFU where the peak is known."""
    # Five more than are counted, since a run ends with a validation and a save.
    steps, batch, modes = 115, 32, ["full", "blocks", "none"]
    if bench.smoke:
        steps, batch, modes = 55, 8, ["none"]
    contenders = {f"ours, {mode}": (ours, bench, mode) for mode in modes}
    if bench.nanogpt:
        clone = (bench.nanogpt.resolve(), bench.data, bench.work)
        for mode in ("full", "none"):
            contenders[f"nanoGPT, {mode}"] = (nanogpt, clone, mode)
    sys.path.insert(0, str(bench.source))
    hardware = importlib.import_module(f"{PACKAGE}.run.hardware")
    peak = hardware.peak_flops(torch.device(bench.device))
    tokens = batch * (32 if bench.smoke else CONTEXT)
    flops = tokens * flops_per_token()
    found = {}
    for name, (run, where, mode) in contenders.items():
        seconds = run(where, steps, batch, mode)
        found[f"{name}: tokens/s"] = series((tokens / s for s in seconds), "tokens/s")
        if peak:
            found[f"{name}: MFU"] = series((100 * flops / s / peak for s in seconds), "%")
    return found
