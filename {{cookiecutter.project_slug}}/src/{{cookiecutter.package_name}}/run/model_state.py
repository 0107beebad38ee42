"""What a run relies on in your model: its modes, what is trained, and state outside of tensors."""

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UserError

if TYPE_CHECKING:
    from ..train import State

log = logging.getLogger(__name__)
# Attributes that torch gives every module.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
PLAIN = (bool, int, float, str)


def begin_training(model: nn.Module) -> None:
    """Put a new model into training mode, except the parts that build_model put in eval mode."""
    if not model.training:
        # Some libraries return a whole model in evaluation mode. Nobody trains one like that.
        model.train()
        return
    # A frozen backbone keeps its batch statistics and has no dropout: such parts stay.
    kept: list[str] = []
    for name, module in model.named_modules():
        inside_another = any(name.startswith(f"{outer}.") for outer in kept)
        if not module.training and not inside_another:
            kept.append(name)
    if kept:
        log.info("kept in evaluation mode, as build_model left them: %s", ", ".join(kept))


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluate inside the block; afterwards each module has the mode that it had before."""
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


class ModelState:
    """A callback, after yours: notices what neither other ranks nor a checkpoint could follow.

    - A parameter frozen, unfrozen or given to the optimizer during the run: UserError.
    - A buffer that was None until the first step: UserError, since ranks and resumes lack it.
    - Python values that the first step has changed: a warning.
    """

    def __init__(self, state: "State") -> None:
        # Where a module holds each parameter: FSDP puts another tensor there, and back.
        self.holders: list[tuple[dict[str, Any], str]] = []
        self.names: list[str] = []
        for path, module in state.model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.holders.append((module._parameters, name))
                    self.names.append(f"{path}.{name}".lstrip("."))
        self.trained = self._trained_now()
        self.sizes = [len(group["params"]) for group in state.optimizer.param_groups]
        self.undefined = undefined_buffers(state.model)
        self.values = plain_attributes(state.model)
        self.is_first_step = True

    def before_step(self, state: "State") -> None:
        """UserError if a callback has changed which parameters are trained."""
        way_out = (
            "Give it to the optimizer from the start (optim.py), trainable and in a group with "
            '"rate_factor": 0.0, and let the callback change that factor'
        )
        sizes = [len(group["params"]) for group in state.optimizer.param_groups]
        if sizes != self.sizes:
            raise UserError(
                "the optimizer has got or lost parameters since the start of the run, which a "
                f"resume cannot repeat. {way_out}"
            )
        trained = self._trained_now()
        # One process can do it: the callback repeats it after a resume. Among several ranks DDP and
        # FSDP would leave the gradients as they are on each rank.
        if trained != self.trained and state.world.size > 1:
            changed = zip(self.names, trained, self.trained, strict=True)
            name = next(name for name, now, before in changed if now != before)
            raise UserError(
                f"{name} was frozen or unfrozen (requires_grad) during the run, which several "
                f"ranks cannot follow. {way_out}"
            )

    def _trained_now(self) -> list[bool]:
        return [parameters[name].requires_grad for parameters, name in self.holders]

    def after_step(self, state: "State", record: dict[str, Any] | None) -> None:
        """Look once, after the first step of this start, at what forward has changed."""
        if not self.is_first_step:
            return
        self.is_first_step = False
        for module, name, full_name in self.undefined:
            if module._buffers[name] is not None:
                raise UserError(
                    f"the buffer {full_name} was None until the first step: neither the other "
                    "ranks nor a resume would have it. Register it with its shape in __init__, and "
                    "a second buffer that tells whether it is set"
                )
        changes: list[str] = []
        after = plain_attributes(state.model)
        for name, value in after.items():
            before = self.values.get(name, "missing")
            if value != before:
                changes.append(f"{name} ({before} -> {value})")
        if changes and state.world.rank == 0:
            log.warning(
                "the first step has changed Python attributes of the model, which no checkpoint "
                "holds: %s. A resumed run starts with the first value; use a buffer to keep one",
                ", ".join(changes[:3]),
            )


def undefined_buffers(model: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """List persistent buffers that are None: the module, their name in it, and their full name."""
    result: list[tuple[nn.Module, str, str]] = []
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None and name not in module._non_persistent_buffers_set:
                result.append((module, name, f"{path}.{name}".lstrip(".")))
    return result


def plain_attributes(model: nn.Module) -> dict[str, str]:
    """Return numbers, texts, None and "a tensor" by the names of the modules' attributes."""
    values: dict[str, str] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in OF_EVERY_MODULE:
                continue
            if value is None or isinstance(value, PLAIN):
                values[f"{path}.{name}".lstrip(".")] = repr(value)
            elif isinstance(value, torch.Tensor):
                values[f"{path}.{name}".lstrip(".")] = "a tensor"
    return values
