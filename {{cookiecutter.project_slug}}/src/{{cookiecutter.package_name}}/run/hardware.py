"""Measure the machine: memory, floating-point operations, device names and versions."""

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

# Peak TFLOP/s in bf16 without sparsity, from the makers' data sheets. A key is a part of a device's
# name. The first key that matches counts, so "H100 PCIe" comes before "H100".
# fmt: off
PEAK_BF16_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "L40S": 362, "L40": 181, "L4": 121, "A100": 312, "A10G": 70, "A10": 125, "A6000": 155,
    "RTX 4090": 165, "MI300X": 1307,
}
# fmt: on


def host_memory() -> int:
    """Return the resident bytes of this process and its loader workers, without mapped files."""
    memory = psutil.Process().memory_info()
    # `shared` is the part of `rss` in mapped files. Only Linux reports it.
    resident = memory.rss - getattr(memory, "shared", 0)
    # A forked worker shares most pages with this process; `uss` counts only its own.
    for worker in multiprocessing.active_children():
        # A worker may just have ended.
        with contextlib.suppress(psutil.Error):
            resident += psutil.Process(worker.pid).memory_full_info().uss
    return resident


class GarbageCollection:
    """Callback that collects garbage only at log steps, and only among objects created in the run.

    Python's automatic collection would scan all objects at any moment. That stalls one rank, and
    with it all ranks that wait for this rank.
    """

    def __enter__(self) -> None:
        # The collector never frees frozen objects, so free existing garbage before freezing.
        gc.collect()
        gc.freeze()
        gc.disable()

    def __exit__(self, *exception: object) -> None:
        gc.enable()
        gc.unfreeze()

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Collect the younger generations if the step has a record."""
        if record is not None:
            gc.collect(1)


class MemoryUse:
    """Callback that adds memory use to each log line.

    `host_bytes` includes the `staging_bytes` of a background save.
    """

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Add memory use to the record, if the step has one."""
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
    """Format a number of bytes, for example as "1.23 GB"."""
    units = ("B", "kB", "MB", "GB", "TB")
    # Show a number of at most 3 digits in bytes, of 4 to 6 digits in kilobytes, and so on. Round it
    # first, since 999,999 bytes are 1 MB.
    rounded = float(f"{size:.3g}")
    digits = len(f"{rounded:.0f}")
    power = min((digits - 1) // 3, len(units) - 1)
    return f"{size / 1000**power:.3g} {units[power]}"


def forward_flops(model: nn.Module, compute: Any, batch: Any) -> int | None:
    """Count the FLOPs of the forward of one batch; backward takes twice as many.

    The forward runs on meta tensors, so nothing is computed. Returns None if the model cannot run
    on them.
    """
    # Imported here, since the import takes 0.2 s, and only GPUs with a known peak need the counter.
    from torch.utils.flop_counter import FlopCounterMode

    tensors = [*model.parameters(), *model.buffers()]
    # The user's model may raise anything on meta tensors.
    with contextlib.suppress(Exception), torch.no_grad():
        # With `memo`, deepcopy takes these meta tensors instead of copying the model's tensors.
        shadow = copy.deepcopy(model, memo={id(t): t.detach().to("meta") for t in tensors})
        with FlopCounterMode(display=False) as counter:
            compute(shadow, move(batch, torch.device("meta")))
        return counter.get_total_flops()
    return None


def peak_flops(device: torch.device) -> float | None:
    """Return the peak bf16 FLOP/s of a CUDA device; None if its name is not in the table."""
    name = device_name(device)
    for part, tflops in PEAK_BF16_TFLOPS.items():
        # Match whole words, since an RTX A1000 is not an A100.
        if re.search(rf"\b{part}\b", name):
            return 1e12 * tflops
    return None


def device_name(device: torch.device) -> str:
    """Return the product name of a CUDA device, or the type of any other device."""
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
        # The load average of the last minute.
        "load": round(os.getloadavg()[0], 1),
    }
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return {"machine": machine, "versions": versions}


def cpu_name() -> str:
    """Return the product name of the CPU on Linux, otherwise Python's name for it."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8")
        model = re.search(r"^model name\s*: *(.+)", text, re.MULTILINE)
        if model:
            return model[1].strip()
    return platform.processor() or platform.machine()


def pin_to_numa_node(device: torch.device) -> None:
    """Pin this process to the cores of its GPU's NUMA node (Linux)."""
    # If not all cores are usable, the user or a container has already chosen some.
    if device.type != "cuda" or usable_cores() != os.cpu_count():
        return
    gpu: Any = torch.cuda.get_device_properties(device)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        text = Path("/sys/bus/pci/devices", address, "local_cpulist").read_text("ascii")
        near_cores: set[int] = set()
        # The text is, for example, "0-3,8-11"; a single core has no "-".
        for cores in text.split(","):
            first, _, last = cores.partition("-")
            near_cores |= set(range(int(first), int(last or first) + 1))
        os.sched_setaffinity(0, near_cores)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    # macOS does not have sched_getaffinity.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
