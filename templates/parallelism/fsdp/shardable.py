"""What FSDP cannot shard, or would train in another way than DDP, is refused by name."""

import gc
import itertools
import weakref
from typing import Any

import torch
from torch import nn

from ..errors import UserError


def can_be_filled(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor can be copied by its elements: no subclass, not sparse, not sharded."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def named_tensors(module: nn.Module, kind: str) -> list[tuple[str, torch.Tensor]]:
    """Return a module's own "_parameters" or "_buffers", by name."""
    return [(name, value) for name, value in getattr(module, kind).items() if value is not None]


def check_shardable(model: nn.Module, units: list[nn.Module]) -> None:
    """UserError, by name, for parameters that FSDP cannot shard, or would train otherwise.

    `units`: the modules that are sharded each by itself; the rest of the model is the last unit.
    """
    path_of = {module: path for path, module in model.named_modules()}
    # Name and unit of each parameter where it was met first.
    first: dict[torch.Tensor, tuple[str, nn.Module]] = {}
    # Name and dtype of the first trained parameter of each unit, and of each frozen parameter.
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
                # All trained ones of a unit need one dtype; a frozen one may have any.
                same_dtype = unit if p.requires_grad else p
                other, dtype = dtypes.setdefault(same_dtype, (name, p.dtype))
                if p.dtype != dtype:
                    raise UserError(
                        f"FSDP shards a block as one dtype: {name} is {p.dtype}, {other} is "
                        f"{dtype}. Give them the same, or let blocks() return the module of one, "
                        "too"
                    )


def own_modules(unit: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Return the modules of a unit, without those of the units in it."""
    inside = {*unit.modules()}
    of_others: set[nn.Module] = set()
    for other in units:
        if other is not unit and other in inside:
            of_others |= {*other.modules()}
    return [module for module in unit.modules() if module not in of_others]


def check_memory(model: nn.Module) -> None:
    """UserError for a parameter that shares memory with another parameter or a buffer."""
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
    """Tell whether two views of one storage have an element in common."""
    if one.dtype != two.dtype:
        return True
    start_of_one, end_of_one = extent(one)
    start_of_two, end_of_two = extent(two)
    if end_of_one <= start_of_two or end_of_two <= start_of_one:
        return False
    # Their ranges overlap. Their elements need not: two columns of one matrix have none in common.
    # So each element of the first view is marked, and those of the second are looked up.
    size = one.untyped_storage().nbytes() // one.itemsize
    marks = torch.zeros(size, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(two.shape, two.stride(), two.storage_offset()).any())


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of a storage's elements that a view uses: the first, and one past it."""
    start = int(tensor.storage_offset())
    end = start + 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        end += (size - 1) * stride
    return start, end


def references(model: nn.Module) -> dict[str, weakref.ref[torch.Tensor]]:
    """Return weak references to the tensors that `move_to_device` is going to replace."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: weakref.ref(tensor) for name, tensor in named if can_be_filled(tensor)}


def check_replaced(originals: dict[str, weakref.ref[torch.Tensor]]) -> None:
    """UserError for a tensor that something still holds, though the modules have another now.

    Its holder would keep using a weight that is not trained.
    """
    gc.collect()
    left = [name for name, original in originals.items() if original() is not None]
    if left:
        raise UserError(
            f"FSDP replaces parameters and buffers, but something holds {left[0]} besides its "
            "module, such as a list, an object or a function: let it hold the module instead"
        )
