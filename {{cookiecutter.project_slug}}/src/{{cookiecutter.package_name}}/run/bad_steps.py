"""Numbers that are not finite: whose samples they come from, and that no checkpoint has them."""

import dataclasses
import logging
from typing import Any

import torch

from ..errors import UserError
from ..sampling import Share, shares

log = logging.getLogger(__name__)


class StopAtBadStep:
    """`--train.on-bad-step stop`: called after every step, UserError after one that is not finite.

    The host waits for the device to know. The step was skipped, so the weights are those that the
    batch met: it is put through again in halves, as steps that change nothing, and those that are
    not finite are halved again, down to single samples.
    """

    def __init__(self, train_step: Any) -> None:
        self.train_step = train_step

    def __enter__(self) -> "StopAtBadStep":
        """Nothing to set up."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to leave."""

    def __call__(self, state: Any, record: dict[str, Any] | None) -> None:
        """Look at the step just done (its count moves to the log line, where there is one)."""
        if not (record["skipped_steps"] if record else int(state.bad_steps)):
            return
        step, state.patient = state.step - 1, True
        log.info("step %d was not finite: looking for the samples that make it so", state.step)
        ids = state.loader.source.order.ids(step).tolist()
        found = self._search(state, step, 0, len(ids))
        alone = f"on their own, those of samples {', '.join(str(ids[place]) for place in found)}"
        together = f"on their own, those of no sample: only together, in this batch of {ids[:64]}"
        error = UserError(
            f"the loss or the gradient of step {state.step} is not finite; "
            f"{alone if found else together}. Nothing of this step is kept. Look at the data, or "
            "go on past such steps with --train.on-bad-step skip"
        )
        error.agreed = True
        raise error

    def _search(self, state: Any, step: int, low: int, high: int) -> list[int]:
        """Places in the batch, from `low` to below `high`, whose samples are not finite alone."""
        if not self._is_bad(state, step, low, high):
            return []
        if high - low == 1:
            return [low]
        middle = (low + high) // 2
        return self._search(state, step, low, middle) + self._search(state, step, middle, high)

    def _is_bad(self, state: Any, step: int, low: int, high: int) -> bool:
        plan = [
            Share(slice(share.places.start + low, share.places.stop + low), share.weight)
            for share in shares(
                high - low, state.config.train.micro_batch_size, state.world.rank, state.world.size
            )
        ]
        trial = dataclasses.replace(
            state, step=step, plan=plan, checkpointer=None, optimizer=_Still(state.optimizer)
        )
        trial.sums, trial.bad_steps = 0.0, 0
        self.train_step(trial, state.loader.of(step, plan))
        return bool(trial.bad_steps)


class _Still:
    """An optimizer that leaves the weights as they are."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [dict(group) for group in optimizer.param_groups]
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        pass


def step_unless(bad: torch.Tensor | bool, optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer unless `bad` is set.

    Fused optimizers decide on the device, by what gradient scalers use; others make the host wait.
    """
    if isinstance(bad, torch.Tensor) and getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = bad.float()
        optimizer.step()
    elif not bad:
        optimizer.step()
