"""Stack samples into a batch; if stacking fails, a one-line error names the sample at fault."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, default_collate

from .errors import UserError
from .worker_errors import shortage

# Kinds of values that `default_collate` stacks, with their types. Within a batch, the values that
# all samples have for a key, such as "image", must be of the same kind.
KINDS = {
    "tensor": torch.Tensor,
    "array": np.ndarray,
    "number": (int, float, np.generic),
    "text": (str, bytes),
    "mapping": Mapping,
    "list": (list, tuple),
}
WAYS_OUT = (
    "In data.py, return tensors, arrays, numbers or text of the same shape in each sample, or "
    "return a whole batch from `__getitems__`, or give the dataset `collate(samples) -> batch`"
)


def reads_batches(dataset: Any) -> bool:
    """Return whether a dataset reads a batch at once instead of one sample at a time."""
    # Subset and StackDataset always have torch's `__getitems__`, so ask the datasets inside them.
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
    """Make a batch of samples with the dataset's own `collate`, or by stacking them."""
    owner = owner_of("collate", dataset)
    if owner is not None:
        return owner.collate(samples)
    return collate(samples, ids)


def owner_of(method: str, dataset: Any) -> Any:
    """Return the dataset, or one inside torch's wrappers, that has this method; otherwise None.

    Raises UserError if only datasets inside a wrapper have the method, and it does not suit the
    samples of the wrapper.
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
    # This also returns for a dataset that is not a wrapper, since it has no parts.
    if all(owner is None for owner in owners):
        return None
    # A part without the method adds None, so it differs from parts with the method.
    functions = {function_of(owner, method) for owner in owners}
    # A batch of a ConcatDataset mixes samples of all parts, so they must share one function. A
    # sample of a StackDataset combines a sample of each part, so the method of one part cannot
    # handle it.
    if isinstance(dataset, ConcatDataset) and len(functions) == 1:
        return owners[0]
    kind = type(dataset).__name__
    names = ", ".join(type(part).__name__ for part in parts)
    raise UserError(
        f"`{method}` of a dataset inside a {kind} (of {names}) would not be called: define "
        f"`{method}` in a subclass of {kind} (data.py)"
    )


def function_of(owner: Any, method: str) -> Any:
    """Return the function behind a bound method: all objects of a class share the function."""
    bound = getattr(owner, method, None)
    return getattr(bound, "__func__", bound)


def collate(samples: list[Any], ids: Sequence[int]) -> Any:
    """Stack samples into a batch with `default_collate`; a UserError names a sample at fault.

    Samples that are dataclasses become one dataclass of stacked fields.
    """
    first = samples[0]
    # `default_collate` itself handles a dataclass that is also a mapping.
    is_plain_dataclass = is_dataclass(first) and not isinstance(first, Mapping)
    if is_plain_dataclass and all(type(sample) is type(first) for sample in samples):
        names = [field.name for field in fields(first)]
        as_dicts = [{name: getattr(sample, name) for name in names} for sample in samples]
        batch = copy.copy(first)
        for name, value in collate(as_dicts, ids).items():
            # A frozen dataclass does not allow plain assignment.
            object.__setattr__(batch, name, value)
        return batch
    try:
        return default_collate(samples)
    # `default_collate` raises errors of many types.
    except Exception as error:
        # In a loader worker, `default_collate` stacks into shared memory, which may be full.
        message = shortage(error)
        if message:
            raise UserError(message) from None
        problem = odd_value(samples, ids, "")
        if not problem:
            problem = str(error).strip().partition("\n")[0]
        raise UserError(
            f"the samples of a batch cannot be stacked: {problem}. {WAYS_OUT}"
        ) from None


def odd_value(values: list[Any], ids: Sequence[int], key: str) -> str:
    """Describe the first value that cannot be stacked with the others; "" if there is none.

    `values` are those that the samples with these `ids` have for `key`, such as "image". If `key`
    is "", they are the samples themselves.
    """
    # For example: "'image' of sample 7 is of type list, that of sample 3 of type dict".
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
    # These letters are NumPy's kinds: booleans, signed and unsigned integers, and floats.
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
    """Describe a value inside lists or mappings that cannot be stacked; "" if there is none.

    `keys` maps each key or index of such a list or mapping to its full name, for example "image" to
    "inputs.image".
    """
    for key, name in keys.items():
        problem = odd_value([value[key] for value in values], ids, name)
        if problem:
            return problem
    return ""


def kind_of(value: Any) -> str:
    """Return the kind of a value, a key of KINDS; if it has none, return the name of its type."""
    for name, types in KINDS.items():
        if isinstance(value, types):
            return name
    return type_name(value)


def type_name(value: Any) -> str:
    """Return the full name of a value's type, such as PIL.Image.Image or dict."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"
