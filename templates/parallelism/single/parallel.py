"""One process, one device."""

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

SHARDED = False  # in place, with hooks on the modules


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is spread: not at all."""


def check_ranks(config: ParallelConfig, ranks: int) -> None:
    """UserError when the work cannot be spread over so many processes."""
    if ranks > 1:
        raise UserError(
            f"{ranks} processes cannot share the work, as this project was rendered for one "
            "(parallelism=single): start it with `python -m`, or render it with ddp or fsdp"
        )


def build(make: Callable[[], nn.Module], world: "World") -> nn.Module:
    """The model that `make` builds."""
    return make()


def wrap(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelConfig,
    world: "World",
    compute_dtype: torch.dtype,
) -> nn.Module:
    """Move the model to its device; returns the module to call."""
    return model.to(world.device)


def warm_up(module: nn.Module, step: Callable[[], object]) -> None:
    """Nothing is summed over processes."""


def forward(compute_loss: Callable[..., Any], state: "State", batch: Any) -> Any:
    """`compute_loss` of a batch: matrix products in the run's dtype, the rest in float32."""
    if state.compute_dtype == torch.float32:
        return compute_loss(state.module, batch)
    with torch.autocast(state.world.device.type, state.compute_dtype):
        return compute_loss(state.module, batch)


def accumulate(state: "State", last: bool) -> contextlib.AbstractContextManager:
    """Context of one micro-batch's forward and backward; `last` of its step or not."""
    return contextlib.nullcontext()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds: all of it."""
    return tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor."""
    return tensor


def shard_like(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Shard a full `source` as `target` is sharded: it is not."""
    return source


def with_local_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Like `tensor`, with `part` in its place."""
    return part


def replicas(tensor: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    """How many processes hold a tensor, and the index of this one among them."""
    return 1, 0


def total_norm(gradients: list[torch.Tensor], world: "World") -> torch.Tensor:
    """2-norm of all gradients together, a scalar on the device."""
    # As torch.nn.utils.get_total_norm, which first sorts by device and dtype for twice the cost.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def divide_work(
    matrices: list[torch.Tensor],
    like: list[torch.Tensor],
    work: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """`work` on the matrices, divided among the processes."""
    return work(matrices)


def all_reduce(tensor: torch.Tensor, world: "World") -> torch.Tensor:
    """Sum over the processes: the tensor itself."""
    return tensor


def agree_on_buffers(running: Any, step: int, world: "World") -> None:
    """No other process has buffers that could differ."""


def require_same(values: dict[str, Any], world: "World") -> None:
    """No other process has values that could differ."""


def compare_loaded(tensors: Iterable[torch.Tensor], world: "World") -> None:
    """No other process has loaded anything."""
