"""Data parallel: every rank holds the whole model, gradients are averaged (DDP).

Under torchrun there is a process group; a plain process runs without one, as one rank.
"""

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import RankError, UserError
from .agreement import LOADED, bit_sum
from .agreement import agree_on_buffers as agree_on_buffers
from .agreement import all_reduce as all_reduce
from .agreement import require_same as require_same
from .world import World

if TYPE_CHECKING:
    from ..train import State

# Whether `wrap` shards the model in place, with hooks on its modules.
SHARDED = False


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is spread: data parallel, the model whole on every rank."""

    timeout_minutes: float = 10.0
    """Abort when a step takes longer than this (minutes)."""
    bucket_mb: int = 25
    """Size of the gradient buckets that are all-reduced during backward (MB)."""
    find_unused_parameters: bool = False
    """Allow parameters without a gradient in some steps; each step then searches the graph."""


def check_ranks(config: ParallelConfig, ranks: int) -> None:
    """Accept any number of processes."""


def reduces_each_micro_batch(config: ParallelConfig) -> bool:
    """Return whether the ranks sum gradients after each micro-batch, not once in a step."""
    return False


def reshards_after_forward(config: ParallelConfig) -> bool:
    """Return whether a block's weights are gathered for forward, and again for backward."""
    return False


def build(make: Callable[[], nn.Module], world: World) -> nn.Module:
    """Build the model, on every rank."""
    return make()


class DdpModule(nn.Module):
    """Calls the model, or a function with the model as its first argument; DDP wraps this module.

    So `compute_loss` gets the user's model, not DDP's wrapper, and may call it several times.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Looked up once: `require_gradients` reads them at each step.
        self.trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def forward(self, *given: Any, function: Callable[..., Any] = nn.Module.__call__) -> Any:
        """Return `function(model, *given)`."""
        return function(self.model, *given)


def wrap(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelConfig,
    world: World,
    compute_dtype: torch.dtype,
) -> nn.Module:
    """Move the model to its device and wrap it; return the module to call."""
    model.to(world.device)
    if not world.distributed:
        return model
    inner = DdpModule(model)
    # DDP cannot send sparse buffers. Each rank has built the same ones.
    sparse = [name for name, buffer in inner.named_buffers() if buffer.layout != torch.strided]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, sparse)
    module = DistributedDataParallel(
        inner,
        bucket_cap_mb=config.bucket_mb,
        find_unused_parameters=config.find_unused_parameters,
        gradient_as_bucket_view=True,
    )
    # `agree_on_buffers` does that, once a step and not at each forward.
    module.broadcast_buffers = False
    return module


def warm_up(module: nn.Module, step: Callable[[], object]) -> None:
    """Take a `step` that changes nothing, if the first step would sum gradients in another order.

    After its first backward DDP puts the gradients into other buckets. Of three numbers or more,
    the order in which they are summed depends on their place in a bucket: so without this the first
    step after a resume would not have the bits of the same step in a run that was not interrupted.
    """
    # With --parallel.find-unused-parameters the buckets stay as they are.
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return
    if dist.get_world_size() > 2:
        step()


def forward(compute_loss: Callable[..., Any], state: "State", batch: Any) -> Any:
    """Compute the loss of a batch by the model, inside DDP; matrix products in the run's dtype."""
    autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if state.compute_dtype != torch.float32:
        autocast = torch.autocast(state.world.device.type, state.compute_dtype)
    with autocast:
        if not isinstance(state.module, DistributedDataParallel):
            return compute_loss(state.module, batch)
        try:
            return state.module(batch, function=compute_loss)
        except RuntimeError as error:
            # DDP notices only at the next forward that a parameter got no gradient, and gives its
            # number, not its name.
            unused = re.search(r"not receive grad for rank \d+: (\d+)", str(error))
            if not unused:
                raise
    trained = [name for name, p in state.model.named_parameters() if p.requires_grad]
    raise UserError(
        f"the loss of the last step did not depend on {trained[int(unused[1])]}: remove or freeze "
        "such parameters, or add --parallel.find-unused-parameters"
    )


def accumulate(state: "State", last: bool) -> contextlib.AbstractContextManager:
    """Wrap a micro-batch's forward and backward; in the last one, gradients are reduced."""
    if last or not isinstance(state.module, DistributedDataParallel):
        return contextlib.nullcontext()
    return state.module.no_sync()


def require_gradients(state: "State") -> None:
    """UserError for a parameter that has got no gradient on this rank, after the step's backward.

    On the other ranks DDP would wait for it, and take the next collective of this one in its place.
    """
    module = state.module
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return
    for name, parameter in module.module.trained:
        if parameter.grad is None:
            raise UserError(
                f"the loss does not depend on {name}: remove or freeze "
                "such parameters, or add --parallel.find-unused-parameters"
            )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: all of it."""
    return tensor


def with_local_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `tensor`, of which this rank holds `part`: all of it."""
    return part


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, which each rank has."""
    return tensor


def shard_like(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the full `source`, since `target` is not sharded."""
    return source


def replicas(tensor: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    """Return how many ranks hold this rank's part of a tensor, and its index among them."""
    return size, rank


def compare_loaded(tensors: Iterable[torch.Tensor], world: World) -> None:
    """RankError, on every rank, if two ranks have loaded different bits."""
    require_same({LOADED: bit_sum(tensors)}, world, RankError)


def total_norm(gradients: list[torch.Tensor], world: World) -> torch.Tensor:
    """Compute the 2-norm of all gradients together: a scalar on the device, alike on every rank."""
    # As torch.nn.utils.get_total_norm, which first sorts by device and dtype for twice the cost.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def divide_work(
    matrices: list[torch.Tensor],
    like: list[torch.Tensor],
    work: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Do `work` on the matrices, which all ranks have; one rank works on each of them.

    That rank then sends the result to the others. All results are under way at the same time.
    """
    if not dist.is_initialized():
        return work(matrices)
    ranks = dist.get_world_size()
    # Rank by rank in the order of their sizes, so that the ranks have about as much to do.
    by_size = sorted(range(len(matrices)), key=lambda index: -matrices[index].numel())
    mine = by_size[dist.get_rank() :: ranks]
    results = [torch.empty_like(m, memory_format=torch.contiguous_format) for m in matrices]
    for index, result in zip(mine, work([matrices[index] for index in mine]), strict=True):
        results[index].copy_(result)
    transfers: list[Any] = []
    for position, index in enumerate(by_size):
        worker = position % ranks
        transfers.append(dist.broadcast(results[index], worker, async_op=True))
    for transfer in transfers:
        transfer.wait()
    return results
