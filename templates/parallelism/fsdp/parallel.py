"""Fully sharded: every rank holds a slice of each parameter, gradient and moment (FSDP2).

Each block is gathered when its turn comes and let go after it. There can be several copies, each
sharded over a part of the ranks (HSDP). Under torchrun there is a process group; a plain process
runs without one, as one rank, unsharded.
"""

import contextlib
import gc
import itertools
import logging
import os
import random
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
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

if TYPE_CHECKING:
    from ..train import State

log = logging.getLogger(__name__)
SHARDED = True  # in place, with hooks on the modules


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
    """The model that `make` builds: whole on rank 0, its shapes on the others until `wrap`.

    So only rank 0 ever holds the whole model. A model that cannot be built on torch's `meta` device
    is built whole on each rank, with a warning.
    """
    if world.size == 1:
        return make()
    problem = ""
    if world.rank == 0:
        model = make()
    else:
        try:
            model = build_on_meta(make)
        except Exception as error:  # of the user's code, whatever it is
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
            model = make()
    problems = [""] * world.size
    dist.all_gather_object(problems, problem)
    if world.rank == 0 and any(problems):
        text = "each rank builds the whole model, since its shapes cannot be built on `meta`: %s"
        log.warning(text, max(problems))
    # Only rank 0 has drawn what a build draws: what is drawn from here on is the same on all.
    states: list[Any] = [random_states()]
    dist.broadcast_object_list(states, src=0)
    set_random_states(states[0])
    return model


def random_states() -> tuple[Any, Any, Any]:
    """The states of the generators of torch (on the CPU), NumPy and Python."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_random_states(states: tuple[Any, Any, Any]) -> None:
    """Set the generators to what `random_states` has returned."""
    of_torch, of_numpy, of_python = states
    torch.set_rng_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def build_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """The model with tensors that have no memory; ValueError if that leaves out some of them.

    The generators of random numbers are as before, in case the model is then built whole.
    """
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
        known |= {id(tensor), id(tensor._base)}  # a view keeps what it is a view of
    # Only parameters and buffers get values. Another tensor, in a list or in an object of the
    # user's, would stay without.
    for tensor in meta_tensors():
        if id(tensor) not in known:
            raise ValueError(f"a tensor {list(tensor.shape)} is no parameter or buffer of a module")
    return model


def meta_tensors() -> list[torch.Tensor]:
    """All tensors on `meta` in this process, as Python's garbage collector knows them."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_meta]


def can_be_filled(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all in its elements: it is no subclass, not sparse, not sharded yet."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def wrap(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelConfig,
    world: World,
    compute_dtype: torch.dtype,
) -> nn.Module:
    """Shard each block, then the rest, in place; returns the module to call.

    UserError, by name, for what FSDP would train in another way than DDP.
    """
    if not world.distributed:
        return model.to(world.device)
    check_ranks(config, world.size)
    policy = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        # reduce_dtype is stated, since its default differs between releases: sums are in float32.
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    mesh = build_mesh(config, world)
    units = units_of(model, blocks)
    check_shardable(model, units)
    check_memory(model)
    forms = [(n, t.shape, t.dtype) for n, t in (*model.named_parameters(), *model.named_buffers())]
    require_same({"the model (a digest of its shapes)": fingerprint(str(forms))}, world)
    if not units and world.rank == 0:
        advice = "return its largest parts, as in [*model.layers]"
        log.warning("blocks(model) in model.py names no layer: all is gathered at once; %s", advice)

    originals = references(model)
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    for unit in [*units, model]:
        place(unit, world, buffers)
        attributes = {name: dict(vars(p)) for name, p in unit.named_parameters()}
        # The root is needed again at once, in backward.
        reshard = config.reshard_after_forward if unit is not model else None
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        for name, parameter in unit.named_parameters():
            keep_attributes(attributes[name], parameter)
    buffers.clear()
    check_replaced(originals)
    return model


def units_of(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The blocks that have parameters, each once; a block within another comes before it."""
    wanted = {block for block in blocks if any(True for _ in block.parameters())} - {model}
    units = [(path, module) for path, module in model.named_modules() if module in wanted]
    units.sort(key=lambda unit: -unit[0].count("."))  # the deepest first
    return [module for _, module in units]


def place(module: nn.Module, world: World, buffers: dict[torch.Tensor, torch.Tensor]) -> None:
    """Move what is not sharded yet to this rank's device, with rank 0's values; ties stay.

    `buffers` has those that were moved with another unit.
    """
    parameters: dict[torch.Tensor, torch.Tensor] = {}
    for part in module.modules():
        for name, parameter in named_tensors(part, "_parameters"):
            if can_be_filled(parameter) and parameter not in parameters:
                new = nn.Parameter(filled(parameter, world), parameter.requires_grad)
                keep_attributes(vars(parameter), new)
                parameters |= {parameter: new, new: new}
            setattr(part, name, parameters.get(parameter, parameter))
        for name, buffer in named_tensors(part, "_buffers"):
            if can_be_filled(buffer) and buffer not in buffers:
                new = filled(buffer, world)
                buffers |= {buffer: new, new: new}
            setattr(part, name, buffers.get(buffer, buffer))


def keep_attributes(attributes: dict[str, Any], parameter: torch.Tensor) -> None:
    """Give a parameter the attributes of the one that it replaces, such as `_no_weight_decay`."""
    for name, value in attributes.items():
        vars(parameter).setdefault(name, value)


def named_tensors(module: nn.Module, kind: str) -> list[tuple[str, torch.Tensor]]:
    """A module's own "_parameters" or "_buffers", by name."""
    return [(name, value) for name, value in getattr(module, kind).items() if value is not None]


def filled(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """A tensor like this one on this rank's device, with the values that rank 0 has; collective."""
    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
    if world.rank == 0:
        new.copy_(tensor.detach())
    dist.broadcast(new.view(-1).view(torch.uint8), 0)  # as bytes: gloo knows few dtypes
    return new


def check_shardable(model: nn.Module, units: list[nn.Module]) -> None:
    """UserError, by name, for parameters that FSDP cannot shard, or would train otherwise."""
    path_of = {module: path for path, module in model.named_modules()}
    first: dict[torch.Tensor, tuple[str, nn.Module]] = {}  # where a parameter was met first
    dtypes: dict[Any, tuple[str, torch.dtype]] = {}
    for unit in [*units, model]:
        for module in own_modules(unit, units):
            for last_name, p in named_tensors(module, "_parameters"):
                name = f"{path_of[module]}.{last_name}".removeprefix(".")
                if p.ndim == 0:
                    raise UserError(f"FSDP cannot shard the scalar {name}: give it the shape [1]")
                if p._backward_hooks or p._post_accumulate_grad_hooks:
                    raise UserError(
                        f"FSDP would lose the gradient hook of {name}: do its work in forward "
                        "(as in weight * mask), or render with parallelism=ddp"
                    )
                other, other_unit = first.setdefault(p, (name, unit))
                if other_unit is not unit:
                    raise UserError(
                        f"FSDP would untie {other} and {name}, one weight in two of blocks(model) "
                        "(model.py): leave their modules out, or return one that has both"
                    )
                # All trained ones of a unit have one dtype; a frozen one may have any.
                other, dtype = dtypes.setdefault(unit if p.requires_grad else p, (name, p.dtype))
                if p.dtype != dtype:
                    raise UserError(
                        f"FSDP shards a block as one dtype: {name} is {p.dtype}, {other} is "
                        f"{dtype}. Give them the same, or let blocks() return the module of one, "
                        "too"
                    )


def own_modules(unit: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """The modules of a unit, without those of the units in it."""
    inside = {*unit.modules()}
    of_others: set[nn.Module] = set()
    for other in units:
        if other is not unit and other in inside:
            of_others |= {*other.modules()}
    return [module for module in unit.modules() if module not in of_others]


def check_memory(model: nn.Module) -> None:
    """UserError for a parameter whose memory another parameter or a buffer has, too."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if can_be_filled(tensor):
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    for held in by_storage.values():
        for (name, one), (other, two) in itertools.combinations(held, 2):
            either_is_trained = isinstance(one, nn.Parameter) or isinstance(two, nn.Parameter)
            if either_is_trained and overlap(one, two):
                raise UserError(
                    f"FSDP would part {name} and {other}, which have one memory: make them one "
                    "parameter, or compute one of them in forward"
                )


def overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two views of one storage have an element in common."""
    if one.dtype != two.dtype:
        return True
    start_of_one, end_of_one = extent(one)
    start_of_two, end_of_two = extent(two)
    if end_of_one <= start_of_two or end_of_two <= start_of_one:
        return False
    # Their ranges meet, but columns of one matrix, say, need not.
    size = one.untyped_storage().nbytes() // one.itemsize
    marks = torch.zeros(size, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(two.shape, two.stride(), two.storage_offset()).any())


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of a storage's elements that a view reaches into."""
    start = int(tensor.storage_offset())
    end = start + 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        end += (size - 1) * stride
    return start, end


def references(model: nn.Module) -> dict[str, weakref.ref[torch.Tensor]]:
    """Weak references to what `place` replaces."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: weakref.ref(tensor) for name, tensor in named if can_be_filled(tensor)}


def check_replaced(originals: dict[str, weakref.ref[torch.Tensor]]) -> None:
    """UserError for a tensor that something still holds, though the modules have another now."""
    gc.collect()
    left = [name for name, original in originals.items() if original() is not None]
    if left:
        raise UserError(
            f"FSDP replaces parameters and buffers, but something holds {left[0]} besides its "
            "module, such as a list, an object or a function: let it hold the module instead"
        )


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


def forward(compute_loss: Callable[..., Any], state: "State", batch: Any) -> Any:
    """`compute_loss` of a batch: FSDP casts by its own policy, a plain process by autocast."""
    if state.compute_dtype == torch.float32 or state.world.distributed:
        return compute_loss(state.module, batch)
    with torch.autocast(state.world.device.type, state.compute_dtype):
        return compute_loss(state.module, batch)


def accumulate(state: "State", last: bool) -> contextlib.AbstractContextManager:
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
    """RankError, on every rank, if one has loaded other bits of a shard that others hold, too."""
    shards: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        holders, index = replicas(tensor, world.rank, world.size)
        if holders > 1:
            distinct = world.size // holders
            shard = world.rank - index * distinct
            name = f"{LOADED} (part {shard} of {distinct})"
            shards.setdefault(name, []).append(local_part(tensor))
    require_same({name: bit_sum(held) for name, held in shards.items()}, world, RankError)


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
    """`work` on whole matrices, of which this rank has the rows of its shard of those in `like`.

    Each is gathered by one rank, which works on it and sends the others their rows. So a rank has
    one whole matrix at a time, and nothing is worked out twice.
    """
    if not isinstance(like[0], DTensor):
        return work(matrices)
    mesh = like[0].device_mesh
    group, ranks = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    rank = dist.get_rank(group)
    results = [*matrices]
    by_size = sorted(range(len(matrices)), key=lambda index: -like[index].numel())
    for first in range(0, len(matrices), ranks):
        # In each round rank i gathers the i-th of these; in the last one some may have none.
        indices = by_size[first : first + ranks]
        works = rank < len(indices)
        sent = torch.cat([matrices[index].flatten() for index in indices])
        to_send = [matrices[index].numel() for index in indices]
        to_send += [0] * (ranks - len(indices))
        to_receive = [0] * ranks
        if works:
            shape = like[indices[rank]].shape
            # FSDP shards by rows, as `chunk` divides them: the last ranks may have none.
            shards = torch.empty(shape, device="meta").chunk(ranks)
            to_receive[: len(shards)] = [shard.numel() for shard in shards]
        received = sent.new_empty(sum(to_receive))
        dist.all_to_all_single(received, sent, to_receive, to_send, group)
        if works:
            received = work([received.view(shape)])[0].flatten()
        dist.all_to_all_single(sent, received, to_send, to_receive, group)
        for index, result in zip(indices, sent.split(to_send), strict=False):
            results[index] = result.view_as(matrices[index])
    return results
