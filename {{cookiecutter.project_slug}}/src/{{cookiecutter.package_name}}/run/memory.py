"""Memory of a rank: what a run is about to take, told before it starts, and what it has taken."""

import contextlib
import inspect
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..checkpoint.checkpointer import local_part, replicas_of
from ..errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank needs from the first step to the last, whatever the batch."""

    parameters: int
    gradients: int
    optimizer: int
    staging: int  # on the host
    guessed: bool  # the optimizer's part

    def __str__(self) -> str:
        """One line."""
        parts = [
            f"parameters {in_units(self.parameters)}",
            f"gradients {in_units(self.gradients)}",
            f"optimizer {in_units(self.optimizer)}",
        ]
        if self.staging:
            parts.append(f"copies for checkpoints {in_units(self.staging)} on the host")
        return f"expected memory per rank: {', '.join(parts)}; activations come on top"


def expected_memory(model: nn.Module, optimizer: torch.optim.Optimizer, staged_by: int) -> Memory:
    """Work out what a rank needs, from the model as it was placed.

    `staged_by` is the number of ranks that divide the staging of checkpoints (0: none is staged).
    """
    measured = state_per_parameter(optimizer)
    factor = 2.0 if measured is None else measured
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = gradients = state = staging = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        size = local_part(tensor).nbytes
        moments = int(factor * size) if id(tensor) in trained else 0
        parameters += size
        gradients += size if tensor.requires_grad else 0
        state += moments
        if staged_by:
            copies, _ = replicas_of(tensor, 0, staged_by)
            staging += (size + moments) // copies
    return Memory(parameters, gradients, state, staging, measured is None)


def state_per_parameter(optimizer: torch.optim.Optimizer) -> float | None:
    """Bytes that the optimizer keeps for each byte of a parameter, by trying it on a small one.

    None for one that cannot be tried, as it wants more than parameters and options.
    """
    parameter = torch.zeros(64, 64, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    try:
        twin = type(optimizer)([parameter], **options)
        twin.step()
    except Exception:
        return None
    tensors = [v for v in twin.state[parameter].values() if isinstance(v, torch.Tensor) and v.ndim]
    return sum(tensor.nbytes for tensor in tensors) / parameter.nbytes


def check_memory(needed: Memory, device: torch.device) -> None:
    """Say what will be needed; a warning when it is tight, UserError when it cannot fit."""
    log.info("%s", needed)
    advice = (
        "take more ranks and shard the model over them (FSDP; DDP keeps all of it on each), a "
        "smaller model, or an optimizer with less state"
    )
    on_device = needed.gradients + needed.optimizer  # the parameters are there already
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    checks = [("the host", ranks * needed.staging, free_host_memory())]
    if device.type == "cuda":
        checks.append((torch.cuda.get_device_name(device), on_device, free_on_gpu(device)))
    elif device.type == "cpu":
        checks = [("this machine", ranks * (needed.staging + on_device), free_host_memory())]
    for where, wanted, free in checks:
        if free is None:
            continue
        text = f"{where} has {in_units(free)} free, and this run needs {in_units(wanted)} more"
        if wanted > free and not needed.guessed:
            raise UserError(f"{text} before the first activation. {needed}. To fit, {advice}")
        if wanted > 0.8 * free:
            log.warning("%s: if it fails, %s", text, advice)


def free_on_gpu(device: torch.device) -> int:
    """Bytes that this process could still allocate on a CUDA device."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def free_host_memory() -> int | None:
    """Bytes of host memory that can be had without swapping; None where the system does not say.

    The least of what the machine has and what the limit of a container leaves.
    """
    free = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0]) << 10)
    group = Path("/sys/fs/cgroup")
    for folder, limit, used, cached in (
        (group, "memory.max", "memory.current", "inactive_file"),
        (group / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, KeyError, ValueError):  # no such limit
            lines = (folder / "memory.stat").read_text().splitlines()
            reclaimable = int(dict(line.split() for line in lines)[cached])
            bounds = (int((folder / name).read_text()) for name in (limit, used))
            free.append(next(bounds) - next(bounds) + reclaimable)
    return min(free, default=None)


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: allocated on a CUDA device, else the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def in_units(size: float) -> str:
    """A number of bytes to be read by people."""
    power = min(4, max(0, len(f"{size:.0f}") - 1) // 3)
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
