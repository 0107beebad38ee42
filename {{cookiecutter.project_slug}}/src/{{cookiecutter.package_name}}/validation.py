"""Compute the mean loss and metrics over the validation data, split among the ranks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .device import move
from .distributed import parallel
from .distributed.stop import Stop
from .ema import averaged_weights
from .loss import Gathered, loss_vector, means
from .model import compute_loss
from .run.callback_runner import find_methods
from .run.journal import metric_names, validation_figures
from .run.model_state import evaluation_mode
from .sampling import VALIDATION_DRAWS, fetch, fixed_subset, micro_batches, stream_key

if TYPE_CHECKING:
    from .train import State


def never() -> bool:
    """Return False: the default of `stopped`, for a validation that nothing interrupts."""
    return False


@torch.no_grad()
def validate(state: "State", stopped: Callable[[], bool] = never) -> dict[str, float]:
    """Return the mean loss and metrics, such as {"validation_loss": 0.5}; collective.

    `stopped()` is called before each batch and must return the same on all ranks. Once it returns
    True, the result is {}. Raises UserError, on every rank, if ranks have different metrics. If
    only one rank raises another error, its process ends. The others then fail or hang in the next
    collective, until they are ended, too.
    """
    config, world = state.config.train, state.world
    chosen = fixed_subset(len(state.validation), config.validate_samples)
    # A dataset's random numbers depend only on this key and on the sample's position in `chosen`,
    # so they are the same in each validation.
    key = stream_key(config.seed, VALIDATION_DRAWS)
    # The maximum number of samples in one forward on each rank.
    micro_batch_size = config.validate_batch_size or config.micro_batch_size
    # The number of samples that all ranks together process between two calls of `stopped`. This is
    # a global batch of training, or more if --train.validate-batch-size needs more.
    batch_size = max(config.global_batch_size, config.validate_batch_size * world.size)
    sums: Tensor | float = 0.0
    names: tuple[str, ...] | None = None
    with evaluation_mode(state.module):
        for first in range(0, len(chosen), batch_size):
            if stopped():
                return {}
            ids = chosen[first : first + batch_size]
            plan = micro_batches(len(ids), micro_batch_size, world.rank, world.size)
            for micro_batch in plan:
                indices = micro_batch.indices
                position = first + indices.start
                # Without `keys`, samples are not augmented.
                batch = fetch(state.validation, ids[indices], keys=None, draws=(key, position))
                # A rank that has no samples processes a copy of another rank's sample at weight 0.
                # This flag makes gather_with_gradients leave the copy out, so that no sample is
                # compared with the same one twice.
                Gathered.is_padding = micro_batch.weight == 0
                loss = parallel.forward(compute_loss, state, move(batch, world.device))
                Gathered.is_padding = False
                # Raises UserError if the names differ from those of the previous micro-batch.
                names = metric_names(loss, names)
                sums = sums + loss_vector(loss) * micro_batch.weight
    # Ranks add up their sums by position, not by name. If their metrics differed, the sum of one
    # metric would be added to that of another.
    parallel.require_same({"metrics of compute_loss (model.py) in a validation": names}, world)
    total = parallel.all_reduce(torch.as_tensor(sums), world)
    figures = means(total.tolist(), names or ())
    return {f"validation_{name}": value for name, value in figures.items()}


def validate_averaged(state: "State", stopped: Callable[[], bool]) -> dict[str, float]:
    """Validate the weights, and their EMA if --optim.ema is on; collective.

    Returns {} once `stopped()` returns True, as in `validate`.
    """
    metrics = validate(state, stopped)
    if not metrics or not state.config.optim.ema:
        return metrics
    with averaged_weights(state.model, state.optimizer):
        averaged = validate(state, stopped)
    if not averaged:
        return {}
    for name, value in averaged.items():
        metrics[f"validation_ema_{name.removeprefix('validation_')}"] = value
    return metrics


def validate_in_run(state: "State", stop: Stop, callbacks: list[Any]) -> dict[str, float]:
    """Validate during a run, and call the callbacks; {} if a stop signal interrupts the validation.

    Before each batch, `stop.poll` exchanges stop signals and requests between the ranks.
    """
    assert state.checkpointer, "a run has one"
    writer = state.checkpointer.writer

    def stopped() -> bool:
        # Only a stop signal interrupts the validation. But if a callback has also ended the run,
        # the run counts as finished, not as preempted, so complete its validation.
        agreed = stop.poll(writer.failed)
        return agreed.stop_signal > 0 and not agreed.finish

    with stop.group.phase("validation"):
        metrics = validate_averaged(state, stopped)
        if metrics:
            for call in find_methods("after_validation", callbacks):
                call(state, metrics)
    # The callbacks may have added metrics, so check all of them.
    return validation_figures(metrics)
