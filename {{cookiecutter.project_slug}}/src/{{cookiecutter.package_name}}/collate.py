"""How samples become a batch: they are stacked, and one line names a sample that cannot be."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, default_collate

from .errors import UserError
from .worker_errors import shortage

# What `default_collate` stacks; values of one key must be of one of these kinds.
KINDS = {
    "tensor": torch.Tensor,
    "array": np.ndarray,
    "number": (int, float, np.generic),
    "text": (str, bytes),
    "mapping": Mapping,
    "list": (list, tuple),
}
WAYS_OUT = (
    "Return tensors, arrays, numbers or text of the same shape in each sample (data.py), or a "
    "finished batch from `__getitems__`, or give the dataset `collate(samples) -> batch`"
)


def reads_batches(dataset: Any) -> bool:
    """Tell whether a dataset reads a batch at once, rather than sample after sample."""
    # torch's own wrappers have `__getitems__`, too, and read as the dataset does that they wrap.
    method = getattr(type(dataset), "__getitems__", None)
    if method is Subset.__getitems__:
        return reads_batches(dataset.dataset)
    if method is StackDataset.__getitems__:
        stacked = dataset.datasets
        if isinstance(stacked, dict):
            stacked = stacked.values()
        return any(reads_batches(each) for each in stacked)
    return hasattr(dataset, "__getitems__")


def batch_of(samples: list[Any], ids: Sequence[int], dataset: Any) -> Any:
    """Make a batch of samples: by the dataset's own `collate`, or by stacking them."""
    owner = owner_of("collate", dataset)
    if owner is not None:
        return owner.collate(samples)
    return collate(samples, ids)


def owner_of(method: str, dataset: Any) -> Any:
    """Return the dataset that has this method, within torch's wrappers; None without one.

    UserError where torch's wrapper has samples of several datasets, and not all have this method.
    """
    if hasattr(dataset, method):
        return dataset
    if isinstance(dataset, Subset):
        return owner_of(method, dataset.dataset)
    parts: list[Any] = []
    if isinstance(dataset, ConcatDataset):
        parts = list(dataset.datasets)
    elif isinstance(dataset, StackDataset):
        stacked = dataset.datasets
        parts = list(stacked.values() if isinstance(stacked, dict) else stacked)
    owners = [owner_of(method, part) for part in parts]
    if all(owner is None for owner in owners):
        return None
    functions = {function_of(owner, method) for owner in owners}
    # A batch of a ConcatDataset has samples of all of them, one of a StackDataset has pairs.
    if isinstance(dataset, ConcatDataset) and len(functions) == 1:
        return owners[0]
    kind = type(dataset).__name__
    names = ", ".join(type(part).__name__ for part in parts)
    raise UserError(
        f"`{method}` of a dataset in a {kind} (of {names}) would not be called: give the {kind} "
        f"itself `{method}` (a subclass of it, in data.py)"
    )


def function_of(owner: Any, method: str) -> Any:
    """Return the function behind a method, the same for all objects of a class."""
    bound = getattr(owner, method, None)
    return getattr(bound, "__func__", bound)


def collate(samples: list[Any], ids: Sequence[int]) -> Any:
    """Stack samples into a batch, as `default_collate` does; UserError names an odd sample.

    Samples that are dataclasses become one dataclass of stacked fields.
    """
    first = samples[0]
    is_plain_dataclass = is_dataclass(first) and not isinstance(first, Mapping)
    if is_plain_dataclass and all(type(sample) is type(first) for sample in samples):
        names = [field.name for field in fields(first)]
        as_dicts = [{name: getattr(sample, name) for name in names} for sample in samples]
        batch = copy.copy(first)
        for name, value in collate(as_dicts, ids).items():
            # A frozen one refuses a plain assignment.
            object.__setattr__(batch, name, value)
        return batch
    try:
        return default_collate(samples)
    # It raises errors of many types.
    except Exception as error:
        # In a loader worker it stacks into shared memory.
        line = shortage(error)
        if line:
            raise UserError(line) from None
        problem = odd_value(samples, ids, "") or str(error).strip().partition("\n")[0]
        raise UserError(
            f"the samples of a batch cannot be stacked: {problem}. {WAYS_OUT}"
        ) from None


def odd_value(values: list[Any], ids: Sequence[int], key: str) -> str:
    """Describe the value that keeps those of one key from being stacked; "" if there is none.

    `key` is "" for the samples themselves.
    """
    what = f"'{key}' of sample" if key else "sample"
    other = "that of sample" if key else "sample"
    first = values[0]
    pairs = list(zip(ids, values, strict=True))
    for sample_id, value in pairs:
        if value is None:
            return f"{what} {sample_id} is None"
    for sample_id, value in pairs:
        if kind_of(value) != kind_of(first):
            types = f"of type {type_name(value)}, {other} {ids[0]} of type {type_name(first)}"
            return f"{what} {sample_id} is {types}"
    if kind_of(first) not in KINDS:
        return f"{what} {ids[0]} is of type {type_name(first)}"
    if isinstance(first, np.ndarray) and first.dtype.kind not in "biuf":
        return f"{what} {ids[0]} is an array of dtype {first.dtype}"
    if isinstance(first, torch.Tensor | np.ndarray):
        for sample_id, value in pairs:
            if value.shape != first.shape:
                shape = f"has the shape {tuple(value.shape)}"
                return f"{what} {sample_id} {shape}, {other} {ids[0]} has {tuple(first.shape)}"
    if isinstance(first, list | tuple):
        for sample_id, value in pairs:
            if len(value) != len(first):
                length = f"has {len(value)} values"
                return f"{what} {sample_id} {length}, {other} {ids[0]} has {len(first)}"
        return odd_part(values, ids, {index: f"{key}[{index}]" for index in range(len(first))})
    if isinstance(first, Mapping):
        for sample_id, value in pairs:
            for name in first:
                if name not in value:
                    return f"{what} {sample_id} has no '{name}', {other} {ids[0]} has"
        return odd_part(values, ids, {name: f"{key}.{name}".lstrip(".") for name in first})
    return ""


def odd_part(values: list[Any], ids: Sequence[int], keys: Mapping[Any, str]) -> str:
    """Describe what cannot be stacked inside of lists or mappings, by the names of their keys."""
    for key, name in keys.items():
        problem = odd_value([value[key] for value in values], ids, name)
        if problem:
            return problem
    return ""


def kind_of(value: Any) -> str:
    """Return the kind of a value that can be stacked, or the type of any other."""
    for name, types in KINDS.items():
        if isinstance(value, types):
            return name
    return type_name(value)


def type_name(value: Any) -> str:
    """Return the full name of a value's type: PIL.Image.Image, dict."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"
