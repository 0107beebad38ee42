"""Tokens/s and MFU of GPT-2's size on one GPU, eager and compiled, beside nanoGPT's own loop.

The Trainer of transformers and Lightning take part where they are installed (peers.py). All train
the same shape on the same random tokens with the same micro-batch, in turns, each by its own
command. A step's time is that between two of the lines which a program prints, as they arrive: what
a user would wait for. Random tokens cost what others cost, and what is learnt does not matter.
"""

import importlib
import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .common import PACKAGE, ROOT, beside_own_packages, series

CONTEXT, LAYERS, WIDTH, HEADS, VOCABULARY = 1024, 12, 768, 12, 50304
EVERY, WARMUP = 10, 30  # steps between lines; steps that are not counted
NANOGPT_MEMORY = """
import atexit, runpy, sys, torch
def say():
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print("peak", peak, "bytes")
atexit.register(say)
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path("train.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Pace:
    """What a contender takes."""

    seconds: list[float]
    """Of each step, as the mean of ten."""
    peak: int
    """Bytes of the device at the peak; 0 on a CPU."""


def pace_of(command: list[str], folder: Path, pattern: str, **environment: str) -> Pace:
    """From lines that match `pattern` (a step's number) after the warm-up, and "peak N bytes"."""
    seen: list[tuple[int, float]] = []
    peak = 0
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
            if found := re.match(r"peak (\d+) bytes", line):
                peak = int(found[1])
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{''.join(lines[-20:])}")
    counted = [(step, at) for step, at in seen if step >= WARMUP and step % EVERY == 0]
    seconds = [(b - a) / EVERY for (_, a), (_, b) in itertools.pairwise(counted)]
    return Pace(seconds, peak)


def ours(bench: Any, steps: int, batch: int, mode: str) -> Pace:
    """A default render."""
    run_dir = bench.work / f"ours-{mode}-{time.time_ns()}"
    settings = {
        "--run-dir": run_dir,
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
    pace = pace_of(command[1:], bench.work, r"step (\d+)/", PYTHONPATH=path)
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    return Pace(pace.seconds, json.loads(lines[-1]).get("device_peak_bytes", 0))


def peer(bench: Any, steps: int, batch: int, mode: str, name: str) -> Pace:
    """The Trainer of transformers, or Lightning."""
    words = ["-m", "benchmarks.peers", name, mode, str(bench.data), str(steps), str(batch)]
    if bench.smoke:
        words.append("--smoke")
    path = beside_own_packages(ROOT)
    return pace_of(words, bench.work, r"step (\d+)$", PYTHONPATH=path)


def nanogpt(bench: Any, steps: int, batch: int, mode: str) -> Pace:
    """NanoGPT's train.py."""
    clone, data, work = bench.nanogpt.resolve(), bench.data, bench.work
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
        return pace_of(["-c", NANOGPT_MEMORY, *words], clone, r"iter (\d+):")
    finally:
        link.unlink()


def peers() -> list[str]:
    """The peers that are installed; the others are named."""
    needed = {"transformers": ("transformers", "accelerate")}
    needed["lightning"] = ("lightning", "transformers")
    here = []
    for name, packages in needed.items():
        missing = [package for package in packages if not importlib.util.find_spec(package)]
        if missing:
            print(f"{name} is not measured: not installed here: {', '.join(missing)}", flush=True)
        else:
            here.append(name)
    return here


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
    """A round: each contender once.

    Its time over ours with the same mode (eager, or compiled as a whole), tokens/s of its steps,
    the device's memory, and MFU where the peak is known.
    """
    # Five more than are counted, since a run ends with a validation and a save.
    steps, batch, modes = 115, 32, ["full", "blocks", "none"]
    if bench.smoke:
        steps, batch, modes = 55, 8, ["none"]
    contenders: list[tuple[str, str, Callable[..., Pace], tuple[str, ...]]] = []
    for mode in modes:
        contenders.append(("ours", mode, ours, ()))
    for mode in ("none",) if bench.smoke else ("full", "none"):
        if bench.nanogpt:
            contenders.append(("nanoGPT", mode, nanogpt, ()))
        for name in peers():
            contenders.append((name, mode, peer, (name,)))
    sys.path.insert(0, str(bench.source))
    hardware = importlib.import_module(f"{PACKAGE}.run.hardware")
    peak = hardware.peak_flops(torch.device(bench.device))
    tokens = batch * (32 if bench.smoke else CONTEXT)
    flops = tokens * flops_per_token()
    ratios, memory, found = {}, {}, {}
    our_seconds: dict[str, float] = {}
    for name, mode, run, more in contenders:
        pace = run(bench, steps, batch, mode, *more)
        what = f"{name}, {mode}"
        middle = statistics.median(pace.seconds)
        if name == "ours":
            our_seconds[mode] = middle
        ratios[f"{what}: time, of ours"] = series([middle / our_seconds[mode]], "x")
        if pace.peak:
            memory[f"{what}: memory"] = series([pace.peak / 1e9], "GB")
        found[f"{what}: tokens/s"] = series((tokens / s for s in pace.seconds), "tokens/s")
        if peak:
            found[f"{what}: MFU"] = series((100 * flops / s / peak for s in pace.seconds), "%")
    return ratios | memory | found
