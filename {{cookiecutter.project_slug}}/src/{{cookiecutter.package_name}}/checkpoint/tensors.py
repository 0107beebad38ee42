"""What a checkpoint holds: tensors by name.

`{"model": {name: tensor}, "optimizer": {parameter: {key: tensor}}}`: tensors only, under the names
that `model.state_dict()` gives. In memory each has one name, as in "optimizer.norm.weight.exp_avg".
No Python object is pickled, so none has to be unpickled; the rest (step, samples, schedule,
identity) is JSON in the manifest.
"""

import inspect
import math
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..distributed import parallel
from ..ema import EMA
from ..errors import UserError
from . import CheckpointError

Tensors = dict[str, torch.Tensor]  # by names as in "model.norm.weight"
GROUPS = "param_groups."  # by place: what an optimizer keeps in its groups


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a nested dictionary by the names that DCP gives them."""
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value
        else:
            yield from flat(value, f"{prefix}{key}.")


def nested(tensors: Tensors) -> dict[str, Any]:
    """The dictionary that is saved: the opposite of `flat`."""
    tree: dict[str, Any] = {"model": {}, "optimizer": {}}
    for full, tensor in tensors.items():
        kind, _, name = full.partition(".")
        if kind == "model":
            tree[kind][name] = tensor
        else:
            parameter, _, key = name.rpartition(".")
            tree[kind].setdefault(parameter, {})[key] = tensor
    return tree


def printable(name: str) -> str:
    """A name as it is; UnpicklingError if it would break the line in which it is printed."""
    if not name.isprintable():
        raise pickle.UnpicklingError(f"{name!a:.200} is no name for a tensor")
    return name


def check_shapes(saved: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """CheckpointError for a target that was not saved, or with another shape."""
    for name, target in targets.items():
        if name not in saved:
            raise CheckpointError(f"there is no {name} in what was saved")
        if saved[name].shape != target.shape:  # copying would repeat a smaller one
            shapes = f"{list(saved[name].shape)}, wanted {list(target.shape)}"
            raise CheckpointError(f"{name} is {shapes}")


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of an unwrapped model, sharing its memory."""
    tensors = model.state_dict()
    if odd := [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
        raise UserError(f"only tensors can be checkpointed; {odd[0]} is extra state of a module")
    return dict(tensors)


def forms_of(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Shape and dtype of each tensor, as a manifest has them."""
    return {
        name: [*tensor.shape, str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in tensors.items()
    }


def optimizer_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """What any optimizer keeps: names, the dictionaries it is in, and the keys to save there.

    That is its state of each parameter, and the counts that it writes into its groups (some
    optimizers count their steps there), but no settings: those are in the signature of its class.
    """
    first: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            keys = [key for key, value in state.items() if value is not None]
            # Of tied weights, the average by each name, as `model.state_dict()` has the weights.
            yield name, state, [key for key in keys if parameter not in first or key == EMA]
            first.add(parameter)
    scheduled = {"lr", "initial_lr", "rate_factor", "ema_decay"}
    settings = scheduled | inspect.signature(type(optimizer)).parameters.keys()
    for place, group in enumerate(optimizer.param_groups):
        values = {k: v for k, v in group.items() if isinstance(v, int | float | torch.Tensor)}
        if own := [k for k, v in values.items() if k not in settings and not isinstance(v, bool)]:
            yield f"{GROUPS}{place}", group, own


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state, by parameter name and key; numbers come as scalar tensors."""
    tensors: Tensors = {}
    for name, holder, keys in optimizer_parts(model, optimizer):
        for key in keys:
            value = holder[key]
            if isinstance(value, int | float):
                value = torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
            elif not isinstance(value, torch.Tensor):
                what = f"{name} {key} is a {type(value)}"
                raise UserError(f"optimizer state can be tensors and numbers; {what}")
            tensors[f"{name}.{key}"] = value
    return tensors


def put_back_numbers(tensors: Tensors, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the plain numbers that were read into scalar tensors."""
    for name, holder, keys in optimizer_parts(model, optimizer):
        for key in keys:
            if isinstance(value := holder[key], int | float):
                holder[key] = type(value)(tensors[f"optimizer.{name}.{key}"].item())


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer allocate its state, by a step that changes nothing worth keeping."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    # One gradient serves all: memory that is touched for the first time costs more than the step.
    plain = [p for p in parameters if type(p.data) is torch.Tensor and p.is_contiguous()]
    zeros: dict[Any, torch.Tensor] = {}
    for parameter in sorted(plain, key=torch.numel, reverse=True):
        kind = parameter.dtype, parameter.device
        if kind not in zeros:
            zeros[kind] = torch.zeros_like(parameter).view(-1)
        parameter.grad = zeros[kind][: parameter.numel()].view_as(parameter)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)
    optimizer.zero_grad(set_to_none=True)


def refuse_nan(tensors: Tensors, model: nn.Module) -> None:
    """CheckpointError for a NaN in any tensor, or an infinity in a trained weight of the model.

    Steps that are not finite are skipped, so there should be none; but a checkpoint with them would
    verify, and push out the good ones. Buffers may be infinite, as masks are.
    """
    weights = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    for name, value in tensors.items():
        tensor = parallel.local_part(value).detach()
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        numpy_knows = tensor.dtype != torch.bfloat16 and tensor.itemsize > 1
        if tensor.device.type == "cpu" and numpy_knows:
            array = tensor.numpy()  # on one thread: a torch operator would start a pool of threads
            extremes = [float(array.min()), float(array.max())]
        else:
            wide = tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no order
            extremes = torch.stack(torch.aminmax(wide)).tolist()
        if any(math.isnan(x) or (name in weights and math.isinf(x)) for x in extremes):
            raise CheckpointError(f"{name} is not finite")


def identity_differences(
    saved: Any, ours: dict[str, Any], there: str = "saved", here: str = "now"
) -> list[str]:
    """Name each field that differs, with both values; `saved` may be anything out of JSON."""
    differences = []
    saved = saved if isinstance(saved, dict) else {}
    for field in sorted(saved.keys() | ours.keys()):
        theirs, mine = saved.get(field), ours.get(field)
        if isinstance(theirs, dict) and isinstance(mine, dict):
            differing = [k for k in {**theirs, **mine} if theirs.get(k) != mine.get(k)]
            for key in differing[:3]:
                old, new = shown(theirs.get(key, "not")), mine.get(key, "not there")
                differences.append(f"{field} {shown(key)}: {old} {there}, {new} {here}")
            if len(differing) > 3:
                differences.append(f"{field}: {len(differing) - 3} more")
        elif theirs != mine:
            differences.append(f"{shown(field)}: {shown(theirs)} {there}, {mine} {here}")
    return differences


def offer_weights(path: Any, differences: list[str]) -> str:
    """How another run begins with a checkpoint's weights, if the parameters do not differ."""
    if any(difference.startswith("parameters") for difference in differences):
        return ""
    return f", which begins with these weights by --init-from {path}"


def shown(value: Any) -> str:
    """A value that a stranger may have chosen, as it can be printed."""
    text = f"{value}"
    return f"{text if text.isprintable() else ascii(text):.100}"
