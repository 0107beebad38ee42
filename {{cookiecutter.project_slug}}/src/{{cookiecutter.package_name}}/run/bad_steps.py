"""Bad steps, whose loss or gradient is not finite: skipped, counted, or traced to their samples.

A bad step changes nothing: the optimizer does not step, and buffers that forward has written
(batch statistics) are restored.
"""

import dataclasses
import logging
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
    """Restores persistent buffers, such as batch statistics, when a step is skipped."""

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict(keep_vars=True)
        self.buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
        self.copies = [buffer.detach().clone() for buffer in self.buffers]

    def keep(self) -> None:
        """Copy the buffers; call it before forward."""
        if self.buffers:
            torch._foreach_copy_(self.copies, self.buffers)

    def put_back(self, bad: torch.Tensor | bool) -> None:
        """Restore the copies if `bad` is set; does not wait for the device."""
        if isinstance(bad, torch.Tensor):
            for buffer, copy in zip(self.buffers, self.copies, strict=True):
                torch.where(bad, copy, buffer, out=buffer)
        elif bad and self.buffers:
            torch._foreach_copy_(self.buffers, self.copies)


class SkippedSteps:
    """A callback: warns of skipped steps; `limit` of them in a row end the run (0: never)."""

    def __init__(self, limit: int, group: Group) -> None:
        self.limit, self.rank = limit, group.rank
        self.in_a_row = self.seen = 0

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """UserError when too many steps in a row were bad."""
        self.seen += 1
        if record is None:
            return
        bad = record["skipped_steps"]
        self.in_a_row = self.in_a_row + bad if bad == self.seen else 0
        self.seen = 0
        if bad and self.rank == 0:
            log.warning("%d steps up to %d were not finite: skipped", bad, state.step)
        if 0 < self.limit <= self.in_a_row:
            raise UserError(
                f"the last {self.in_a_row} steps had a loss or gradient that was not finite; "
                "they were skipped. Look at the data, or lower --optim.learning-rate"
            )


class StopAtBadStep:
    """A callback for `--train.on-bad-step stop`: UserError naming the samples of a bad step.

    The host waits for the device at each step. A bad step is skipped, so the weights are unchanged:
    a binary search repeats it on parts of the batch, as steps that change nothing.
    """

    def __init__(self, train_step: Callable[..., None], group: Group) -> None:
        self.train_step, self.group = train_step, group

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Check the step just done (at a log step, its count has moved into the record)."""
        if not (record["skipped_steps"] if record else int(state.bad_steps)):
            return
        step = state.step - 1
        log.info("step %d was not finite: searching its batch for the cause", state.step)
        ids = state.loader.source.order.ids(step).tolist()
        with self.group.phase("search for bad samples"):
            bad = self._search(state, step, 0, len(ids))
        samples = f"samples {', '.join(str(ids[index]) for index in bad)} make it so, each alone"
        together = f"no sample makes it so alone, only all of the batch together: {ids[:64]}"
        raise UserError(
            f"the loss or the gradient of step {state.step} is not finite; "
            f"{samples if bad else together}. The step changed nothing. Look at the data, or skip "
            "such steps with --train.on-bad-step skip"
        )

    def _search(self, state: Any, step: int, low: int, high: int) -> list[int]:
        """Indices in batch[low:high] of the samples that are bad on their own."""
        micro_batch, world = state.config.train.micro_batch_size, state.world
        plan = [
            Share(slice(part.start + low, part.stop + low), weight)
            for part, weight in shares(high - low, micro_batch, world.rank, world.size)
        ]
        if not try_step(self.train_step, state, step, plan).bad_steps:
            return []
        if high - low == 1:
            return [low]
        middle = (low + high) // 2
        return self._search(state, step, low, middle) + self._search(state, step, middle, high)


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
