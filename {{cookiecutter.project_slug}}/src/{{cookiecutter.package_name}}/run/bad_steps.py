"""Handle bad steps, whose loss or gradient is not finite: skip them, or find the samples at fault.

A bad step changes nothing: the optimizer does not step, and the buffers that forward has changed,
such as batch statistics, are restored.
"""

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..distributed import Group
from ..errors import UserError
from ..sampling import MicroBatch, micro_batches

if TYPE_CHECKING:
    from ..config import TrainConfig
    from ..train import State

log = logging.getLogger(__name__)


def step_unless(bad: torch.Tensor | bool, optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer unless `bad` is set.

    A fused optimizer reads `found_inf`, the flag that gradient scalers set, on the device, and does
    not step if the flag is 1. With any other optimizer, the host waits for the device.
    """
    if isinstance(bad, torch.Tensor) and getattr(optimizer, "_step_supports_amp_scaling", False):
        fused: Any = optimizer
        fused.found_inf = bad.float()
        fused.step()
    elif not bad:
        optimizer.step()


class RunningBuffers:
    """Persistent buffers that forward may change, such as batch statistics.

    After the forwards of each step, `agree_on_buffers` makes those equal that are known to differ
    between ranks: with the mean over the ranks for floating-point and complex buffers, rank 0's
    value for all others (counts, flags). It looks for further ones at each step on a CPU, and every
    50 steps on a GPU. Only good steps of training change the buffers: their change is undone after
    a bad step, and neither validation nor recomputed activations change them.
    """

    # Indices of the buffers that `agree_on_buffers` sends between ranks; None until it has compared
    # the ranks' buffers for the first time.
    differing: set[int] | None = None

    def __init__(self, model: nn.Module) -> None:
        # Only persistent buffers are in the state dict.
        saved = model.state_dict(keep_vars=True)
        # Keep the module and the attribute's name, since forward may assign a new tensor.
        self.slots: list[tuple[nn.Module, str]] = []
        self.names: list[str] = []
        self.copies: list[torch.Tensor] = []
        for name, buffer in model.named_buffers():
            if name in saved:
                path, _, attribute = name.rpartition(".")
                self.slots.append((model.get_submodule(path), attribute))
                self.names.append(name)
                self.copies.append(buffer.detach().clone())

    def tensors(self) -> list[torch.Tensor]:
        """Return the current buffers of the model; UserError if a shape has changed."""
        result: list[torch.Tensor] = []
        for (module, attribute), name, copy in zip(
            self.slots, self.names, self.copies, strict=True
        ):
            tensor = getattr(module, attribute).detach()
            if tensor.shape != copy.shape:
                raise UserError(
                    f"the shape of the buffer {name} has changed from {tuple(copy.shape)} to "
                    f"{tuple(tensor.shape)}, so a resume could not load it. In __init__ (model.py) "
                    "register it with its largest shape, and a second buffer for the size in use; "
                    "or with persistent=False if a resume does not need it"
                )
            result.append(tensor)
        return result

    def keep(self) -> None:
        """Copy the buffers, before forward changes them."""
        if self.slots:
            torch._foreach_copy_(self.copies, self.tensors())

    def put_back(self, bad: torch.Tensor | bool) -> None:
        """Restore the buffers from the copies if `bad` is set, without waiting for the device."""
        for tensor, copy in zip(self.tensors(), self.copies, strict=True):
            # An `if` on a tensor would make the host wait, so the device selects the values.
            if isinstance(bad, torch.Tensor):
                torch.where(bad, copy, tensor, out=tensor)
            elif bad:
                tensor.copy_(copy)


class BadSteps:
    """Callback that warns of skipped steps, and ends the run after too many of them in a row.

    With `--train.on-bad-step stop`, it ends the run at the first bad step and names the samples at
    fault. To find them, a binary search repeats the step on parts of its batch, without changing
    anything. In this mode, the host waits for the device at each step.
    """

    def __init__(
        self, settings: "TrainConfig", train_step: Callable[..., None], group: Group
    ) -> None:
        self.stop = settings.on_bad_step == "stop"
        self.limit = settings.max_bad_steps
        self.train_step = train_step
        self.group = group
        self.in_a_row = 0

    def after_step(self, state: "State", record: dict[str, Any] | None) -> None:
        """Raise UserError at a bad step in "stop" mode, or after too many in a row."""
        if self.stop:
            # At a log step, `Journal.record` has moved the count from the state to the record.
            skipped = int(state.bad_steps) if record is None else record["skipped_steps"]
            if skipped:
                self._name_samples(state)
        if record is None:
            return
        skipped = record["skipped_steps"]
        # The mean loss leaves out bad steps. It is NaN if all steps since the last record were bad.
        if math.isnan(record["loss"]):
            self.in_a_row += skipped
        else:
            self.in_a_row = 0
        if skipped and self.group.rank == 0:
            log.warning(
                "skipped %d steps up to step %d: their loss or gradient was not finite",
                skipped,
                state.step,
            )
        if 0 < self.limit <= self.in_a_row:
            raise UserError(
                f"the last {self.in_a_row} steps were skipped, since their loss or gradient was "
                "not finite: look at the data, or lower --optim.learning-rate"
            )

    def _name_samples(self, state: "State") -> None:
        """Raise UserError with the samples that made the last step bad.

        Collective: all ranks raise the same error.
        """
        is_stream = state.loader.size is None
        if is_stream and self.group.size > 1:
            # The search distributes parts of the batch over the ranks again, but each rank has read
            # only its own samples.
            cause = "its samples cannot be searched, since each rank reads its own part of a stream"
        else:
            log.info("step %d was not finite: searching its batch for bad samples", state.step)
            # `state.step` already counts the bad step, so the index of its batch is one less.
            ids = state.loader.source.order.ids(state.step - 1).tolist()
            if state.config.train.overfit:
                # The loader reads a subset of the dataset: convert ids in the subset to ids in the
                # whole dataset.
                subset = state.loader.source.dataset
                ids = [subset.indices[index] for index in ids]
            with self.group.phase("search for bad samples"):
                bad = [str(ids[index]) for index in self._search(state, 0, len(ids))]
            cause = "no single sample causes it, only the whole batch"
            if bad:
                cause = f"each of the samples {', '.join(bad)} causes it"
        raise UserError(
            f"the loss or the gradient of step {state.step} is not finite; {cause}. The step "
            "changed nothing. Look at the data, or skip such steps with --train.on-bad-step skip"
        )

    def _search(self, state: "State", low: int, high: int) -> list[int]:
        """Return the indices, from `low` to `high` - 1, of samples that are bad on their own."""
        world = state.world
        size = state.config.train.micro_batch_size
        plan = micro_batches(high - low, size, world.rank, world.size, first=low)
        # `bad_steps` depends on the loss and gradient of all ranks, so it is the same on all of
        # them, and they take the same branches below.
        trial = try_step(self.train_step, state, state.step - 1, plan)
        if not trial.bad_steps:
            return []
        if high - low == 1:
            return [low]
        middle = (low + high) // 2
        return self._search(state, low, middle) + self._search(state, middle, high)


class FrozenOptimizer:
    """Replaces an optimizer in a step that must not change the weights."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Copy the groups, since `train_step` sets the learning rate in them.
        self.param_groups = [dict(group) for group in optimizer.param_groups]
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        """Leave the weights as they are."""


def try_step(
    train_step: Callable[..., None], state: "State", step: int, plan: list[MicroBatch]
) -> "State":
    """Run a step on these micro-batches with a copy of the state; return the copy.

    The model stays unchanged.
    """
    frozen: Any = FrozenOptimizer(state.optimizer)
    trial = dataclasses.replace(
        state,
        step=step,
        plan=plan,
        optimizer=frozen,
        # The step changes no weights, so it need not wait for a save that is copying them.
        checkpointer=None,
        sums=0.0,
        bad_steps=0,
    )
    train_step(trial, state.loader.of(step, plan))
    # Restore the buffers that forward has changed; `train_step` does so only if the step was bad.
    state.buffers.put_back(True)
    return trial
