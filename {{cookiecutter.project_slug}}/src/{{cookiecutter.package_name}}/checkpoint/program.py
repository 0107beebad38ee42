"""A trained model as a program of torch.export, which runs without this package."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from ..errors import UserError
from .transfer import write_whole


def export_program(target: Path, model: nn.Module, use: Callable[[], object]) -> str:
    """Write a model to FILE.pt2, for inputs of all sizes that it can take; a line about it.

    `use()` calls the model once, and so shows what its inputs are: those arguments of `forward`
    that have no default (targets have one). UserError, with torch's reason, if it has no program.
    """
    signature, calls = inspect.signature(model.forward), []

    def note(_: nn.Module, arguments: Any, by_name: Any) -> None:
        calls.append(signature.bind(*arguments, **by_name).arguments)

    with torch.no_grad(), model.register_forward_pre_hook(note, with_kwargs=True):
        use()
    if not calls:
        raise UserError("compute_loss (model.py) does not call the model itself")
    names = [name for name, each in signature.parameters.items() if each.default is each.empty]
    try:
        # Copied, or the program of a view would check what it is a view of.
        inputs = tuple(calls[0][name].clone() for name in names)
        sizes = [{i: Dim.AUTO if i else Dim.DYNAMIC for i in range(x.ndim)} for x in inputs]
        program = torch.export.export(model, inputs, dynamic_shapes=sizes)
    except Exception as error:  # of many kinds, and with pages of advice
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{target}: torch.export cannot make a program of it: {reason}") from error
    write_whole(target, lambda file: torch.export.save(program, file))
    shapes = [f"{name} {list(each.shape)}" for name, each in zip(names, inputs, strict=True)]
    return f"{target}: the model as a program; its input, by example: {', '.join(shapes)}"
