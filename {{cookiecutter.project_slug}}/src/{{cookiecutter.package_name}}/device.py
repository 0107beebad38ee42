"""Choose the device, set torch up, copy batches to the device, and annotate traces."""

import contextlib
import copy
import gc
import os
import random
from collections import UserDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from .errors import UserError

# Name of an attribute that marks parameters without values: they are read from the files of
# --init-from later.
READ_LATER = "read_later"


def pick_device(name: str) -> torch.device:
    """Resolve "auto", "cpu", "cuda", "cuda:1" or "mps" for this process.

    Raises UserError if there is no such device.
    """
    # "auto" takes the first kind that is available.
    available = {
        "cuda": torch.cuda.is_available(),
        # Several ranks cannot use MPS, since no backend has collectives for it.
        "mps": torch.backends.mps.is_available() and "RANK" not in os.environ,
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: not a device; try auto, cpu or cuda") from None
    if not available.get(device.type, False):
        raise UserError(f"--device {name}: there is no such device here; try --device auto")
    if device.type == "cuda":
        return pick_gpu(device)
    return device


def pick_gpu(device: torch.device) -> torch.device:
    """Choose this process's GPU: the given one, or that of its rank on this machine.

    Raises UserError if there is no such GPU.
    """
    index = device.index
    advice = "choose another index, or use --device cuda"
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", "0"))
        advice = "start fewer processes on this machine, or use --device cpu"
    elif os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise UserError(
            f"--device {device}: all processes of this machine would share a GPU; use --device cuda"
        )
    count = torch.cuda.device_count()
    if index >= count:
        raise UserError(f"there is no GPU {index} among the {count} here: {advice}")
    return torch.device("cuda", index)


def set_up_torch(deterministic: bool, compute_dtype: torch.dtype) -> None:
    """Set kernel precision and determinism."""
    # This sets how float32 matrix products are computed. "high" allows TF32 on GPUs that have it.
    # "medium" allows bfloat16. It loses no more than the other matrix products do, which are in
    # bfloat16 already if that is `compute_dtype`.
    precision = "high" if compute_dtype == torch.float32 else "medium"
    torch.set_float32_matmul_precision(precision)
    if deterministic:
        # Without a workspace of fixed size, cuBLAS is not deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def annotated(name: str) -> contextlib.AbstractContextManager:
    """Label the block in a profiler trace; without a profiler it costs nothing."""
    # `record_function` takes microseconds even when nothing is recorded.
    if torch.autograd._profiler_enabled():
        return record_function(name)
    return contextlib.nullcontext()


def move(batch: Any, device: torch.device) -> Any:
    """Copy the tensors of a nested batch to a device, without waiting for the copies."""
    if device.type == "cpu":
        # The loader creates batches on the CPU.
        return batch
    if isinstance(batch, torch.Tensor):
        # A copy from pageable memory would block the host.
        if device.type == "cuda" and batch.device.type == "cpu" and not batch.is_pinned():
            batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)
    if type(batch) is dict:
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, dict | UserDict):
        # Fill a copy, which keeps the other attributes of a defaultdict or of transformers'
        # BatchEncoding.
        moved = copy.copy(batch)
        for key, value in batch.items():
            moved[key] = move(value, device)
        return moved
    if callable(getattr(batch, "to", None)):
        return move_object(batch, device)
    if isinstance(batch, list | tuple):
        values = [move(value, device) for value in batch]
        # Named tuples take their fields one by one.
        if hasattr(batch, "_fields"):
            return type(batch)(*values)
        return type(batch)(values)
    if isinstance(batch, Mapping):
        moved = {key: move(value, device) for key, value in batch.items()}
        kind: Any = type(batch)
        try:
            return kind(moved)
        except TypeError:
            # The class takes other arguments. DataLoader's pinning also falls back to a dict.
            return moved
    # Other containers that torch can map over: a deque, or a class that a library has registered.
    if type(batch) in pytree.SUPPORTED_NODES:
        return pytree.tree_map(partial(move, device=device), batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in fields(batch):
            # A field with init=False may have no value yet.
            if hasattr(batch, field.name):
                value = move(getattr(batch, field.name), device)
                # A frozen dataclass does not allow plain assignment.
                object.__setattr__(moved, field.name, value)
        return moved
    return batch


def move_object(batch: Any, device: torch.device) -> Any:
    """Move an object with its own `to` method, such as a graph, tensordict or packed sequence."""
    if device.type == "cuda" and hasattr(batch, "pin_memory"):
        batch = batch.pin_memory()
    try:
        return batch.to(device, non_blocking=True)
    except TypeError:
        # Its `to` may take only a device.
        return batch.to(device)


def random_states() -> tuple[Any, Any, Any]:
    """Return the states of the generators of torch (on the CPU), NumPy and Python."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_random_states(states: tuple[Any, Any, Any]) -> None:
    """Restore the generators to states from `random_states`."""
    of_torch, of_numpy, of_python = states
    torch.set_rng_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def meta_tensors() -> list[torch.Tensor]:
    """Return all tensors on `meta` that Python's garbage collector tracks in this process."""
    # Remove tensors that only reference cycles keep alive.
    gc.collect()
    # isinstance would also read `__class__`, which can fail for a proxy whose object is gone.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_meta]
