"""Train with one process on one device: the same functions as for DDP and FSDP."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UserError

if TYPE_CHECKING:
    from ..train import State
    from . import World

# Whether `wrap` shards the model in place, with hooks on its modules.
SHARDED = False


@dataclass(frozen=True)
class ParallelConfig:
    """Settings of parallelism: there are none with one process."""


def check_ranks(config: ParallelConfig, ranks: int) -> None:
    """Raise UserError if there are several processes."""
    if ranks > 1:
        raise UserError(
            f"there are {ranks} processes, but this project trains with one (parallelism=single): "
            "start it with `python -m`, or create the project with ddp or fsdp"
        )


def reduces_each_micro_batch(config: ParallelConfig) -> bool:
    """Return whether gradients are reduced after each micro-batch instead of once per step."""
    return False


def reshards_after_forward(config: ParallelConfig) -> bool:
    """Return whether a block's weights are gathered in forward and again in backward."""
    return False


def build(make: Callable[[], nn.Module], world: "World") -> nn.Module:
    """Build the model."""
    return make()


def wrap(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelConfig,
    world: "World",
    compute_dtype: torch.dtype,
) -> nn.Module:
    """Move the model to its device; return the module to call."""
    return model.to(world.device)


def warm_up(module: nn.Module, step: Callable[[], object]) -> None:
    """Do nothing, since gradients are not summed over processes."""


def forward(compute_loss: Callable[..., Any], state: "State", batch: Any) -> Any:
    """Compute the loss of a batch, with autocast to the run's dtype."""
    if state.compute_dtype == torch.float32:
        return compute_loss(state.module, batch)
    with torch.autocast(state.world.device.type, state.compute_dtype):
        return compute_loss(state.module, batch)


def accumulate(state: "State", last: bool) -> contextlib.AbstractContextManager:
    """Return an empty context, since gradients are not summed over processes."""
    return contextlib.nullcontext()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a tensor, which is the whole tensor."""
    return tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, which this process holds."""
    return tensor


def shard_like(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the full `source`, since `target` is not sharded."""
    return source


def with_local_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return `part`, since a shard is the whole tensor."""
    return part


def replicas(tensor: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    """Return the number of processes that hold a tensor (one), and this process's index (0)."""
    return 1, 0


def total_norm(gradients: list[torch.Tensor], world: "World") -> torch.Tensor:
    """Compute the 2-norm of all gradients: a scalar on the device."""
    # torch.nn.utils.get_total_norm computes the same, but takes twice as long, since it first
    # groups the gradients by device and dtype.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def divide_work(
    matrices: list[torch.Tensor],
    like: list[torch.Tensor],
    work: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Apply `work` to all matrices in this process."""
    return work(matrices)


def all_reduce(tensor: torch.Tensor, world: "World") -> torch.Tensor:
    """Return the tensor itself, which is its sum over one process."""
    return tensor


def require_gradients(state: "State") -> None:
    """Do nothing, since no other process would wait for a gradient that is missing here."""


def agree_on_buffers(running: Any, step: int, world: "World") -> None:
    """Do nothing, since no other process has buffers that could differ."""


def require_same(values: dict[str, Any], world: "World") -> None:
    """Do nothing, since no other process has values that could differ."""


def compare_loaded(tensors: Iterable[torch.Tensor], world: "World") -> None:
    """Do nothing, since no other process has loaded anything."""
