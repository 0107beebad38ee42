"""Set a model's train and eval modes, and find state that a resume or other ranks would lose."""

import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..errors import UserError

if TYPE_CHECKING:
    from ..train import State

log = logging.getLogger(__name__)
# Attributes that every torch module has.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Types of values that are compared by content.
PLAIN = (bool, int, float, str, np.generic)
CONTAINERS = (list, tuple, deque, dict, set, frozenset)
# Limits of the comparison by content. A container with more items, a more deeply nested container
# or a larger array is compared only by its identity and its length or shape.
MOST_ITEMS = 1000
MOST_NESTED = 2
MOST_BYTES = 2**20


def begin_training(model: nn.Module) -> None:
    """Put a new model into training mode, except modules that build_model put into eval mode."""
    # If the model itself is in evaluation mode, its modules were not chosen one by one: some
    # libraries return every model in this mode. Then all modules are put into training mode.
    in_evaluation: list[nn.Module] = []
    if model.training:
        in_evaluation = [module for module in model.modules() if not module.training]
    # Call train() instead of setting the flags, since a model may override it to keep a part in
    # evaluation mode.
    model.train()
    for module in in_evaluation:
        module.training = False
    # Log the outermost modules in evaluation mode, such as a frozen backbone: they use fixed batch
    # statistics and no dropout.
    kept: list[str] = []
    for name, module in model.named_modules():
        # The name of the model itself is "". If it is in `kept`, all other modules are inside it.
        inside_another = "" in kept or any(name.startswith(f"{outer}.") for outer in kept)
        if not module.training and not inside_another:
            kept.append(name)
    if kept == [""]:
        log.info("model.py keeps the whole model in evaluation mode")
    elif kept:
        log.info("modules kept in evaluation mode by model.py: %s", ", ".join(kept))


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block, then restore each module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        # Setting the flags is not enough. With loralib, a module's eval() merges the adapter into
        # the weights, and only the module's train() undoes this.
        if was_training:
            model.train()
        for module, mode in modes:
            module.training = mode


class ModelState:
    """Callback that finds state that other ranks or a resume would lose.

    It is called after the user's callbacks, and raises or logs:

    - UserError if parameters were added to or removed from the optimizer during the run.
    - UserError if, with several ranks, a parameter was frozen or unfrozen during the run.
    - UserError if a buffer was None until the first step.
    - A warning if the first step has changed Python attributes of the model.
    """

    def __init__(self, state: "State") -> None:
        # The dictionary and key that hold each parameter. Keeping the parameter itself would not
        # do, since FSDP puts other tensors into the dictionaries.
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
        self.attributes = python_attributes(state.model)
        self.is_first_step = True

    def before_step(self, state: "State") -> None:
        """Raise UserError if a callback has changed which parameters are trained."""
        way_out = (
            "Give such parameters to the optimizer from the start (optim.py), trainable and in a "
            'group with "rate_factor": 0.0, and let the callback change that factor'
        )
        sizes = [len(group["params"]) for group in state.optimizer.param_groups]
        if sizes != self.sizes:
            raise UserError(
                "parameters were added to or removed from the optimizer during the run, which a "
                f"resume cannot repeat. {way_out}"
            )
        if state.world.size == 1:
            # Here a callback may freeze and unfreeze parameters, since after a resume the callback
            # does so again.
            return
        # DDP and FSDP would not reduce the gradients of a parameter that was unfrozen during the
        # run.
        trained = self._trained_now()
        if trained != self.trained:
            changed = zip(self.names, trained, self.trained, strict=True)
            name = next(name for name, now, before in changed if now != before)
            raise UserError(
                f"{name} was frozen or unfrozen (requires_grad) during the run, which does not "
                f"work with several ranks. {way_out}"
            )

    def _trained_now(self) -> list[bool]:
        return [parameters[name].requires_grad for parameters, name in self.holders]

    def after_step(self, state: "State", record: dict[str, Any] | None) -> None:
        """Check buffers and Python attributes once, after the first step of this process."""
        if not self.is_first_step:
            return
        self.is_first_step = False
        for module, name, full_name in self.undefined:
            if module._buffers[name] is not None:
                raise UserError(
                    f"the buffer {full_name} was None until the first step, so other ranks and a "
                    "resume would lack it: register it with its shape in __init__ (model.py), and "
                    "a second buffer for whether it is set"
                )
        changes = changed_attributes(self.attributes, python_attributes(state.model))
        # The old values are not needed any more. They may refer to tensors, so free their memory.
        self.attributes.clear()
        if changes and state.world.rank == 0:
            log.warning(
                "the first step has changed Python attributes of the model, which checkpoints do "
                "not save: %s. A resumed run starts from their initial values: register them as "
                "buffers, unless they are caches that forward overwrites before it reads them",
                ", ".join(changes[:3]),
            )


def undefined_buffers(model: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """List the persistent buffers that are None, as (module, name in it, full name)."""
    result: list[tuple[nn.Module, str, str]] = []
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None and name not in module._non_persistent_buffers_set:
                result.append((module, name, f"{path}.{name}".lstrip(".")))
    return result


@dataclass(frozen=True)
class Attribute:
    """A module's attribute at one moment: `shown` is for warnings, and `content` is compared."""

    shown: str
    content: Any


class Identity:
    """Compares an object by identity. It keeps the object alive, so that its id is not reused."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


# Stands for an attribute that did not exist.
MISSING = Attribute("missing", None)


def changed_attributes(before: dict[str, Attribute], after: dict[str, Attribute]) -> list[str]:
    """Describe each attribute that is new or whose content has changed."""
    changes: list[str] = []
    for name, now in after.items():
        then = before.get(name, MISSING)
        if now.shown != then.shown:
            changes.append(f"{name} ({then.shown} -> {now.shown})")
        elif now.content != then.content:
            changes.append(f"{name} ({now.shown})")
    return changes


def python_attributes(model: nn.Module) -> dict[str, Attribute]:
    """Return all attributes in which the `forward` of a module may keep values, by full name.

    These are the attributes that hold plain values, containers, arrays or tensors.
    """
    buffer_ids = {id(buffer) for buffer in model.buffers()}
    attributes: dict[str, Attribute] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in OF_EVERY_MODULE or _is_computed(module, name):
                continue
            shown = _describe(value)
            if shown is not None:
                content = _content(value, buffer_ids)
                attributes[f"{path}.{name}".lstrip(".")] = Attribute(shown, content)
    return attributes


def _is_computed(module: nn.Module, name: str) -> bool:
    """Return whether torch's older weight norm, spectral norm or pruning computes this weight."""
    # Weight norm computes `weight` from `weight_g`. Spectral norm and pruning compute it from
    # `weight_orig`.
    return f"{name}_g" in module._parameters or f"{name}_orig" in module._parameters


def _describe(value: Any) -> str | None:
    """Return the text that shows a value in a warning; None for a type that is not compared."""
    if value is None or isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, np.ndarray):
        return "an array"
    if isinstance(value, CONTAINERS):
        return f"{type(value).__name__} of length {len(value)}"
    return None


def _content(value: Any, buffers: set[int], nested: int = 0) -> Any:
    """Return a cheap object that stands for a value: it compares equal if the value is unchanged.

    `nested` is the number of containers around the value.
    """
    if value is None or isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        # Checkpoints save parameters and buffers, so these may change: they always compare equal.
        if isinstance(value, nn.Parameter) or id(value) in buffers:
            return "registered"
        # Reading values would make the host wait for the device. `_version` counts the in-place
        # changes of a tensor; inference tensors do not have it.
        version = 0 if value.is_inference() else value._version
        return Identity(value), version
    if isinstance(value, np.ndarray):
        if value.nbytes > MOST_BYTES:
            return Identity(value), value.shape
        return value.shape, value.dtype.str, hashlib.sha256(value.tobytes()).digest()
    if isinstance(value, CONTAINERS):
        if nested == MOST_NESTED or len(value) > MOST_ITEMS:
            return Identity(value), len(value)
        # The items of a dictionary are its keys here; its values follow below.
        contents = [_content(item, buffers, nested + 1) for item in value]
        if isinstance(value, dict):
            contents += [_content(item, buffers, nested + 1) for item in value.values()]
        if isinstance(value, (set, frozenset)):
            return frozenset(contents)
        return tuple(contents)
    return type(value).__name__
