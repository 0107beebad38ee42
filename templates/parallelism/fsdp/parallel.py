"""Fully sharded: every rank holds a slice of each parameter, gradient and moment (FSDP2).

Each block is gathered when its turn comes and let go after it. There can be several copies, each
sharded over a part of the ranks (HSDP). Under torchrun there is a process group; a plain process
runs without one, as one rank, unsharded.
"""

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import RankError, UserError
from ..files import fingerprint
from .agreement import LOADED, bit_sum
from .agreement import agree_on_buffers as agree_on_buffers
from .agreement import all_reduce as all_reduce
from .agreement import require_same as require_same
from .world import World

log = logging.getLogger(__name__)
SHARDED = True  # in place, with hooks on the modules
# Tensors that are not sharded yet, and of no subclass with rules of its own.
PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
DEFERRED = weakref.WeakKeyDictionary[nn.Module, Any]()  # how their tensors get their values


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is spread: data parallel, the model sharded over the ranks."""

    timeout_minutes: float = 10.0
    """A step that takes longer is a hang, and ends the run: on any rank, for whatever reason."""
    reshard_after_forward: bool = True
    """Let a block's weights go after forward and gather them again for backward: less memory."""
    reduce_each: bool = False
    """Sum gradients after each micro-batch, not after the last one: none is kept whole."""
    replicate: int = 1
    """Copies of the sharded model (HSDP), each on ranks / replicate ranks (0: one a machine)."""


def check_ranks(config: ParallelConfig, ranks: int) -> None:
    """UserError when the work cannot be spread over so many processes."""
    copies = copies_of_the_model(config)
    if copies < 1 or ranks % copies:
        raise UserError(f"--parallel.replicate: {copies} copies cannot share {ranks} ranks evenly")


def build(make: Callable[[], nn.Module], world: World) -> nn.Module:
    """The model that `make` builds, without memory: `wrap` gives each part its values in turn.

    Changes of its tensors in between are lost: `build_model` is their place.
    """
    if world.size == 1:
        return make()
    from .deferred import Deferred, tensors

    deferred = Deferred()
    try:
        with deferred:
            model = make()
        deferred.settle(model)
        if world.rank:
            deferred.calls.clear()  # only rank 0 computes values
        DEFERRED[model] = deferred
        return model
    except Exception as error:  # of the user's code, whatever it is
        if world.rank == 0 and not isinstance(error, UserError):  # which comes again
            log.warning("building without memory failed: each rank builds it whole: %s", error)
    deferred.undo()
    model = make()
    leaves = tensors([[*vars(module).values()] for module in model.modules()])
    if any(isinstance(leaf, FakeTensor) for leaf in leaves):
        raise UserError("build_model (model.py) reuses tensors of an earlier call: make them anew")
    return model


def place(module: nn.Module, world: World, buffers: dict[Any, torch.Tensor], deferred: Any) -> None:
    """Move what is not sharded yet to this rank's device, with rank 0's values; ties stay."""
    parameters: dict[Any, torch.Tensor] = {}
    own_names: Any = {"recurse": False, "remove_duplicate": False}
    slots = [
        (part, name, tensor)
        for part in module.modules()
        for name, tensor in (*part.named_parameters(**own_names), *part.named_buffers(**own_names))
    ]
    new = dict.fromkeys(t for *_, t in slots if type(t) in PLAIN and t not in buffers)
    values_of = dict(
        zip(new, deferred.values([*new]) if deferred and world.rank == 0 else new, strict=True)
    )
    for part, name, tensor in slots:
        own = isinstance(tensor, nn.Parameter)
        placed = parameters if own else buffers
        if tensor in values_of:
            here = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
            value = values_of.pop(tensor)
            if world.rank == 0:
                here.copy_(value.detach())
            dist.broadcast(here.view(-1).view(torch.uint8), 0)  # gloo knows few dtypes
            here = nn.Parameter(here, tensor.requires_grad) if own else here
            placed |= {tensor: here, here: here}
        setattr(part, name, placed.get(tensor, tensor))


def wrap(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelConfig,
    world: World,
    compute_dtype: torch.dtype,
) -> nn.Module:
    """Shard each block, then the rest, in place; returns the module to call."""
    if not world.distributed:
        return model.to(world.device)
    check_ranks(config, world.size)
    policy = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        # reduce_dtype is stated, since its default differs between releases: sums are in float32.
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    mesh, reshard, buffers = build_mesh(config, world), config.reshard_after_forward, {}
    deferred = next((DEFERRED[each] for each in model.modules() if each in DEFERRED), None)
    units = [block for block in blocks if [*block.parameters()]]
    check_shardable(model, units)
    forms = [(n, t.shape, t.dtype) for n, t in (*model.named_parameters(), *model.named_buffers())]
    require_same({"the model (a digest of its shapes)": fingerprint(str(forms))}, world)
    if not units and world.rank == 0:
        advice = "return its largest parts, as in [*model.layers]"
        log.warning("blocks(model) in model.py names no layer: all is gathered at once; %s", advice)
    for block in units:
        place(block, world, buffers, deferred)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    place(model, world, buffers, deferred)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if deferred:  # a fake tensor that was missed would turn the whole forward fake
        deferred.fake.allow_non_fake_inputs = False
    return model


def check_shardable(model: nn.Module, units: list[nn.Module]) -> None:
    """UserError, by name, for parameters that FSDP cannot shard."""
    unit_of = {p: unit for unit in units for p in unit.parameters()}
    first: dict[Any, tuple[str, torch.dtype]] = {}
    for name, p in model.named_parameters():
        if p.ndim == 0:
            raise UserError(f"FSDP cannot shard the scalar {name}: give it the shape [1]")
        unit = unit_of.get(p) if p.requires_grad else p  # a frozen one may have any dtype
        other, dtype = first.setdefault(unit, (name, p.dtype))
        if p.dtype != dtype:
            why = f"FSDP shards a block as one dtype: {name} is {p.dtype}, {other} is {dtype}. Give"
            raise UserError(f"{why} them the same, or let blocks() return the module of one, too")


def copies_of_the_model(config: ParallelConfig) -> int:
    """As many as the settings say, or as there are machines, each with a torchrun."""
    return config.replicate or int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def build_mesh(config: ParallelConfig, world: World) -> DeviceMesh:
    """The ranks as a line, or as one line of shards for each copy."""
    copies = copies_of_the_model(config)
    if copies == 1:
        return init_device_mesh(world.device.type, (world.size,))
    shape, names = (copies, world.size // copies), ("replicate", "shard")
    return init_device_mesh(world.device.type, shape, mesh_dim_names=names)


def warm_up(module: nn.Module, step: Callable[[], object]) -> None:
    """Every step, the first one too, sums gradients in the same order."""


def forward(compute_loss: Callable[..., Any], state: Any, batch: Any) -> Any:
    """`compute_loss` of a batch: FSDP casts by its own policy, a plain process by autocast."""
    if state.compute_dtype == torch.float32 or state.world.distributed:
        return compute_loss(state.module, batch)
    with torch.autocast(state.world.device.type, state.compute_dtype):
        return compute_loss(state.module, batch)


def accumulate(state: Any, last: bool) -> contextlib.AbstractContextManager:
    """Context of one micro-batch's forward and backward; gradients are reduced in the last one."""
    if isinstance(state.module, FSDPModule):
        state.module.set_requires_gradient_sync(last or state.config.parallel.reduce_each)
    return contextlib.nullcontext()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Like `tensor`, with `part` as the part that this rank holds."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor(part, tensor._spec, requires_grad=False)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor: to be called on all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Shard a full `source`, the same on all ranks, as `target` is sharded."""
    if not isinstance(target, DTensor):
        return source
    # Without sending it: all ranks have it.
    return distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)


def replicas(tensor: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    """How many ranks hold the same part of a tensor as this one, and its index among them."""
    if not isinstance(tensor, DTensor):
        return size, rank
    count, index, mesh = 1, 0, tensor.device_mesh
    axes = zip(mesh.shape, mesh.get_coordinate() or (), tensor.placements, strict=True)
    for length, mine, placement in axes:
        if placement.is_replicate():
            count, index = count * length, index * length + mine
    return count, index


def compare_loaded(tensors: Iterable[torch.Tensor], world: World) -> None:
    """RankError, on every rank, if one has loaded other bits of a part that others hold, too."""
    parts: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        count, index = replicas(tensor, world.rank, world.size)
        if count > 1:
            part = world.rank - index * (world.size // count)
            name = f"{LOADED} (part {part} of {world.size // count})"
            parts.setdefault(name, []).append(local_part(tensor))
    require_same({name: bit_sum(part) for name, part in parts.items()}, world, RankError)


def total_norm(gradients: list[torch.Tensor], world: World) -> torch.Tensor:
    """2-norm of all gradients together, a scalar on the device, the same on every rank."""
    # Left to itself it would go through DTensors one by one.
    norm = torch.nn.utils.get_total_norm(gradients, foreach=world.distributed or None)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def divide_work(
    matrices: list[torch.Tensor],
    like: list[torch.Tensor],
    work: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """`work` on matrices of which this rank holds the rows that it holds of those in `like`.

    Each is gathered by one rank, which works on it and sends the others their rows: a rank has one
    whole matrix at a time.
    """
    if not isinstance(like[0], DTensor):
        return work(matrices)
    mesh = like[0].device_mesh
    group, ranks = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    results = [*matrices]
    by_size = sorted(range(len(matrices)), key=lambda index: -like[index].numel())
    for first in range(0, len(matrices), ranks):
        indices = by_size[first : first + ranks]  # rank i works on the i-th
        sent = torch.cat([matrices[index].flatten() for index in indices])
        sizes = [matrices[index].numel() for index in indices] + [0] * (ranks - len(indices))
        rows: list[int] = [0] * ranks
        mine = dist.get_rank(group)
        if mine < len(indices):
            shape = like[indices[mine]].shape
            parts = torch.empty(shape, device="meta").chunk(ranks)
            rows[: len(parts)] = [part.numel() for part in parts]
        received = sent.new_empty(sum(rows))
        dist.all_to_all_single(received, sent, rows, sizes, group)
        if mine < len(indices):
            received = work([received.view(shape)])[0].flatten()
        dist.all_to_all_single(sent, received, sizes, rows, group)
        for index, result in zip(indices, sent.split(sizes), strict=False):
            results[index] = result.view_as(matrices[index])
    return results
