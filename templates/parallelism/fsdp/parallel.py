"""Fully sharded data parallelism (FSDP2): each rank holds a shard of every parameter.

The optimizer's moments are sharded like the parameters. The whole weights of a block are gathered
when the block needs them, and freed afterwards. With HSDP there are several copies of the model,
each sharded over some of the ranks. Without torchrun, a process is the only rank, there is no
process group, and the model is not sharded.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..device import READ_LATER, meta_tensors, random_states, set_random_states
from ..errors import RankError, UserError
from .agreement import LOADED
from .agreement import all_reduce as all_reduce
from .agreement import require_same as require_same
from .buffers import agree_on_buffers as agree_on_buffers
from .buffers import checksum_of_all
from .shardable import (
    can_be_filled,
    check_batch_norm,
    check_memory,
    check_replaced,
    check_shardable,
    named_tensors,
    references,
)
from .world import World

if TYPE_CHECKING:
    from ..train import State

log = logging.getLogger(__name__)
# Whether `wrap` shards the model in place, with hooks on its modules.
SHARDED = True


@dataclass(frozen=True)
class ParallelConfig:
    """Settings of fully sharded data parallelism (FSDP2)."""

    timeout_minutes: float = 10.0
    """Abort when a step takes longer than this (minutes)."""
    reshard_after_forward: bool = True
    """Free a block's weights after forward and gather them again in backward: saves memory."""
    reduce_each: bool = False
    """Reduce gradients after each micro-batch, not only the last: less memory, more traffic."""
    replicate: int = 1
    """HSDP: number of copies of the sharded model (1: plain FSDP, 0: one copy per machine)."""


def check_ranks(config: ParallelConfig, ranks: int) -> None:
    """Raise UserError if the copies of the model do not fit this number of ranks."""
    copies = copies_of_the_model(config)
    if copies < 1 or ranks % copies:
        raise UserError(
            f"--parallel.replicate: {ranks} ranks cannot be divided evenly among {copies} copies "
            "of the model; give a divisor of the number of ranks"
        )


def reduces_each_micro_batch(config: ParallelConfig) -> bool:
    """Return whether gradients are reduced after each micro-batch instead of once per step."""
    return config.reduce_each


def reshards_after_forward(config: ParallelConfig) -> bool:
    """Return whether a block's weights are gathered in forward and again in backward."""
    return config.reshard_after_forward


def build(make: Callable[[], nn.Module], world: World) -> nn.Module:
    """Build the model: with values on rank 0, without values (on `meta`) on the others; collective.

    This way only rank 0 holds the whole model. `wrap` later sends the values to the other ranks.
    But a rank that cannot build the model on `meta` builds it with values, and rank 0 logs a
    warning. If a rank cannot build the model at all, the error ends its process. The other ranks
    wait for it at the next collective, until torchrun ends them.
    """
    if world.size == 1:
        return make()
    problem = ""
    if world.rank == 0:
        model = make()
    else:
        try:
            model = build_on_meta(make)
        # The user's code may raise anything.
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
            model = make()
    problems = [""] * world.size
    dist.all_gather_object(problems, problem)
    failures = [text for text in problems if text]
    if world.rank == 0 and failures:
        text = "each rank builds the whole model, since it cannot be built on torch's `meta`: %s"
        log.warning(text, failures[0])
    # Only rank 0 has drawn the model's random numbers. Send its generator states to all ranks, so
    # that they draw the same numbers from here on.
    states: list[Any] = [random_states()]
    dist.broadcast_object_list(states, src=0)
    set_random_states(states[0])
    return model


def build_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Build the model on `meta`; ValueError if `wrap` could not give values to one of its tensors.

    The states of the random generators are restored afterwards, in case the model must be built
    again with values.
    """
    # The ids of tensors that may be on `meta`: at first the tensors that exist before the model is
    # built, later also the model's parameters and buffers.
    known = {id(tensor) for tensor in meta_tensors()}
    states = random_states()
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            model = make()
    finally:
        set_random_states(states)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not can_be_filled(tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__} ({tensor.layout})")
        # A view keeps its base alive, so the base may be on `meta`, too. If the tensor is no view,
        # `_base` is None, and the id of None does no harm.
        known |= {id(tensor), id(tensor._base)}
    # `wrap` gives values only to parameters and buffers. Any other tensor, such as one in a list,
    # would stay on `meta`.
    for tensor in meta_tensors():
        if id(tensor) not in known:
            shape = list(tensor.shape)
            raise ValueError(f"a tensor of shape {shape} is not a parameter or buffer of a module")
    return model


def wrap(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelConfig,
    world: World,
    compute_dtype: torch.dtype,
) -> nn.Module:
    """Shard each block, then the rest of the model, in place; return the module to call.

    Collective. Raises UserError for parameters that FSDP would train differently from DDP, and for
    a number of copies that does not fit the ranks. If only one rank fails, for example for lack of
    memory, its process ends. The others wait in their next collective, until torchrun ends them.
    """
    if not world.distributed:
        return model.to(world.device)
    check_ranks(config, world.size)
    policy = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        # Set the dtype in which gradients are summed, since its default differs between releases of
        # torch.
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    mesh = build_mesh(config, world)
    units = units_of(model, blocks)
    check_shardable(model, units)
    if compute_dtype != torch.float32 and world.device.type == "cuda":
        check_batch_norm(model)
    check_memory(model)
    if not units and world.rank == 0:
        log.warning(
            "blocks(model) in model.py returns no modules, so the whole model is gathered at once: "
            "return its layers, as in [*model.layers]"
        )

    # Sharding replaces the model's tensors. With these weak references, `check_replaced` finds out
    # whether anything still uses an old tensor.
    originals = references(model)
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    for unit in [*units, model]:
        move_to_device(unit, world, buffers)
        attributes = {name: dict(vars(p)) for name, p in unit.named_parameters()}
        reshard = config.reshard_after_forward
        # The model's parameters outside the blocks are needed again as soon as backward begins.
        # With None, FSDP keeps the parameters of the outermost module gathered after forward.
        if unit is model:
            reshard = None
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        # `fully_shard` has replaced the parameters once more, without their attributes.
        for name, parameter in unit.named_parameters():
            keep_attributes(attributes[name], parameter)
    # Drop the references of this dictionary to old tensors, or `check_replaced` would find them.
    buffers.clear()
    check_replaced(originals)
    return model


def units_of(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the blocks that have parameters, each once, with inner blocks before outer ones."""
    # Leave out the model itself, which `wrap` shards at the end.
    with_parameters = {block for block in blocks if [*block.parameters()]} - {model}
    units_at_depth: dict[int, list[nn.Module]] = {}
    for path, module in model.named_modules():
        if module in with_parameters:
            units_at_depth.setdefault(path.count("."), []).append(module)
    units: list[nn.Module] = []
    for depth in sorted(units_at_depth, reverse=True):
        units += units_at_depth[depth]
    return units


def move_to_device(
    module: nn.Module, world: World, buffers: dict[torch.Tensor, torch.Tensor]
) -> None:
    """Move tensors that are not sharded yet to this rank's device, with rank 0's values.

    Collective. Tied tensors stay tied. `buffers` maps the buffers that were moved with earlier
    units to their replacements; the buffers of this unit are added.
    """
    # Both dictionaries map an old tensor to its replacement, and the replacement to itself. A
    # module inside two units is visited twice. At the second visit its parameters are sharded and
    # stay as they are, and its buffers are found in `buffers`, so they are not replaced again.
    parameters: dict[torch.Tensor, torch.Tensor] = {}
    for submodule in module.modules():
        for name, parameter in named_tensors(submodule, "_parameters"):
            if can_be_filled(parameter) and parameter not in parameters:
                new = nn.Parameter(filled(parameter, world), parameter.requires_grad)
                keep_attributes(vars(parameter), new)
                parameters |= {parameter: new, new: new}
            setattr(submodule, name, parameters.get(parameter, parameter))
        for name, buffer in named_tensors(submodule, "_buffers"):
            if can_be_filled(buffer) and buffer not in buffers:
                new = filled(buffer, world)
                buffers |= {buffer: new, new: new}
            setattr(submodule, name, buffers.get(buffer, buffer))


def keep_attributes(attributes: dict[str, Any], parameter: torch.Tensor) -> None:
    """Copy a parameter's attributes, such as `_no_weight_decay`, to the one that replaces it."""
    for name, value in attributes.items():
        vars(parameter).setdefault(name, value)


def filled(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Return a tensor like this one on this rank's device, with rank 0's values.

    Collective. But if the values are read later (READ_LATER), the result has none, and nothing is
    sent.
    """
    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
    if hasattr(tensor, READ_LATER):
        # Not even rank 0 has the values: each rank will read its shard from files (--init-from).
        return new
    if world.rank == 0:
        new.copy_(tensor.detach())
    # Send the values as bytes, since gloo supports few dtypes.
    dist.broadcast(new.view(-1).view(torch.uint8), 0)
    return new


def copies_of_the_model(config: ParallelConfig) -> int:
    """Return the number of copies of the model: --parallel.replicate, or one per machine."""
    if config.replicate:
        return config.replicate
    # GROUP_WORLD_SIZE is the number of torchruns, and each machine runs one.
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def build_mesh(config: ParallelConfig, world: World) -> DeviceMesh:
    """Return the device mesh: one row of ranks, or with HSDP one row per copy of the model.

    The ranks of a row hold the shards of one copy.
    """
    copies = copies_of_the_model(config)
    if copies == 1:
        return init_device_mesh(world.device.type, (world.size,))
    return init_device_mesh(
        world.device.type,
        (copies, world.size // copies),
        mesh_dim_names=("replicate", "shard"),
    )


def warm_up(module: nn.Module, step: Callable[[], object]) -> None:
    """Do nothing.

    A warm-up is for a parallelism whose first step sums gradients in another order than later
    steps. With FSDP the order is the same in all steps.
    """


def forward(compute_loss: Callable[..., Any], state: "State", batch: Any) -> Any:
    """Compute the loss of a batch, in the run's dtype.

    FSDP casts by its own policy (`wrap`). Autocast is only for a process without torchrun, where
    the model is not sharded.
    """
    autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if state.compute_dtype != torch.float32 and not state.world.distributed:
        autocast = torch.autocast(state.world.device.type, state.compute_dtype)
    try:
        with autocast:
            return compute_loss(state.module, batch)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise UserError(
            "FSDP gathers weights only while the model or one of its blocks is called: in "
            "compute_loss (model.py) call model(...) instead of another method or a part of it"
        ) from error


def accumulate(state: "State", last: bool) -> contextlib.AbstractContextManager:
    """Let FSDP reduce gradients in the last micro-batch's backward, or in each (`reduce_each`).

    This function itself sets flags in the modules, so the context that it returns does nothing.
    """
    if isinstance(state.module, FSDPModule):
        reduce_each = state.config.parallel.reduce_each
        state.module.set_requires_gradient_sync(last or reduce_each)
        if last or reduce_each:
            # `state.plan` lists the micro-batches of a step. If FSDP does not reduce after each of
            # them, it adds up their gradients in float32, even if they are computed in bf16.
            in_bf16 = state.compute_dtype != torch.float32
            adds_up_in_float32 = in_bf16 and len(state.plan) > 1 and not reduce_each
            count_unused_as_zeros(state.module, not adds_up_in_float32)
    return contextlib.nullcontext()


def count_unused_as_zeros(module: FSDPModule, zeros: bool) -> None:
    """Set whether FSDP counts a gradient that is missing on this rank as zeros.

    Ranks may use different parameters, such as experts. Without zeros, a rank leaves the missing
    gradient out of the tensor that it sends, and FSDP adds up gradients of different parameters.
    Zeros need torch 2.13. They do not work when gradients of several micro-batches are added up in
    float32, but computed in bf16: torch would make zeros in bf16 between gradients in float32.
    """
    sharded: Any = module
    if hasattr(sharded, "set_reduce_scatter_unused_params"):
        sharded.set_reduce_scatter_unused_params(zeros)


def require_gradients(state: "State") -> None:
    """Do nothing, since FSDP accepts a missing gradient.

    `count_unused_as_zeros` describes when such a gradient makes sums wrong.
    """


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor sharded like `tensor`, with `part` as this rank's shard."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor(part, tensor._spec, requires_grad=False)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, gathered from the ranks; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Shard a full `source`, which all ranks hold, like `target`."""
    if not isinstance(target, DTensor):
        return source
    # By default torch sends rank 0's values. With None it sends nothing, since each rank already
    # holds the full tensor and takes its own shard from it.
    return distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)


def replicas(tensor: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    """Return the number of ranks that hold this rank's shard, and this rank's index among them."""
    if not isinstance(tensor, DTensor):
        return size, rank
    count = 1
    index = 0
    mesh = tensor.device_mesh
    # Along each axis of the mesh, a tensor is either replicated or sharded. A rank outside the mesh
    # would have no coordinate (None), but all ranks are in the mesh.
    axes = zip(mesh.shape, mesh.get_coordinate() or (), tensor.placements, strict=True)
    for length, coordinate, placement in axes:
        if placement.is_replicate():
            count *= length
            index = index * length + coordinate
    return count, index


def compare_loaded(tensors: Iterable[torch.Tensor], world: World) -> None:
    """Raise RankError, on every rank, if ranks have loaded the same shard with different bits."""
    shards: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        holders, index = replicas(tensor, world.rank, world.size)
        if holders > 1:
            distinct = world.size // holders
            # `index` is the number of the copy that this rank holds a part of. `build_mesh` numbers
            # ranks copy by copy, so the difference is the rank's number within its copy.
            shard = world.rank - index * distinct
            name = f"{LOADED} (shard {shard} of {distinct})"
            shards.setdefault(name, []).append(local_part(tensor))
    require_same({name: checksum_of_all(held) for name, held in shards.items()}, world, RankError)


def total_norm(gradients: list[torch.Tensor], world: World) -> torch.Tensor:
    """Compute the 2-norm of all gradients: a scalar on the device, the same on every rank."""
    # By default (None) torch processes plain tensors together (`foreach`), but DTensors one by one.
    foreach = True if world.distributed else None
    norm = torch.nn.utils.get_total_norm(gradients, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def divide_work(
    matrices: list[torch.Tensor],
    like: list[torch.Tensor],
    work: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Apply `work` to whole matrices, and return this rank's rows of the results; collective.

    `matrices` has only this rank's rows of each matrix, sharded like the tensors in `like`. Each
    matrix is gathered on one rank, which applies `work` and sends the others their rows. So a rank
    holds one whole matrix at a time, and no work is repeated within a copy of the model. An error
    on one rank ends its process. The others wait for its rows, until torchrun ends them.
    """
    if not isinstance(like[0], DTensor):
        return work(matrices)
    mesh = like[0].device_mesh
    # The last axis of the mesh is the one that shards.
    group = mesh.get_group(mesh.ndim - 1)
    ranks = mesh.size(mesh.ndim - 1)
    rank = dist.get_rank(group)
    results = [*matrices]
    # Sort by size, so that the matrices of a round have similar sizes. This balances the work.
    by_size = sorted(range(len(matrices)), key=lambda index: -like[index].numel())
    for first in range(0, len(matrices), ranks):
        # Rank i works on the i-th matrix of the round; in the last round some ranks have none.
        indices = by_size[first : first + ranks]
        has_matrix = rank < len(indices)
        rows = torch.cat([matrices[index].flatten() for index in indices])
        # For each rank, the number of elements to send to it, and to receive from it.
        to_send = [matrices[index].numel() for index in indices]
        to_send += [0] * (ranks - len(indices))
        to_receive = [0] * ranks
        if has_matrix:
            shape = like[indices[rank]].shape
            # FSDP divides rows among the ranks as `chunk` does, so the last ranks may have none.
            shards = torch.empty(shape, device="meta").chunk(ranks)
            to_receive[: len(shards)] = [shard.numel() for shard in shards]
        flat_matrix = rows.new_empty(sum(to_receive))
        dist.all_to_all_single(flat_matrix, rows, to_receive, to_send, group)
        if has_matrix:
            flat_matrix = work([flat_matrix.view(shape)])[0].flatten()
        # The same transfer backwards: this rank's rows of the results overwrite those it sent.
        dist.all_to_all_single(rows, flat_matrix, to_send, to_receive, group)
        # Not strict, since `indices` is shorter than `to_send` if some ranks have no matrix.
        for index, result in zip(indices, rows.split(to_send), strict=False):
            results[index] = result.view_as(matrices[index])
    return results
