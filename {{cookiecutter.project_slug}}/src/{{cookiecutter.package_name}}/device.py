"""The device of this process: choosing it, setting torch up, copies to it, names in its traces."""

import contextlib
import os
from typing import Any

import torch
from torch.profiler import record_function

from .errors import UserError


def pick_device(name: str) -> torch.device:
    """Resolve "auto", "cpu", "cuda", "cuda:1", "mps" for this process; UserError if not there."""
    available = {"cpu": True, "cuda": torch.cuda.is_available()}
    available["mps"] = torch.backends.mps.is_available() and "RANK" not in os.environ  # no gloo
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: not a device; try auto, cpu or cuda") from None
    if not available.get(device.type, False):
        raise UserError(f"--device {name}: there is no such device here; try --device auto")
    if device.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
        if index >= (count := torch.cuda.device_count()):
            ways_out = "start fewer processes on this machine, or use --device cpu"
            raise UserError(f"there is no GPU {index} among the {count} here: {ways_out}")
        device = torch.device("cuda", index)
    return device


def set_up_torch(seed: int, deterministic: bool, compute_dtype: torch.dtype) -> None:
    """Seed what builds the model; choose kernels."""
    torch.manual_seed(seed % 2**63)
    # Products of float32 that are left: TF32 where a GPU has it, bfloat16 where all others are.
    torch.set_float32_matmul_precision("high" if compute_dtype == torch.float32 else "medium")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def annotated(name: str) -> contextlib.AbstractContextManager:
    """Name what runs inside in a trace; free without a profiler (a name costs microseconds)."""
    return record_function(name) if torch.autograd._profiler_enabled() else contextlib.nullcontext()


def move(batch: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch (nested dicts, lists, tuples) to a device, without waiting."""
    if device.type == "cpu":
        return batch  # it was made there
    if isinstance(batch, torch.Tensor):
        if device.type == "cuda" and not batch.is_pinned():
            batch = batch.pin_memory()  # else the host would wait for the copy
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [move(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
