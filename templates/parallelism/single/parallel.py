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

# Whether `wrap` shards the model in place, with hooks on its modules.
SHARDED = False


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


def reduces_each_micro_batch(config: ParallelConfig) -> bool:
    """Return whether the ranks sum gradients after each micro-batch, not once in a step."""
    return False


def reshards_after_forward(config: ParallelConfig) -> bool:
    """Return whether a block's weights are gathered for forward, and again for backward."""
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
    """Do nothing: no gradient is summed over processes."""


def forward(compute_loss: Callable[..., Any], state: "State", batch: Any) -> Any:
    """Compute the loss of a batch: matrix products in the run's dtype, the rest in float32."""
    if state.compute_dtype == torch.float32:
        return compute_loss(state.module, batch)
    with torch.autocast(state.world.device.type, state.compute_dtype):
        return compute_loss(state.module, batch)


def accumulate(state: "State", last: bool) -> contextlib.AbstractContextManager:
    """Wrap a micro-batch's forward and backward: nothing is reduced, in the last one either."""
    return contextlib.nullcontext()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this process holds: all of it."""
    return tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, which this process has."""
    return tensor


def shard_like(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the full `source`, since `target` is not sharded."""
    return source


def with_local_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `tensor`, of which this process holds `part`: all of it."""
    return part


def replicas(tensor: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    """Return how many processes hold a tensor, and the index of this one among them."""
    return 1, 0


def total_norm(gradients: list[torch.Tensor], world: "World") -> torch.Tensor:
    """Compute the 2-norm of all gradients together: a scalar on the device."""
    # As torch.nn.utils.get_total_norm, which first sorts by device and dtype for twice the cost.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def divide_work(
    matrices: list[torch.Tensor],
    like: list[torch.Tensor],
    work: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Do `work` on the matrices, all of them in this process."""
    return work(matrices)


def all_reduce(tensor: torch.Tensor, world: "World") -> torch.Tensor:
    """Return the tensor itself, the sum over one process."""
    return tensor


def require_gradients(state: "State") -> None:
    """Do nothing: no other process would wait for a gradient that is missing here."""


def agree_on_buffers(running: Any, step: int, world: "World") -> None:
    """Do nothing: no other process has buffers that could differ."""


def require_same(values: dict[str, Any], world: "World") -> None:
    """Do nothing: no other process has values that could differ."""


def compare_loaded(tensors: Iterable[torch.Tensor], world: "World") -> None:
    """Do nothing: no other process has loaded anything."""
