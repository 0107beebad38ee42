"""Checks of what is saved and restored."""

import math
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..fingerprint import of_files
from .manifest import CheckpointError
from .remote import Place, RemotePath


def refuse_odd_numbers(
    tensors: Iterable[tuple[tuple[str, ...], torch.Tensor]], weights: Set[str]
) -> None:
    """CheckpointError for a NaN in any tensor, or an infinity in one of the trained `weights`.

    Steps that are not finite are skipped, so there should be none; but a checkpoint with them would
    verify, and push out the good ones. Buffers may be infinite, as masks are.
    """
    for (kind, name, *rest), value in tensors:
        tensor = (value.to_local() if isinstance(value, DTensor) else value).detach()
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16:
            array = tensor.numpy()  # on one thread, as staging.copy_on_one_core does it
            extremes = [float(array.min()), float(array.max())]
        else:
            wide = tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no order
            extremes = torch.stack(torch.aminmax(wide)).tolist()
        weight = kind == "model" and name in weights
        if any(math.isnan(x) or (weight and math.isinf(x)) for x in extremes):
            raise CheckpointError(f"{'.'.join((kind, name, *rest))} is not finite")


def identity_differences(saved: Any, ours: dict[str, Any]) -> list[str]:
    """Name each field that differs, with both values; `saved` may be anything out of JSON."""
    differences = []
    saved = saved if isinstance(saved, dict) else {}
    for field in sorted(saved.keys() | ours.keys()):
        theirs, mine = saved.get(field), ours.get(field)
        if isinstance(theirs, dict) and isinstance(mine, dict):
            differing = [k for k in {**theirs, **mine} if theirs.get(k) != mine.get(k)]
            for key in differing[:3]:
                values = f"{shown(theirs.get(key, 'not'))} saved, {mine.get(key, 'not there')} now"
                differences.append(f"{field} {shown(key)}: {values}")
            if len(differing) > 3:
                differences.append(f"{field}: {len(differing) - 3} more")
        elif theirs != mine:
            differences.append(f"{shown(field)}: {shown(theirs)} saved, {mine} now")
    return differences


def shown(value: Any) -> str:
    """A value that a stranger may have chosen, as it can be printed."""
    text = f"{value}"
    return f"{text if text.isprintable() else ascii(text):.100}"


def of_place(path: Place) -> str:
    """Of a file, of the plain files in a directory, or of the names and sizes in a store."""
    if isinstance(path, RemotePath):
        return repr(sorted(path.sizes().items()))
    plain = (f for f in path.glob("*") if f.is_file() and not f.is_symlink())
    return of_files(path, sorted(plain) or [path])
