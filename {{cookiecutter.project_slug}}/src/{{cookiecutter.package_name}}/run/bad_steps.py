"""Bad steps, whose loss or gradient is not finite: skipped, counted, or traced to their samples.

A bad step changes nothing: the optimizer does not step, and what forward has written into buffers
(batch statistics) is restored.
"""

import dataclasses
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..distributed import Group
from ..errors import UserError
from ..sampling import Share, shares

log = logging.getLogger(__name__)


def step_unless(bad: torch.Tensor | bool, optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer unless `bad` is set.

    Fused optimizers decide on the device, by the flag that gradient scalers use; with others the
    host waits for the device.
    """
    if isinstance(bad, torch.Tensor) and getattr(optimizer, "_step_supports_amp_scaling", False):
        fused: Any = optimizer
        fused.found_inf = bad.float()
        fused.step()
    elif not bad:
        optimizer.step()


class RunningBuffers:
    """Persistent buffers, which forward may write, such as batch statistics.

    One rule for them: after the forwards of each step the ranks agree, on the mean of fractional
    and complex ones and on rank 0's of all others (counts, flags). Nothing else changes them: no
    bad step, no save, no validation, no recomputation of activations.

    They are known by module and name, since a forward may assign a new tensor.
    """

    changing: set[int] | None = None  # indices of those that forward changes, once that is known

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict(keep_vars=True)
        names = (name.rpartition(".") for name, _ in model.named_buffers() if name in saved)
        self.slots = [(model.get_submodule(path), name) for path, _, name in names]
        self.copies = [tensor.clone() for tensor in self.tensors()]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the model has now."""
        return [getattr(module, name).detach() for module, name in self.slots]

    def keep(self) -> None:
        """Copy the buffers; call it before forward."""
        if self.slots:
            torch._foreach_copy_(self.copies, self.tensors())

    def put_back(self, bad: torch.Tensor | bool) -> None:
        """Restore the copies if `bad` is set; does not wait for the device."""
        for tensor, copy in zip(self.tensors(), self.copies, strict=True):
            if isinstance(bad, torch.Tensor):
                torch.where(bad, copy, tensor, out=tensor)
            elif bad:
                tensor.copy_(copy)


class BadSteps:
    """A callback: warns of skipped steps, and ends the run after too many of them in a row.

    With `--train.on-bad-step stop` it ends the run at the first one, for which the host waits for
    the device at each step, and names the samples: a binary search repeats the step on parts of the
    batch, without changing anything.
    """

    def __init__(self, settings: Any, train_step: Callable[..., None], group: Group) -> None:
        self.stop, self.limit = settings.on_bad_step == "stop", settings.max_bad_steps
        self.train_step, self.group, self.in_a_row = train_step, group, 0

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """UserError for a bad step if the run is to stop there, or for too many in a row."""
        # At a log step the count has moved into the record.
        if self.stop and (record["skipped_steps"] if record else int(state.bad_steps)):
            self._name_samples(state)
        if record is None:
            return
        bad = record["skipped_steps"]
        # The mean loss over no good step is NaN.
        self.in_a_row = self.in_a_row + bad if math.isnan(record["loss"]) else 0
        if bad and self.group.rank == 0:
            log.warning("%d steps up to %d were not finite: skipped", bad, state.step)
        if 0 < self.limit <= self.in_a_row:
            raise UserError(
                f"the last {self.in_a_row} steps had a loss or gradient that was not finite; "
                "they were skipped. Look at the data, or lower --optim.learning-rate"
            )

    def _name_samples(self, state: Any) -> None:
        log.info("step %d was not finite: searching its batch for the cause", state.step)
        ids = state.loader.source.order.ids(state.step - 1).tolist()
        with self.group.phase("search for bad samples"):
            bad = [str(ids[index]) for index in self._search(state, 0, len(ids))]
        alone = f"samples {', '.join(bad)} make it so, each alone"
        cause = alone if bad else "no sample makes it so alone, only the batch as a whole"
        raise UserError(
            f"the loss or the gradient of step {state.step} is not finite; {cause}. The step "
            "changed nothing. Look at the data, or skip such steps with --train.on-bad-step skip"
        )

    def _search(self, state: Any, low: int, high: int) -> list[int]:
        """Indices in batch[low:high] of the samples that are bad on their own."""
        micro_batch, world = state.config.train.micro_batch_size, state.world
        plan = shares(high - low, micro_batch, world.rank, world.size, low)
        if not try_step(self.train_step, state, state.step - 1, plan).bad_steps:
            return []
        if high - low == 1:
            return [low]
        middle = (low + high) // 2
        return self._search(state, low, middle) + self._search(state, middle, high)


def try_step(train_step: Callable[..., None], state: Any, step: int, plan: list[Share]) -> Any:
    """Take a step, on a part of a batch, that changes nothing; returns its copy of the state."""
    frozen = SimpleNamespace(
        param_groups=[dict(group) for group in state.optimizer.param_groups],
        zero_grad=state.optimizer.zero_grad,
        step=lambda: None,  # the weights stay as they are
    )
    changes = {"checkpointer": None, "optimizer": frozen, "sums": 0.0, "bad_steps": 0}
    trial = dataclasses.replace(state, step=step, plan=plan, **changes)
    train_step(trial, state.loader.of(step, plan))
    state.buffers.put_back(True)
    return trial
