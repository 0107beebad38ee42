"""What a checkpoint holds, tensors by name, and how files of tensors are read.

`{"model": {name: tensor}, "optimizer": {parameter: {key: tensor}}}`: tensors only, under the names
that `model.state_dict()` gives. In memory each has one name, as in "optimizer.norm.weight.exp_avg".
No Python object is pickled, and no code in a file runs; the rest (step, samples, settings,
identity) is JSON in the manifest.
"""

import inspect
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
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

# By names as in "model.norm.weight".
Tensors = dict[str, torch.Tensor]
SAFETENSORS = ".safetensors"
# The beginnings of tensors' names in a checkpoint, and the name of the note in a .pt file.
MODEL = "model."
OPTIMIZER = "optimizer."
NOTE = "note"
# What peft puts into the names of the weights of a layer that it adapts, or trains a copy of.
ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.")
# Entries of an optimizer's groups that this project sets and does not save.
GROUP_SETTINGS = ("lr", "initial_lr", "rate_factor", "ema_decay", "matrices")


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a nested dictionary by the names that DCP gives them."""
    if not isinstance(tree, Mapping):
        return
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value
        else:
            yield from flat(value, f"{prefix}{key}.")


def nested(tensors: Tensors) -> dict[str, Any]:
    """Return the nested dictionary that is saved: the opposite of `flat`."""
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
    """CheckpointError for a target that was not saved, or with another shape."""
    for name, target in targets.items():
        if name not in saved:
            raise CheckpointError(f"there is no {name} in what was saved")
        # Without this check, copying would repeat a smaller one.
        if saved[name].shape != target.shape:
            shapes = f"{list(saved[name].shape)}, wanted {list(target.shape)}"
            raise CheckpointError(f"{name} is {shapes}")


class Source(Protocol):
    """Tensors that can be read: those of a checkpoint, or of a file that anybody has written.

    `forms` are tensors of their shapes and dtypes, by name.
    """

    path: Path
    forms: Tensors

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy values into tensors of the run, of sharded ones the shards of this rank.

        Collective. CheckpointError, on every rank, when any rank failed.
        """


class OneFile:
    """Tensors in one file, of `torch.save` or of safetensors, or in a folder of the latter.

    `forms` are the tensors by name. They are mapped: `read` reads their values.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forms: Tensors = {}
        with reading(path):
            for file in weight_files(path):
                for name, tensor in load_file(file):
                    if name in self.forms:
                        problem = f"{path} has tensors of the same name in several files"
                        raise UserError(f"{problem}: give one")
                    self.forms[name] = tensor

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy values into tensors of the run, of sharded ones the shards of this rank.

        Collective. CheckpointError, on every rank, before anything is copied if a tensor is missing
        or has another shape.
        """
        with group.together():
            check_shapes(self.forms, targets)
            for name, target in targets.items():
                target.copy_(parallel.shard_like(self.forms[name], target))


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights at a path: itself, or the safetensors in a folder."""
    if not path.is_dir():
        return [path]
    # Beside the files of the index, or the one file, a folder may have the same weights again.
    index = path / f"model{SAFETENSORS}.index.json"
    if index.is_file():
        file_of = read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise UserError(f"{index} has no weight_map")
        return [path / Path(name).name for name in sorted(set(map(str, file_of.values())))]
    if (path / f"model{SAFETENSORS}").is_file():
        return [path / f"model{SAFETENSORS}"]
    return sorted(path.glob(f"*{SAFETENSORS}"))


def load_file(path: Path) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the tensors of a file by name, mapped unless it is of an old torch.save."""
    if path.suffix == SAFETENSORS:
        return load_safetensors(path).items()
    # Before torch.save wrote zip files, what it wrote cannot be mapped.
    can_be_mapped = zipfile.is_zipfile(path)
    return flat(torch.load(path, map_location="cpu", weights_only=True, mmap=can_be_mapped))


def weight_names(stored: Iterable[str], expected: Iterable[str]) -> dict[str, str]:
    """Return the stored names of weights, by the names that a model may have for them."""
    # Files differ in what they put before a name ("model.", DDP's "module.") or inside (compile's
    # "_orig_mod."): the prefix that leaves most of the expected names is taken off.
    expected = set(expected)
    # Several expected names may be one stored name, since an adapter of peft copies some layers.
    expected_by_plain_name: dict[str, list[str]] = {}
    for name in expected:
        expected_by_plain_name.setdefault(without_adapters(name), []).append(name)
    candidates: list[str] = []
    for name in stored:
        if name in expected or not name.startswith((NOTE, OPTIMIZER)):
            candidates.append(name)
    best: dict[str, str] = {}
    most = -1
    for outer in ("", MODEL, "state_dict."):
        for prefix in (outer, f"{outer}module."):
            names: dict[str, str] = {}
            for full_name in candidates:
                name = full_name.replace("_orig_mod.", "")
                if not name.startswith(prefix):
                    continue
                name = name.removeprefix(prefix)
                names[name] = full_name
                # Under its own name, a tensor that is stored goes before one of the base.
                for expected_name in expected_by_plain_name.get(name, []):
                    names.setdefault(expected_name, full_name)
            fitting = len(names.keys() & expected)
            if fitting > most:
                best, most = names, fitting
    return best


def without_adapters(name: str) -> str:
    """Return the name of a weight as it was before peft put its layer into an adapter."""
    return ADAPTED.sub(".", name.removeprefix("base_model.model."))


def is_named(name: str, names: tuple[str, ...]) -> bool:
    """Tell whether a tensor is one of those that are named, or in a module that is."""
    return any(name == each or name.startswith(f"{each}.") for each in names)


def optimizer_slots(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield what any optimizer saves: the name of each value, its dictionary, and its key there."""
    seen: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            # The state of tied weights is saved once; their average under each of the names, as
            # `model.state_dict()` has the weights.
            if value is not None and (parameter not in seen or key == EMA):
                yield f"{name}.{key}", state, key
        seen.add(parameter)
    # Some optimizers count their steps in their groups, beside their settings. Settings are not
    # saved: they are the arguments of the class, or of the classes of `optimizers` where an
    # optimizer is made of several.
    settings = set(GROUP_SETTINGS)
    settings |= inspect.signature(type(optimizer)).parameters.keys()
    for one in getattr(optimizer, "optimizers", ()):
        settings |= inspect.signature(type(one)).parameters.keys()
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
            raise UserError(f"optimizer state can be tensors and numbers; {name} is {type(value)}")
        tensors[name] = value
    return tensors


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer allocate its state, by a step that changes nothing worth keeping."""
    # Only the optimizer itself knows which tensors it keeps, and of which shapes and dtypes. It
    # takes a step with a learning rate and gradients of 0, after which its settings are restored.
    settings: list[dict[str, Any]] = []
    # Parameters that are alike share one gradient, since the first touch of memory takes long.
    zeros: dict[Any, torch.Tensor] = {}
    for group in optimizer.param_groups:
        settings.append({key: value for key, value in group.items() if key != "params"})
        group["lr"] = 0.0
        for parameter in group["params"]:
            form = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if form not in zeros:
                zeros[form] = torch.zeros_like(parameter)
            parameter.grad = zeros[form]
    schedule_free: Any = optimizer if hasattr(optimizer, "eval") else None
    if schedule_free is not None:
        schedule_free.train()
    optimizer.step()
    if schedule_free is not None:
        schedule_free.eval()
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        group.update(before)
    optimizer.zero_grad(set_to_none=True)


def refuse_nan(tensors: Tensors, model: nn.Module) -> None:
    """CheckpointError for a NaN in any tensor, or an infinity in a trained weight of the model."""
    # Steps that are not finite are skipped, so there should be none; but a checkpoint with them
    # would verify, and push out the good ones. Buffers may be infinite, as masks are.
    weights = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    for name, value in tensors.items():
        tensor = parallel.local_part(value).detach()
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # The smallest and the largest element, which are NaN if any element is.
        numpy_knows_it = tensor.dtype != torch.bfloat16 and tensor.itemsize > 1
        if tensor.device.type == "cpu" and numpy_knows_it:
            # numpy stays on one thread. A torch operator in the writer's thread would start a
            # second pool of threads.
            array = tensor.numpy()
            extremes = [float(array.min()), float(array.max())]
        else:
            # float8 cannot be compared.
            if tensor.itemsize == 1:
                tensor = tensor.float()
            extremes = torch.stack(torch.aminmax(tensor)).tolist()
        for extreme in extremes:
            if math.isnan(extreme) or (math.isinf(extreme) and name in weights):
                raise CheckpointError(f"{name} is not finite")


def shapes_and_dtypes(model: nn.Module) -> dict[str, list[Any]]:
    """Return the shape and dtype of each tensor that a model saves; UserError for other values."""
    result: dict[str, list[Any]] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise UserError(f"only tensors can be checkpointed; {name} is extra state of a module")
        result[name] = [*value.shape, str(value.dtype).removeprefix("torch.")]
    return result


def identity_differences(
    saved: Any, ours: dict[str, Any], there: str = "saved", here: str = "now"
) -> list[str]:
    """Return each field that differs, with both values; `saved` may be anything out of JSON."""
    differences: list[str] = []
    if not isinstance(saved, dict):
        saved = {}
    for field in sorted(saved.keys() | ours.keys()):
        old = saved.get(field)
        new = ours.get(field)
        if isinstance(old, dict) and isinstance(new, dict):
            # A dictionary can be large, as that of all shapes is: three differences are named.
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            for key in keys[:3]:
                values = f"{old.get(key)!a:.100} {there}, {new.get(key)} {here}"
                differences.append(f"{field} {key!a:.100}: {values}")
            if len(keys) > 3:
                differences.append(f"{field}: {len(keys) - 3} more")
        elif old != new:
            differences.append(f"{ascii(field)[1:-1]:.100}: {old!a:.100} {there}, {new} {here}")
    return differences


def require_same_identity(identity: dict[str, Any], group: Group) -> None:
    """UserError, on every rank, when one has other data or another model than rank 0."""
    first = group.broadcast(identity)
    with group.together():
        problems = identity_differences(first, identity, "on rank 0", "here")
        if problems:
            raise UserError(
                f"rank {group.rank} is not of the same run as rank 0: {'; '.join(problems)}. All "
                "machines need the same code, settings and data"
            )


def offer_weights(path: Any, differences: list[str]) -> str:
    """Return how another run begins with a checkpoint's weights, if the parameters are alike."""
    if any(difference.startswith("parameters") for difference in differences):
        return ""
    return f", which begins with these weights by --init-from {path}"
