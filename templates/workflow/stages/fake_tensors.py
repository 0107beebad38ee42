"""Run the training loop as one rank of many on fake tensors, which have shapes but no data.

So a laptop can simulate a step of a model that does not fit into its memory. Two kinds of functions
are replaced: those that use other kernels on a GPU than on a CPU, and those that need values of
tensors, other ranks or another device.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from .. import train as loop
from ..checkpoint.tensors import create_optimizer_state
from ..config import Config
from ..distributed import World, parallel
from .meter import Meter

# The replacements below call these functions. `patch_loop` replaces the first one in torch, so keep
# a reference to the original.
CPU_ATTENTION = F.scaled_dot_product_attention
CPU_DROPOUT = torch.native_dropout


def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Compute attention with the flash kernel, if the shapes allow it."""
    if query.ndim != 4 or query.shape[-1] != value.shape[-1]:
        return CPU_ATTENTION(query, key, value, *rest, **options)
    # Mask, scale and causality would only change the values, and fake tensors have none.
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]


def rms_norm(
    input: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Apply a layer norm instead: it saves as much for backward as a GPU's RMSNorm kernel."""
    return F.layer_norm(input, shape, weight)


def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **options: Any
) -> Tensor:
    """Apply dropout with the kernel that saves a boolean mask for backward."""
    if not p or not training:
        return input
    dropped, _ = CPU_DROPOUT(input, p, True)
    return dropped


def in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function run in float32 under autocast, as it does on CUDA but not on a CPU."""

    def cast_and_call(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            x = x.float()
        return function(x, *rest, **options)

    return cast_and_call


# Replacements for functions of torch.nn.functional, by name. On a GPU, these functions save other
# tensors for backward than on a CPU.
ON_GPU: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": attention,
    "rms_norm": rms_norm,
    "dropout": dropout,
    "group_norm": in_float32(F.group_norm),
    "layer_norm": in_float32(F.layer_norm),
    "softmax": in_float32(F.softmax),
}


# The next four functions replace functions of the loop that need values, other ranks or another
# device.


def build_at_once(make: Callable[[], nn.Module], world: World) -> nn.Module:
    """Build the whole model on any rank, since fake weights need no memory."""
    return make()


def accept_step(sums: Tensor, norm: Tensor, ranks: int, clip: float) -> tuple[float, Tensor, bool]:
    """Judge a step as good, since fake tensors have no values to check."""
    # As in `judge_step`: the factor for gradients, their norm, and whether the step is bad.
    return 1.0, norm, False


def stay(module: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
    """Leave a module on its device, since the CPU is the only one here."""
    return module


def do_nothing(*arguments: Any) -> None:
    """Do nothing, instead of checking values or comparing with other ranks."""


def patch_loop(stack: contextlib.ExitStack, config: Config, meter: Meter) -> None:
    """Replace functions that cannot run on fake tensors, until the stack closes."""
    # Build the datasets now, while tensors are still real: a dataset may read their values.
    datasets = loop.build_datasets(config)
    resize = torch.UntypedStorage.resize_

    def prepared_datasets(config: Config) -> Any:
        return datasets

    def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        meter.hold(storage)
        return result

    def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        stack.enter_context(patch.object(owner, name, replacement))

    replace(loop, "build_datasets", prepared_datasets)
    replace(loop, "judge_step", accept_step)
    # The originals read values.
    replace(loop, "check_loss", do_nothing)
    replace(loop, "check_counted", do_nothing)
    # Some losses need all samples of a rank in one micro-batch. Then this check would raise an
    # error for smaller micro-batches, which are simulated, too.
    replace(loop, "check_whole_batch", do_nothing)
    # The loop's annotations for traces tell the meter the current phase.
    replace(loop, "annotated", meter.annotated)
    replace(parallel, "build", build_at_once)
    # The originals compare this rank with the others, which do not exist.
    replace(loop, "require_same_model", do_nothing)
    replace(loop, "require_same_optimizer", do_nothing)
    replace(parallel, "require_same", do_nothing)
    replace(parallel, "agree_on_buffers", do_nothing)
    # FSDP frees gathered weights with this method. The meter would not see this, since it sees only
    # operators.
    replace(torch.UntypedStorage, "resize_", resize_and_count)
    replace(nn.Module, "to", stay)
    for name, replacement in ON_GPU.items():
        replace(F, name, replacement)


def join_fake_ranks(stack: contextlib.ExitStack, config: Config, world: World) -> None:
    """Start a process group for FSDP whose collectives do nothing, until the stack closes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world.size)
    stack.callback(dist.destroy_process_group)
    # Only FSDP's parallel.py has `build_mesh`. Call it now, while tensors are still real, since it
    # reads the values of a tensor of ranks.
    mesh = vars(parallel)["build_mesh"](config.parallel, world)

    def prepared_mesh(*arguments: Any) -> Any:
        return mesh

    stack.enter_context(patch.object(parallel, "build_mesh", prepared_mesh))


@contextlib.contextmanager
def one_rank(config: Config, ranks: int, meter: Meter) -> Iterator[loop.State]:
    """Set up one rank of `ranks` and yield its state; all new tensors in the block are fake.

    With FSDP, it is a rank of a fake process group. With DDP, it is a single process without DDP,
    which computes the same as a rank of DDP. Like DDP, it keeps its gradients between steps.
    """
    sharded = parallel.SHARDED and ranks > 1
    size = 1
    if sharded:
        size = ranks
    world = World(rank=0, size=size, device=torch.device("cpu"), distributed=sharded)
    with contextlib.ExitStack() as stack:
        patch_loop(stack, config, meter)
        if sharded:
            join_fake_ranks(stack, config, world)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        state = loop.setup(config, world)
        create_optimizer_state(state.optimizer)
        is_ddp = ranks > world.size
        if is_ddp:
            # DDP never frees gradients, which are views of its buckets. So create them now, and
            # make `zero_grad` do nothing.
            stack.enter_context(patch.object(state.optimizer, "zero_grad"))
            for group in state.optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad = torch.zeros_like(weight)
        yield state


def read_batch(state: loop.State) -> Any:
    """Read the first micro-batch of step 0; return it as fake tensors."""
    step = 0
    first_micro_batch = state.plan[0]
    # Suspend the fake mode and the meter, so that the batch is real and is not counted.
    with _disable_current_modes():
        batch = state.loader.source[step, first_micro_batch]
    # In the fake mode, the clone of a real tensor is fake.
    return tree_map_only(Tensor, torch.clone, batch)
