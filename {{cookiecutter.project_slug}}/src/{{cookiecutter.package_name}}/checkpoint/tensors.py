"""Collect the tensors of a checkpoint by name, and read files of tensors.

A checkpoint holds `{"model": {name: tensor}, "optimizer": {parameter: {key: tensor}}}`, with the
names of `model.state_dict()`. In memory the names are flat, as in "optimizer.norm.weight.exp_avg".
No Python objects are pickled, and loading a file runs no code from it. Everything else (step,
samples, settings, identity) is JSON in the manifest.
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
# Publishes the staged tensors of a step; the facts go into its manifest.
Job = Callable[[int, dict[str, Any]], None]
SAFETENSORS = ".safetensors"
# Prefixes of tensor names in a checkpoint, and the name of the note in a .pt file.
MODEL = "model."
OPTIMIZER = "optimizer."
NOTE = "note"
# What peft inserts into the weight names of a layer that it adapts, or of which it trains a copy.
ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.")
# Settings that this project, or a scheduler of torch, sets in an optimizer's groups. They are not
# saved.
GROUP_SETTINGS = ("lr", "initial_lr", "rate_factor", "ema_decay", "matrices")


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a nested dictionary with flat names, as DCP does; skip other values."""
    if not isinstance(tree, Mapping):
        return
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value
        else:
            yield from flat(value, f"{prefix}{key}.")


def nested(tensors: Tensors) -> dict[str, Any]:
    """Return the nested dictionary that is saved: the inverse of `flat`."""
    model: dict[str, torch.Tensor] = {}
    optimizer: dict[str, Tensors] = {}
    for full_name, tensor in tensors.items():
        section, _, name = full_name.partition(".")
        if section == "model":
            model[name] = tensor
        else:
            parameter, _, key = name.rpartition(".")
            optimizer.setdefault(parameter, {})[key] = tensor
    return {"model": model, "optimizer": optimizer}


def check_shapes(saved: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError for a target that was not saved, or has another shape."""
    for name, target in targets.items():
        if name not in saved:
            raise CheckpointError(f"the saved tensors have no {name}")
        # Without this check, copying would broadcast a smaller tensor.
        if saved[name].shape != target.shape:
            shapes = f"{list(saved[name].shape)}, expected {list(target.shape)}"
            raise CheckpointError(f"{name} has shape {shapes}")


class Source(Protocol):
    """Readable tensors: those of a checkpoint, or of a file of weights from anywhere.

    `forms` maps each name to a tensor of its shape and dtype.
    """

    path: Path
    forms: Tensors

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy values into tensors of the run; into sharded tensors, only this rank's shard.

        Collective. Raises CheckpointError, on every rank, when any rank failed.
        """


class OneFile:
    """Tensors in one file of `torch.save` or safetensors, or in a folder of safetensors.

    `forms` are the tensors by name. They are memory-mapped; `read` reads their values.
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
        """Copy values into tensors of the run; into sharded tensors, only this rank's shard.

        Collective. If a tensor is missing or has another shape, raises CheckpointError on every
        rank before anything is copied.
        """
        with group.together():
            check_shapes(self.forms, targets)
            for name, target in targets.items():
                target.copy_(parallel.shard_like(self.forms[name], target))


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights at a path: itself, or the safetensors in a folder."""
    if not path.is_dir():
        return [path]
    # A folder may also hold the same weights in other files, so the index or model file decides.
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
    """Return the tensors of a file by name, memory-mapped unless an old torch.save wrote it."""
    if path.suffix == SAFETENSORS:
        return load_safetensors(path).items()
    # Only the zip files of newer torch.save versions can be mapped.
    can_be_mapped = zipfile.is_zipfile(path)
    return flat(torch.load(path, map_location="cpu", weights_only=True, mmap=can_be_mapped))


def weight_names(stored: Iterable[str], expected: Iterable[str]) -> dict[str, str]:
    """Map the names that a model may use for weights to their stored names."""
    # Stored names may have a prefix ("model.", DDP's "module.") or infix (compile's "_orig_mod.").
    # The prefix is removed whose removal gives the most expected names.
    expected = set(expected)
    # The expected names by their names without peft's adapters. One stored weight may have several,
    # since peft copies some layers.
    expected_by_plain_name: dict[str, list[str]] = {}
    for name in expected:
        expected_by_plain_name.setdefault(without_adapters(name), []).append(name)
    candidates: list[str] = []
    for name in stored:
        is_weight = name != NOTE and not name.startswith(OPTIMIZER)
        if is_weight or name in expected:
            candidates.append(name)
    best: dict[str, str] = {}
    most = -1
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
                # In a model with adapters, the weight has other names. A tensor that is stored
                # under such a name itself takes precedence.
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
    """Tell whether `names` lists a tensor, or a module that contains it."""
    return any(name == each or name.startswith(f"{each}.") for each in names)


def optimizer_slots(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each value that an optimizer saves: its name, the dictionary with it, and its key."""
    seen: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            # The state of tied weights is saved once, but their EMA under each of their names, like
            # the weights in `model.state_dict()`.
            if value is not None and (parameter not in seen or key == EMA):
                yield f"{name}.{key}", state, key
        seen.add(parameter)
    # Some optimizers keep state such as a step counter in their groups, next to their settings.
    # Settings are not saved: these are the constructor's arguments, including those of the parts
    # of an optimizer that is composed of several (`optimizers`).
    settings = set(GROUP_SETTINGS)
    for part in (optimizer, *getattr(optimizer, "optimizers", ())):
        # A class may take arguments of its base only as **kwargs, so look at all bases.
        for base in type(part).__mro__:
            settings |= inspect.signature(base).parameters.keys()
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            is_number = isinstance(value, int | float | torch.Tensor)
            if is_number and not isinstance(value, bool) and key not in settings:
                yield f"param_groups.{index}.{key}", group, key


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's state by parameter name and key, numbers as scalar tensors."""
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
    """Make the optimizer allocate its state, by a step with zero learning rate and gradients."""
    # Only the optimizer knows which tensors it keeps, with which shapes and dtypes. Its settings
    # are restored afterwards; the checkpoint overwrites the state.
    settings: list[dict[str, Any]] = []
    # Parameters of the same form share one gradient, since touching new memory is slow.
    zeros: dict[Any, torch.Tensor] = {}
    for group in optimizer.param_groups:
        settings.append({key: value for key, value in group.items() if key != "params"})
        group["lr"] = 0.0
        for parameter in group["params"]:
            form = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if form not in zeros:
                zeros[form] = torch.zeros_like(parameter)
            parameter.grad = zeros[form]
    # A schedule-free optimizer, which has train() and eval(), only steps in training mode.
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
    """Raise CheckpointError for a NaN in any tensor, or an infinity in a trained weight."""
    # Non-finite steps are skipped, so there should be none. But a checkpoint with them would
    # verify, and retention would remove the good ones. Buffers such as masks may be infinite.
    weights = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    for name, value in tensors.items():
        tensor = parallel.local_part(value).detach()
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # NumPy has neither bfloat16 nor float8, which has one byte.
        numpy_has_dtype = tensor.dtype != torch.bfloat16 and tensor.itemsize > 1
        # The minimum and the maximum are NaN if any element is.
        if tensor.device.type == "cpu" and numpy_has_dtype:
            # NumPy uses one thread. A torch operator in the writer's thread would start a second
            # OpenMP thread pool.
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
    """Return the shape and dtype of each tensor that a model saves; UserError for other values."""
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

    `there` and `here` say where the values of `saved` and `ours` are from.
    """
    differences: list[str] = []
    if not isinstance(saved, dict):
        saved = {}
    for field in sorted(saved.keys() | ours.keys()):
        old = saved.get(field)
        new = ours.get(field)
        if isinstance(old, dict) and isinstance(new, dict):
            # A dictionary can be large, such as that of all shapes: name only three differences.
            changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            for key in changed[:3]:
                values = f"{old.get(key)!a:.100} {there}, {new.get(key)} {here}"
                differences.append(f"{field} {key!a:.100}: {values}")
            if len(changed) > 3:
                differences.append(f"{field}: {len(changed) - 3} more")
        elif old != new:
            # `ascii` escapes control characters, and adds quotes.
            name = ascii(field)[1:-1]
            differences.append(f"{name:.100}: {old!a:.100} {there}, {new} {here}")
    return differences


def require_same_identity(identity: dict[str, Any], group: Group) -> None:
    """Raise UserError, on every rank, if the data or model of one differs from rank 0's."""
    first = group.broadcast(identity)
    with group.together():
        problems = identity_differences(first, identity, "on rank 0", "here")
        if problems:
            raise UserError(
                f"rank {group.rank} differs from rank 0: {'; '.join(problems)}. All machines need "
                "the same code, settings and data"
            )


def offer_weights(path: Any, differences: list[str]) -> str:
    """Return how another run can start from a checkpoint's weights; "" if parameters differ."""
    # A difference begins with its field; "parameters" are the shapes and dtypes of the model.
    if any(difference.startswith("parameters") for difference in differences):
        return ""
    return f", which starts from these weights with --init-from {path}"
