"""Collect the tensors of a checkpoint by name, and read files of tensors.

A checkpoint holds `{"model": {name: tensor}, "optimizer": {parameter: {key: tensor}}}`, with the
names of `model.state_dict()`. In memory the names are flat, as in "optimizer.norm.weight.exp_avg".
Loading a file runs no code from it, since only tensors are loaded. Everything else (step, samples,
settings, identity) is JSON in the manifest.
"""

import inspect
import math
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file as load_safetensors
from torch import nn

from ..distributed import Group, parallel
from ..ema import EMA
from ..errors import UserError
from ..files import read_json
from . import CheckpointError
from .manifest import reading

# Flat names such as "model.norm.weight", and their tensors.
Tensors = dict[str, torch.Tensor]
# A function that publishes the staged tensors of a step. Its arguments are the step and the facts
# for the manifest.
Job = Callable[[int, dict[str, Any]], None]
SAFETENSORS = ".safetensors"
# Prefixes of tensor names in a checkpoint, and the name of the note in a .pt file.
MODEL = "model."
OPTIMIZER = "optimizer."
NOTE = "note"
# The parts that peft inserts into names of weights, as in "layer.base_layer.weight".
ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.")
# Settings that this project, or a scheduler of torch, adds to an optimizer's groups. Like the other
# settings in these groups, they are not saved.
GROUP_SETTINGS = ("lr", "initial_lr", "rate_factor", "ema_decay", "matrices")


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a nested dictionary with its flat name, as in DCP; skip other values."""
    if not isinstance(tree, Mapping):
        return
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value
        else:
            yield from flat(value, f"{prefix}{key}.")


def nested(tensors: Tensors) -> dict[str, Any]:
    """Return the nested dictionary of a checkpoint: the inverse of `flat`."""
    model: dict[str, torch.Tensor] = {}
    optimizer: dict[str, Tensors] = {}
    for full_name, tensor in tensors.items():
        section, _, name = full_name.partition(".")
        if section == "model":
            model[name] = tensor
        else:
            # Such as the parameter "norm.weight" and the key "exp_avg".
            parameter, _, key = name.rpartition(".")
            optimizer.setdefault(parameter, {})[key] = tensor
    return {"model": model, "optimizer": optimizer}


def check_shapes(saved: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError if the saved tensor of a target is missing, or has another shape."""
    for name, target in targets.items():
        if name not in saved:
            raise CheckpointError(f"the saved tensors have no {name}")
        # Without this check, `copy_` would broadcast a smaller tensor to the target's shape.
        if saved[name].shape != target.shape:
            shapes = f"{list(saved[name].shape)}, expected {list(target.shape)}"
            raise CheckpointError(f"{name} has shape {shapes}")


class Source(Protocol):
    """Readable tensors: those of a checkpoint, or of a file of weights from anywhere.

    `forms` maps each name to a tensor that has the stored shape and dtype, but maybe no values.
    """

    path: Path
    forms: Tensors

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy values into tensors of the run; a sharded tensor gets only this rank's shard.

        Collective. Raises RankError, on every rank, if any rank fails.
        """


class OneFile:
    """Tensors in one file of `torch.save` or safetensors, or in a folder of safetensors.

    `forms` maps each name to its tensor. The tensors are memory-mapped if possible: then only
    `read` reads their values from disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forms: Tensors = {}
        with reading(path):
            for file in weight_files(path):
                for name, tensor in load_file(file):
                    if name in self.forms:
                        problem = f"several files in {path} have a tensor named {name}"
                        raise UserError(f"{problem}: give one file instead of the folder")
                    self.forms[name] = tensor

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy values into tensors of the run; a sharded tensor gets only this rank's shard.

        Collective. Raises RankError, on every rank, if any rank fails. A rank on which a tensor is
        missing or has another shape copies nothing, but other ranks may have copied theirs.
        """
        with group.together():
            check_shapes(self.forms, targets)
            for name, target in targets.items():
                target.copy_(parallel.shard_like(self.forms[name], target))


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights at a path: itself, or the safetensors in a folder."""
    if not path.is_dir():
        return [path]
    # A folder may also hold the same weights in other files. So take the files that the index
    # lists or, without an index, model.safetensors. If there is neither, take all safetensors.
    index = path / f"model{SAFETENSORS}.index.json"
    if index.is_file():
        file_of = read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise UserError(f"{index} has no weight_map: download the index again, or remove it")
        # Only the file name of each entry counts, so that no file outside the folder is read.
        names = {str(name) for name in file_of.values()}
        return [path / Path(name).name for name in sorted(names)]
    if (path / f"model{SAFETENSORS}").is_file():
        return [path / f"model{SAFETENSORS}"]
    return sorted(path.glob(f"*{SAFETENSORS}"))


def load_file(path: Path) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the names and tensors of a file, memory-mapped unless an old torch.save wrote it."""
    if path.suffix == SAFETENSORS:
        return load_safetensors(path).items()
    # Only the zip files of newer torch.save versions can be mapped.
    can_be_mapped = zipfile.is_zipfile(path)
    return flat(torch.load(path, map_location="cpu", weights_only=True, mmap=can_be_mapped))


def weight_names(stored: Iterable[str], expected: Iterable[str]) -> dict[str, str]:
    """Return a dictionary that maps names in a model to stored names of weights.

    `expected` are the names in the model. Stored weights that the model does not expect are in the
    result, too. A stored name may have a prefix ("model.", or DDP's "module."), which all weights
    share, and an infix (compile's "_orig_mod.").
    """
    expected = set(expected)
    # Maps a name without peft's parts to the expected names. These may be several, since peft
    # copies some layers.
    expected_by_plain_name: dict[str, list[str]] = {}
    for name in expected:
        expected_by_plain_name.setdefault(without_adapters(name), []).append(name)
    candidates: list[str] = []
    for name in stored:
        # A model may also have a weight whose name looks like that of optimizer state.
        is_weight = name != NOTE and not name.startswith(OPTIMIZER)
        if is_weight or name in expected:
            candidates.append(name)
    best: dict[str, str] = {}
    most = -1
    # Try to remove each possible prefix. The one that gives the most expected names is the best.
    # Many training scripts save the weights as "model" or "state_dict", next to other state.
    for outer in ("", MODEL, "state_dict."):
        for prefix in (outer, f"{outer}module."):
            names: dict[str, str] = {}
            for stored_name in candidates:
                name = stored_name.replace("_orig_mod.", "")
                if not name.startswith(prefix):
                    continue
                name = name.removeprefix(prefix)
                names[name] = stored_name
                # A model with adapters expects the weight under other names. But a tensor that is
                # itself stored under such a name takes precedence.
                for expected_name in expected_by_plain_name.get(name, []):
                    names.setdefault(expected_name, stored_name)
            fitting = len(names.keys() & expected)
            if fitting > most:
                best, most = names, fitting
    return best


def without_adapters(name: str) -> str:
    """Return the name of a weight as it was before peft wrapped its layer in an adapter."""
    return ADAPTED.sub(".", name.removeprefix("base_model.model."))


def is_named(name: str, names: tuple[str, ...]) -> bool:
    """Return whether `names` lists a tensor of this name, or a module that contains the tensor."""
    return any(name == each or name.startswith(f"{each}.") for each in names)


def optimizer_slots(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield, for each optimizer value to save, its name, the dictionary that has it, and its key.

    For example: "norm.weight.exp_avg", the optimizer's state of this parameter, and "exp_avg".
    """
    seen: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            # A tied weight has several names. Its EMA is saved under each of them, as the weight
            # is in `model.state_dict()`. The rest of its state is saved once.
            if value is not None and (parameter not in seen or key == EMA):
                yield f"{name}.{key}", state, key
        seen.add(parameter)
    # Some optimizers keep state such as a step counter in their groups, next to their settings.
    # Settings are not saved. They have the names of the constructor's arguments. An optimizer may
    # be composed of several (`optimizers`): then the arguments of each of these are settings, too.
    settings = set(GROUP_SETTINGS)
    for part in (optimizer, *getattr(optimizer, "optimizers", ())):
        # A class may take the arguments of its base class as **kwargs, so look at all base classes.
        for base in type(part).__mro__:
            settings |= inspect.signature(base).parameters.keys()
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            is_number = isinstance(value, int | float | torch.Tensor)
            if is_number and not isinstance(value, bool) and key not in settings:
                yield f"param_groups.{index}.{key}", group, key


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's state by name, as in "norm.weight.exp_avg"; numbers become tensors."""
    tensors: Tensors = {}
    for name, holder, key in optimizer_slots(model, optimizer):
        value = holder[key]
        if isinstance(value, float):
            value = torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, int):
            value = torch.tensor(value)
        elif not isinstance(value, torch.Tensor):
            raise UserError(
                f"the optimizer's state {name} is of type {type(value).__name__}, which cannot be "
                "saved: use an optimizer whose state is tensors and numbers"
            )
        tensors[name] = value
    return tensors


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer allocate its state: make a step with zero learning rate and gradients."""
    # Only the optimizer knows which tensors it keeps, and their shapes and dtypes. The step may
    # change its settings, which are restored below, and its state, which the caller overwrites.
    settings: list[dict[str, Any]] = []
    # Parameters of the same shape, strides, dtype and device share one gradient, since touching new
    # memory is slow.
    zeros: dict[Any, torch.Tensor] = {}
    for group in optimizer.param_groups:
        settings.append({key: value for key, value in group.items() if key != "params"})
        group["lr"] = 0.0
        for parameter in group["params"]:
            form = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if form not in zeros:
                zeros[form] = torch.zeros_like(parameter)
            parameter.grad = zeros[form]
    # A schedule-free optimizer, which has train() and eval(), can only step in training mode.
    schedule_free: Any = optimizer if hasattr(optimizer, "eval") else None
    if schedule_free is not None:
        schedule_free.train()
    optimizer.step()
    if schedule_free is not None:
        schedule_free.eval()
    for group, old_settings in zip(optimizer.param_groups, settings, strict=True):
        group.update(old_settings)
    optimizer.zero_grad(set_to_none=True)


def refuse_nan(tensors: Tensors, model: nn.Module) -> None:
    """Raise CheckpointError if any tensor has a NaN, or if a trained weight has an infinity."""
    # Training skips non-finite steps, so there should be no such values. If there were, the
    # checkpoint would still pass as good, and older checkpoints, which really are good, would be
    # removed. Buffers such as masks may be infinite.
    weights = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    for name, value in tensors.items():
        tensor = parallel.local_part(value).detach()
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # NumPy has neither bfloat16 nor float8. An element of float8 has one byte.
        numpy_has_dtype = tensor.dtype != torch.bfloat16 and tensor.itemsize > 1
        # The minimum and the maximum are NaN if any element is NaN.
        if tensor.device.type == "cpu" and numpy_has_dtype:
            # NumPy uses one thread. This code may run in the writer's thread, where a torch
            # operator would start a second OpenMP thread pool.
            array = tensor.numpy()
            extremes = [float(array.min()), float(array.max())]
        else:
            # torch cannot compare float8.
            if tensor.itemsize == 1:
                tensor = tensor.float()
            extremes = torch.stack(torch.aminmax(tensor)).tolist()
        for extreme in extremes:
            if math.isnan(extreme) or (math.isinf(extreme) and name in weights):
                raise CheckpointError(f"{name} has NaN or infinite values")


def shapes_and_dtypes(model: nn.Module) -> dict[str, list[Any]]:
    """Return the shape and dtype of each tensor in `state_dict()`; UserError for other values."""
    result: dict[str, list[Any]] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise UserError(
                f"{name} is not a tensor and cannot be saved: make it a buffer (register_buffer) "
                "instead of get_extra_state()"
            )
        # Such as [1000, 64, "float32"].
        result[name] = [*value.shape, str(value.dtype).removeprefix("torch.")]
    return result


def identity_differences(
    saved: Any, ours: dict[str, Any], there: str = "saved", here: str = "now"
) -> list[str]:
    """Describe each field that differs, with both values; `saved` may be any JSON value.

    In the texts, `there` follows a value of `saved` and `here` a value of `ours`.
    """
    differences: list[str] = []
    if not isinstance(saved, dict):
        saved = {}
    for field in sorted(saved.keys() | ours.keys()):
        old = saved.get(field)
        new = ours.get(field)
        if isinstance(old, dict) and isinstance(new, dict):
            # A dictionary may have many differences, such as the shapes of all tensors: describe
            # only three, and count the rest.
            changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            for key in changed[:3]:
                values = f"{old.get(key)!a:.100} {there}, {new.get(key)} {here}"
                differences.append(f"{field} {key!a:.100}: {values}")
            if len(changed) > 3:
                differences.append(f"{field}: {len(changed) - 3} more")
        elif old != new:
            # `ascii` escapes control characters. It also adds quotes, which the slice removes.
            name = ascii(field)[1:-1]
            differences.append(f"{name:.100}: {old!a:.100} {there}, {new} {here}")
    return differences


def require_same_identity(identity: dict[str, Any], group: Group) -> None:
    """Raise UserError, on every rank, if any rank's `identity` differs from rank 0's; collective.

    The identity has facts that must be equal, such as the number of samples and all shapes.
    """
    first = group.broadcast(identity)
    with group.together():
        problems = identity_differences(first, identity, "on rank 0", "here")
        if problems:
            raise UserError(
                f"rank {group.rank} differs from rank 0: {'; '.join(problems)}. All machines need "
                "the same code, settings and data"
            )


def offer_weights(path: Any, differences: list[str]) -> str:
    """Return text for an error: another run can start from the checkpoint's weights.

    Returns "" if the parameters differ, since then the weights do not fit.
    """
    # Each difference begins with the name of its field. The field "parameters" has the shapes and
    # dtypes of the model's tensors.
    if any(difference.startswith("parameters") for difference in differences):
        return ""
    return f", which starts from these weights with --init-from {path}"
