"""Floating-point operations: what a model takes, and what a device could do at most."""

import copy
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..device import move, pick_device

# Dense bf16 tensor-core peaks in FLOP/s, from the makers' data sheets, by words of the device name.
PEAK_BF16_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A6000": 155e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def forward_flops(model: nn.Module, compute: Any, batch: Any) -> int | None:
    """FLOPs of the forward of one batch, by torch's own counter; backward takes twice as many.

    Counted on meta tensors: nothing is computed and the model is untouched. None when the model
    cannot run on them.
    """
    try:
        tensors = [*model.parameters(), *model.buffers()]
        shadow = copy.deepcopy(model, memo={id(t): t.detach().to("meta") for t in tensors})
        batch = move(batch, torch.device("meta"))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            compute(shadow, batch)
    except Exception:
        return None
    return counter.get_total_flops()


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of a CUDA device by its name, None if the table does not have it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # Whole words: an RTX A1000 is no A100.
    named = (peak for key, peak in PEAK_BF16_FLOPS.items() if re.search(rf"\b{key}\b", name))
    return next(named, None)


def cpu_peak_flops(size: int = 1024, tries: int = 5) -> float:
    """FLOP/s of this CPU in float32, by the fastest of some matrix products: a practical peak."""
    a = torch.randn(size, size)
    torch.mm(a, a)
    seconds = []
    for _ in range(tries):
        started = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def device_name(device: str) -> str:
    """What a device is called, from its setting: "NVIDIA H100", "cpu", "mps"."""
    kind = pick_device(device)
    return torch.cuda.get_device_name(kind) if kind.type == "cuda" else kind.type


def cpu_name() -> str:
    """What the processor calls itself, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on, which in a container can be fewer than there are."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1
