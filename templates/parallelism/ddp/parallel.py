"""Data parallelism with DDP: every rank holds the whole model, and gradients are averaged.

Under torchrun there is a process group; a plain process is one rank without a group.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import RankError, UserError
from .agreement import LOADED
from .agreement import all_reduce as all_reduce
from .agreement import require_same as require_same
from .buffers import agree_on_buffers as agree_on_buffers
from .buffers import checksum_of_all
from .world import World

if TYPE_CHECKING:
    from ..train import State

# Whether `wrap` shards the model in place, with hooks on its modules.
SHARDED = False


@dataclass(frozen=True)
class ParallelConfig:
    """Settings of data parallelism (DDP)."""

    timeout_minutes: float = 10.0
    """Abort when a step takes longer than this (minutes)."""
    bucket_mb: int = 25
    """Size of the gradient buckets that are all-reduced during backward (MB)."""
    find_unused_parameters: bool = False
    """Allow parameters without a gradient in some steps; each step then searches the graph."""


def check_ranks(config: ParallelConfig, ranks: int) -> None:
    """Accept any number of processes."""


def reduces_each_micro_batch(config: ParallelConfig) -> bool:
    """Return whether gradients are reduced after each micro-batch instead of once per step."""
    return False


def reshards_after_forward(config: ParallelConfig) -> bool:
    """Return whether a block's weights are gathered in forward and again in backward."""
    return False


def build(make: Callable[[], nn.Module], world: World) -> nn.Module:
    """Build the model on every rank."""
    return make()


class DdpModule(nn.Module):
    """The module that DDP wraps: calls the model, or a function of the model.

    This way, `compute_loss` gets the user's model instead of DDP's wrapper, and may call the model
    several times.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Listed once, since `require_gradients` needs them at each step.
        self.trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # The parameters that the last watched backward has reached.
        self.reached: set[torch.Tensor] = set()
        # Whether the hooks that fill `reached` are registered.
        self.is_watched = False

    def watch_next_backward(self) -> None:
        """Let `reached` hold the parameters that the next backward reaches."""
        if not self.is_watched:
            self.is_watched = True
            for _, parameter in self.trained:
                parameter.register_post_accumulate_grad_hook(self.reached.add)
        # The hooks run in every backward, so drop the parameters of earlier ones.
        self.reached.clear()

    def forward(self, *given: Any, function: Callable[..., Any] = nn.Module.__call__) -> Any:
        """Return `function(model, *given)`.

        The default function calls the model: the result is then `model(*given)`.
        """
        return function(self.model, *given)


def wrap(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelConfig,
    world: World,
    compute_dtype: torch.dtype,
) -> nn.Module:
    """Move the model to its device and wrap it; return the module to call.

    Only a sharded model would need `blocks` and `compute_dtype`.
    """
    model.to(world.device)
    if not world.distributed:
        return model
    inner = DdpModule(model)
    # DDP cannot send sparse buffers; each rank has built the same ones anyway.
    sparse = [name for name, buffer in inner.named_buffers() if buffer.layout != torch.strided]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, sparse)
    module = DistributedDataParallel(
        inner,
        bucket_cap_mb=config.bucket_mb,
        find_unused_parameters=config.find_unused_parameters,
        gradient_as_bucket_view=True,
    )
    # The constructor has copied rank 0's buffers to all ranks, which it does only if this is True.
    # From now on, `agree_on_buffers` synchronizes buffers once per step, not at each forward.
    module.broadcast_buffers = False
    return module


def warm_up(module: nn.Module, step: Callable[[], object]) -> None:
    """Let DDP rebuild its buckets before the first step of training; `step` must update nothing.

    DDP rebuilds its buckets of gradients after its first backward. With three or more ranks, the
    position of a gradient in its bucket determines the order in which ranks are summed. Without the
    extra step, the first step after a resume would not be bitwise identical to the same step of an
    uninterrupted run.
    """
    # With --parallel.find-unused-parameters DDP does not rebuild its buckets.
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return
    if dist.get_world_size() > 2:
        step()


def forward(compute_loss: Callable[..., Any], state: "State", batch: Any) -> Any:
    """Compute the loss of a batch inside DDP, with autocast to the run's dtype."""
    autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if state.compute_dtype != torch.float32:
        autocast = torch.autocast(state.world.device.type, state.compute_dtype)
    with autocast:
        if isinstance(state.module, DistributedDataParallel):
            return state.module(batch, function=compute_loss)
        return compute_loss(state.module, batch)


def accumulate(state: "State", last: bool) -> contextlib.AbstractContextManager:
    """Return the context of a micro-batch: gradients are reduced only in the last one."""
    module = state.module
    if not isinstance(module, DistributedDataParallel):
        return contextlib.nullcontext()
    if not last:
        return module.no_sync()
    if len(state.plan) > 1 and not module.find_unused_parameters:
        # There are several micro-batches, and the earlier ones have set `.grad`. So `.grad` cannot
        # tell `require_gradients` which parameters the last backward has reached.
        module.module.watch_next_backward()
    return contextlib.nullcontext()


def require_gradients(state: "State") -> None:
    """Raise UserError for a parameter that the step's last backward has not reached on this rank.

    If a parameter has no gradient, DDP does not start the all-reduce of its bucket on this rank.
    Other ranks would hang in that all-reduce, or match it with this rank's next collective.
    """
    module = state.module
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return
    inner = module.module
    for name, parameter in inner.trained:
        which_loss = ""
        if parameter.grad is None:
            which_loss = "the loss"
        elif len(state.plan) > 1 and parameter not in inner.reached:
            which_loss = "the loss of the last micro-batch"
        if which_loss:
            raise UserError(
                f"{which_loss} does not depend on {name}: remove or freeze "
                "such parameters, or add --parallel.find-unused-parameters"
            )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, which is the whole tensor."""
    return tensor


def with_local_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return `part`, since this rank's shard is the whole tensor."""
    return part


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, which each rank holds."""
    return tensor


def shard_like(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the full `source`, since `target` is not sharded."""
    return source


def replicas(tensor: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    """Return how many ranks hold a tensor (all of them), and this rank's index among them."""
    return size, rank


def compare_loaded(tensors: Iterable[torch.Tensor], world: World) -> None:
    """Raise RankError, on every rank, if two ranks have loaded different bits."""
    require_same({LOADED: checksum_of_all(tensors)}, world, RankError)


def total_norm(gradients: list[torch.Tensor], world: World) -> torch.Tensor:
    """Compute the 2-norm of all gradients: a scalar on the device, the same on every rank."""
    # Like torch.nn.utils.get_total_norm, which first groups by device and dtype at twice the cost.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def divide_work(
    matrices: list[torch.Tensor],
    like: list[torch.Tensor],
    work: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Apply `work` to matrices: one rank computes each result, and broadcasts it; collective.

    Every rank holds all matrices, and gets all results. All broadcasts are started before the first
    one is waited for. Only sharded parameters need `like`.
    """
    if not dist.is_initialized():
        return work(matrices)
    ranks = dist.get_world_size()
    # Deal the matrices to the ranks by decreasing size, which balances the work.
    by_size = sorted(range(len(matrices)), key=lambda index: -matrices[index].numel())
    mine = by_size[dist.get_rank() :: ranks]
    # A broadcast needs contiguous tensors.
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
