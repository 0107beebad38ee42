"""Refuse, by name, parameters that FSDP cannot shard or would train differently from DDP."""

import gc
import itertools
import weakref
from typing import Any

import torch
from torch import nn

from ..errors import UserError


def can_be_filled(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain one that `filled` (parallel.py) can copy.

    A plain tensor is dense, and neither sharded (a DTensor) nor of another subclass.
    """
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def named_tensors(module: nn.Module, kind: str) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters or buffers of a module itself, with their names.

    `kind` is "_parameters" or "_buffers". Unlike `named_parameters`, this names tied tensors twice.
    """
    return [(name, value) for name, value in getattr(module, kind).items() if value is not None]


def check_batch_norm(model: nn.Module) -> None:
    """Raise UserError for a batch norm that FSDP cannot train on a GPU in half precision."""
    # FSDP casts the weight of a batch norm to half precision, but not its running statistics. The
    # GPU kernels of BatchNorm2d and BatchNorm3d need one dtype for both.
    for name, module in model.named_modules():
        if not isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
            continue
        if module.weight is not None and module.running_mean is not None:
            raise UserError(
                f"{name} is a {type(module).__name__}, which FSDP trains on a GPU only in float32: "
                "add --train.precision fp32, use another norm (such as nn.GroupNorm), or create "
                "the project with parallelism=ddp"
            )


def check_shardable(model: nn.Module, units: list[nn.Module]) -> None:
    """Raise UserError for parameters that FSDP cannot shard, or would train differently from DDP.

    `units` are the modules that are sharded separately; the rest of the model is the last unit.
    """
    path_of = {module: path for path, module in model.named_modules()}
    # For each parameter, its name and unit where it was first found. A tied parameter is found more
    # than once.
    first: dict[torch.Tensor, tuple[str, nn.Module]] = {}
    # The name and dtype of the first trained parameter of each unit (the key is the unit), and of
    # each frozen parameter (the key is the parameter).
    dtypes: dict[Any, tuple[str, torch.dtype]] = {}
    for unit in [*units, model]:
        for module in own_modules(unit, units):
            for last_name, p in named_tensors(module, "_parameters"):
                name = f"{path_of[module]}.{last_name}".removeprefix(".")
                if p.ndim == 0:
                    raise UserError(f"FSDP cannot shard the scalar {name}: give it the shape [1]")
                if p._backward_hooks or p._post_accumulate_grad_hooks:
                    raise UserError(
                        f"FSDP would drop the gradient hook of {name}: do its work in forward (as "
                        "in weight * mask), or create the project with parallelism=ddp"
                    )
                other, other_unit = first.setdefault(p, (name, unit))
                if other_unit is not unit:
                    raise UserError(
                        f"FSDP would untie {other} and {name}, since they are in different blocks "
                        "of blocks(model) (model.py): leave out these blocks, or return a module "
                        "that contains both"
                    )
                # The trained parameters of a unit must have one dtype; frozen ones may have any.
                key = unit if p.requires_grad else p
                other, dtype = dtypes.setdefault(key, (name, p.dtype))
                if p.dtype != dtype:
                    raise UserError(
                        f"FSDP needs one dtype in a block, but {name} is {p.dtype} and {other} is "
                        f"{dtype}: give them the same dtype, or let blocks() also return the "
                        "module of one of them"
                    )


def own_modules(unit: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Return the modules inside a unit, without the modules of other units inside it."""
    inside = {*unit.modules()}
    of_others: set[nn.Module] = set()
    for other in units:
        if other is not unit and other in inside:
            of_others |= {*other.modules()}
    return [module for module in unit.modules() if module not in of_others]


def check_memory(model: nn.Module) -> None:
    """Raise UserError for a parameter that shares memory with another parameter or a buffer."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if can_be_filled(tensor):
            # `_cdata` identifies the storage: all views of one storage have the same value.
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    for held in by_storage.values():
        for (name, one), (other, two) in itertools.combinations(held, 2):
            any_parameter = isinstance(one, nn.Parameter) or isinstance(two, nn.Parameter)
            if any_parameter and overlap(one, two):
                raise UserError(
                    f"FSDP would separate {name} and {other}, which share memory: make them one "
                    "parameter, or compute one of them in forward"
                )


def overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two views of one storage share an element."""
    if one.dtype != two.dtype:
        # Offsets count elements, whose sizes may differ between dtypes. So assume an overlap.
        return True
    start_of_one, end_of_one = extent(one)
    start_of_two, end_of_two = extent(two)
    if end_of_one <= start_of_two or end_of_two <= start_of_one:
        return False
    # The ranges overlap, but the views may still share no element, such as two columns of a matrix.
    # So mark the elements of the first view, and look for marks among the elements of the second.
    size = one.untyped_storage().nbytes() // one.itemsize
    marks = torch.zeros(size, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(two.shape, two.stride(), two.storage_offset()).any())


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of storage elements that a view uses: the first, and one past the last."""
    start = int(tensor.storage_offset())
    end = start + 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        end += (size - 1) * stride
    return start, end


def references(model: nn.Module) -> dict[str, weakref.ref[torch.Tensor]]:
    """Return weak references to the tensors that `move_to_device` will replace."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: weakref.ref(tensor) for name, tensor in named if can_be_filled(tensor)}


def check_replaced(originals: dict[str, weakref.ref[torch.Tensor]]) -> None:
    """Raise UserError if something still refers to a tensor that was replaced.

    Code with such a reference would keep using a weight that is not trained.
    """
    # First free the tensors that only reference cycles keep alive.
    gc.collect()
    still_alive = [name for name, original in originals.items() if original() is not None]
    if still_alive:
        raise UserError(
            f"FSDP replaces parameters and buffers, but {still_alive[0]} is referenced outside its "
            "module, as in a list, an object or a function: reference the module instead"
        )
