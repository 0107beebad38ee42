"""Compute the mean loss and metrics over the validation data, which the ranks divide."""

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
    """Return the metrics, each with the prefix "validation_"; collective.

    Returns {} if `stopped()`, which must be the same on all ranks, becomes true meanwhile. Raises
    UserError, on every rank, if the metrics differ between ranks.
    """
    config, world = state.config.train, state.world
    chosen = fixed_subset(len(state.validation), config.validate_samples)
    # Random numbers are a function of this key and of positions in `chosen`, so they are the same
    # in each validation.
    key = stream_key(config.seed, VALIDATION_DRAWS)
    # The most samples in one forward of a rank.
    micro_batch_size = config.validate_batch_size or config.micro_batch_size
    # The samples of all ranks between two calls of `stopped`. --train.validate-batch-size may ask
    # for more samples in a forward of each rank than a training batch has.
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
                # A rank without samples repeats one at weight 0. With this flag,
                # gather_with_gradients leaves the copy out: others would be compared with it twice.
                Gathered.is_padding = micro_batch.weight == 0
                loss = parallel.forward(compute_loss, state, move(batch, world.device))
                Gathered.is_padding = False
                # Raises UserError if they differ from those of the batch before.
                names = metric_names(loss, names)
                sums = sums + loss_vector(loss) * micro_batch.weight
    # The sums have no names, so ranks with different metrics would add different ones.
    parallel.require_same({"metrics of compute_loss (model.py) in a validation": names}, world)
    total = parallel.all_reduce(torch.as_tensor(sums), world)
    figures = means(total.tolist(), names or ())
    return {f"validation_{name}": value for name, value in figures.items()}


def validate_averaged(state: "State", stopped: Callable[[], bool]) -> dict[str, float]:
    """Validate the weights, and their EMA if --optim.ema is on; collective.

    Returns {} if `stopped()` becomes true meanwhile, as in `validate`.
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
    """Validate in a run, and call the callbacks; {} if a stop signal interrupts it.

    Before each batch it polls `stop`, which also sends this rank's own requests.
    """
    assert state.checkpointer, "a run has one"
    writer = state.checkpointer.writer

    def stopped() -> bool:
        # Only a stop signal interrupts the validation, and not if a callback ends the run, too.
        agreed = stop.poll(writer.failed)
        return agreed.stop_signal > 0 and not agreed.finish

    with stop.group.phase("validation"):
        metrics = validate_averaged(state, stopped)
        if metrics:
            for call in find_methods("after_validation", callbacks):
                call(state, metrics)
    # The callbacks may have added metrics, so check all of them.
    return validation_figures(metrics)
