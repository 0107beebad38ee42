"""The machine: its memory, floating-point operations, names and versions."""

import contextlib
import copy
import gc
import multiprocessing
import os
import platform
import re
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from ..device import move

# Dense bf16 peaks in TFLOP/s, from the makers' data sheets, by words of the device's name.
# fmt: off
PEAK_BF16_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "L40S": 362, "L40": 181, "L4": 121, "A100": 312, "A10G": 70, "A10": 125, "A6000": 155,
    "RTX 4090": 165, "MI300X": 1307,
}
# fmt: on


def host_memory() -> int:
    """Return the bytes in memory of this process and its loader workers, without mapped files."""
    memory = psutil.Process().memory_info()
    resident = memory.rss - getattr(memory, "shared", 0)
    # A forked worker shares most of its pages with this process. `uss` is what it has alone.
    for worker in multiprocessing.active_children():
        # A worker may have ended meanwhile.
        with contextlib.suppress(psutil.Error):
            resident += psutil.Process(worker.pid).memory_full_info().uss
    return resident


class GarbageCollection:
    """A callback: collects garbage at log lines only, and none of what was made before the run.

    Python's own collection looks through all objects at a random moment. That stops one rank, and
    all others that wait for it.
    """

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def __exit__(self, *exception: object) -> None:
        gc.enable()
        gc.unfreeze()

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Collect young garbage, if the step has a log line."""
        if record is not None:
            gc.collect(1)


class MemoryUse:
    """A callback: adds the memory to each log line.

    `host_bytes` includes the `staging_bytes` of a save in the background.
    """

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Add to the log line, if there is one."""
        if record is None:
            return
        device = state.world.device
        if device.type == "cuda":
            record["device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
            record["device_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        staged = state.checkpointer.writer.staged_bytes
        if staged > 0:
            record["staging_bytes"] = staged
        record["host_bytes"] = host_memory()


def in_units(size: float) -> str:
    """Format a number of bytes, as in "1.23 GB"."""
    units = ("B", "kB", "MB", "GB", "TB")
    digits = len(f"{size:.0f}")
    power = min((digits - 1) // 3, len(units) - 1)
    return f"{size / 1000**power:.3g} {units[power]}"


def forward_flops(model: nn.Module, compute: Any, batch: Any) -> int | None:
    """Count the FLOPs of the forward of one batch; backward takes twice as many.

    Counted on meta tensors, so nothing is computed; None when the model cannot run on them.
    """
    # The import takes 0.2 s, so it is not at the top: only a GPU of a known peak needs it.
    from torch.utils.flop_counter import FlopCounterMode

    tensors = [*model.parameters(), *model.buffers()]
    # The user's model may raise anything on meta tensors.
    with contextlib.suppress(Exception), torch.no_grad():
        # deepcopy takes what `memo` has for a tensor in place of a copy of it.
        shadow = copy.deepcopy(model, memo={id(t): t.detach().to("meta") for t in tensors})
        with FlopCounterMode(display=False) as counter:
            compute(shadow, move(batch, torch.device("meta")))
        return counter.get_total_flops()
    return None


def peak_flops(device: torch.device) -> float | None:
    """Return the peak bf16 FLOP/s of a CUDA device by its name; None if it is not in the table."""
    name = device_name(device)
    for word, tflops in PEAK_BF16_TFLOPS.items():
        # As a whole word: an RTX A1000 is no A100.
        if re.search(rf"\b{word}\b", name):
            return 1e12 * tflops
    return None


def device_name(device: torch.device) -> str:
    """Return the maker's name of a CUDA device, the type of any other."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def where_measured(device: torch.device) -> dict[str, Any]:
    """Return the machine and the versions that measurements depend on."""
    machine = {
        "device": device_name(device),
        "gpus": torch.cuda.device_count(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": platform.platform(),
        "load": round(os.getloadavg()[0], 1),
    }
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return {"machine": machine, "versions": versions}


def cpu_name() -> str:
    """Return the maker's name of the CPU on Linux, elsewhere what Python says."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8")
        model = re.search(r"^model name\s*: *(.+)", text, re.MULTILINE)
        if model:
            return model[1].strip()
    return platform.processor() or platform.machine()


def pin_to_numa_node(device: torch.device) -> None:
    """Keep to the cores of a GPU's NUMA node, unless the user has chosen cores (Linux)."""
    # With fewer usable cores than the machine has, the user or a container has chosen some.
    if device.type != "cuda" or usable_cores() != os.cpu_count():
        return
    gpu: Any = torch.cuda.get_device_properties(device)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        name = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        text = Path("/sys/bus/pci/devices", name, "local_cpulist").read_text("ascii")
        near: set[int] = set()
        # The text is like "0-3,8-11".
        for cores in text.split(","):
            first, _, last = cores.partition("-")
            near |= set(range(int(first), int(last or first) + 1))
        os.sched_setaffinity(0, near)


def usable_cores() -> int:
    """Return how many cores this process may use: in a container, perhaps not all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
