"""Build a model without initializing the weights that --init-from will load.

A matrix whose shape occurs in the files is built on torch's `meta` device, without memory and
without random initialization. Later the matrix is allocated on its real device (with FSDP, only
this rank's shard), and resume.py reads its values.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from .checkpoint.base import is_plain_weights
from .checkpoint.tensors import OneFile, Tensors, is_named, weight_names
from .device import READ_LATER, meta_tensors, random_states, set_random_states
from .distributed import Group, World, parallel

log = logging.getLogger(__name__)


def build_without_values(
    make: Callable[[], nn.Module], path: Path, new: tuple[str, ...], world: World
) -> nn.Module:
    """Build a model whose weights, except those in `new`, are later read from `path`; collective.

    If this is not possible, the model is built with initial values, as without --init-from. If the
    attempt raised an error, the log says which one.
    """
    states = random_states()
    problem = ""
    model: Any = None
    try:
        # Only plain weights can be read later without a check. A run or a checkpoint may lack
        # weights, and must be verified first. For these, and for a folder that lacks files,
        # `is_plain_weights` returns False: `model` stays None, and the model is built with values
        # below. For the folder, resume.py later raises the error.
        if is_plain_weights(path):
            # The tensors of the file or files by name, memory-mapped.
            stored = OneFile(path).forms
            model = build_on_meta(make, stored, new)
    # The user's code may raise anything.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
    # Files may be missing on some machines. If one rank cannot build without values, no rank does.
    if Group(world).any(model is None):
        if problem:
            log.info("the model is initialized before %s is read: %s", path, problem)
        # A failed attempt may have drawn random numbers.
        set_random_states(states)
        return parallel.build(make, world)
    # With FSDP, `parallel.wrap` allocates the parameters and keeps only this rank's shards.
    if not (parallel.SHARDED and world.distributed):
        allocate(model, world.device)
    return model


def build_on_meta(
    make: Callable[[], nn.Module], stored: Tensors, new: tuple[str, ...]
) -> nn.Module:
    """Build a model whose matrices are on `meta` if `stored` has values for them.

    Raises ValueError if a tensor on `meta` has no stored value.
    """
    shapes: set[torch.Size] = set()
    for name, tensor in stored.items():
        if tensor.ndim > 1 and not is_named(name, new):
            shapes.add(tensor.shape)
            # Some libraries store the transposed matrix.
            shapes.add(tensor.transpose(-1, -2).shape)

    def drop_value(module: nn.Module, name: str, parameter: Any) -> None:
        """Move a parameter to `meta` when a module registers it, without replacing the object."""
        is_plain = type(parameter) is nn.Parameter and parameter.layout == torch.strided
        if is_plain and not parameter.is_meta and parameter.shape in shapes:
            move(parameter, torch.device("meta"))

    # The ids of tensors that may be on `meta`: those that were there before, and the parameters
    # that are read later, which are added below.
    known = {id(tensor) for tensor in meta_tensors()}
    hook = register_module_parameter_registration_hook(drop_value)
    try:
        with KeepValues():
            model = make()
    finally:
        hook.remove()

    if hasattr(model, "from_transformers"):
        rename: Any = model.from_transformers
        stored = rename(stored)
    # Maps names in the model to names in the files.
    stored_names = weight_names(stored, [*model.state_dict()])
    # Parameters whose values are read later. A tied parameter has several names, and may be stored
    # under any of them.
    to_read: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_stored = name in stored_names and stored[stored_names[name]].shape == parameter.shape
        if is_stored and not is_named(name, new):
            to_read.add(parameter)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            if parameter not in to_read:
                raise ValueError(f"{name} has the shape of a tensor in the files, but is not read")
            vars(parameter)[READ_LATER] = True
            known.add(id(parameter))
    # Any other tensor on `meta` was computed from a parameter on `meta`, so its values are lost.
    if any(id(tensor) not in known for tensor in meta_tensors()):
        raise ValueError("build_model computes something from its parameters")
    return model


class KeepValues(TorchFunctionMode):
    """Makes `tensor.to(...)` change only the dtype of a tensor that it would move to `meta`.

    Otherwise the tensor would lose its values. For example, peft moves each adapter to the device
    of the layer that it adapts, which is `meta` here.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        result = function(*arguments, **(named or {}))
        if function is torch.Tensor.to:
            tensor = arguments[0]
            if result.is_meta and not tensor.is_meta:
                return tensor.to(result.dtype)
        return result


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate memory for parameters on `meta`, without initializing it."""
    for parameter in model.parameters():
        if parameter.is_meta:
            move(parameter, device)


def move(parameter: nn.Parameter, device: torch.device) -> None:
    """Move a parameter to a device without its values; the Parameter object stays the same."""
    moved = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    # The swap also exchanges the attributes, so copy them to `moved` first.
    vars(moved).update(vars(parameter))
    hooks = parameter._backward_hooks
    late_hooks = parameter._post_accumulate_grad_hooks
    swap_tensors(parameter, moved)
    # After the swap, autograd does not know the hooks until they are set again.
    if hooks:
        parameter._backward_hooks = hooks
    if late_hooks:
        parameter._post_accumulate_grad_hooks = late_hooks
