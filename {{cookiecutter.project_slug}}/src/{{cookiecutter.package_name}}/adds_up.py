"""Check that the sums of compute_loss add up: a batch gives the total of its two halves.

Gradient accumulation and data parallelism rely on it. A mean, or a loss that compares the samples
of a batch, would depend on the micro-batches. The stage `baseline` checks this, and the start of a
new run warns.
"""

import contextlib
import copy
import logging
import math
import random
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from . import model as model_file
from .device import move
from .distributed import World, parallel
from .loss import LossSum, check_loss, loss_vector
from .model import compute_loss
from .run.model_state import evaluation_mode
from .sampling import STEP, MicroBatch, seed_random, stream_key

if TYPE_CHECKING:
    from .train import State

log = logging.getLogger(__name__)
# The largest relative difference that rounding can explain, even in bfloat16. A loss that is a mean
# differs far more: its halves add up to about twice the value of the batch.
TOLERANCE = 0.01
# Rounding may move a few samples across a threshold, as in an accuracy. So a warning about a metric
# needs a larger difference. There is none about a metric whose values are whole numbers, since it
# is a number of samples.
TOLERANCE_OF_METRICS = 0.25
# A model may be random in evaluation mode too, so each batch is evaluated up to this many times.
DRAWS = 16
# If randomness could explain a relative difference above this, a comparison proves nothing.
TOO_RANDOM = 0.1
# A new run evaluates at most this many samples.
MAX_SAMPLES = 8
# What to do about a sum that does not add up, by the reason.
NOT_A_SUM = {
    "mean": "compute_loss must return sums, not means (reduction='sum')",
    "count": "a count must be the number of values in this batch's sum",
    "batch": "it compares samples of a batch, so micro-batches and ranks change it. For a loss, "
    "put all that is compared into one sample; for a metric, return the sums it is computed from",
}
# The index in a loss vector of the count that the loss is divided by.
COUNT_OF_LOSS = 1


def need_not_add_up() -> bool:
    """Tell whether model.py declares with `ADDS_UP = False` that its sums need not add up."""
    return getattr(model_file, "ADDS_UP", True) is False


@dataclass(frozen=True)
class BatchSlice:
    """A slice of the global batch of a step."""

    step: int
    samples: slice


@dataclass(frozen=True)
class Evaluation:
    """Sums and counts, shape [draws, batches, names]; the last axis follows `names`."""

    sums: torch.Tensor
    names: list[str]


class _Draws(Dataset):
    """Reads the samples of (draw, batch slice); draw 0 uses the random numbers of training."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __getitem__(self, item: tuple[int, BatchSlice]) -> Any:
        draw, batch_slice = item
        source = self.source
        if draw > 0:
            # In a source, `draws` is not a count: it is the key of the random numbers. Give another
            # key to a copy.
            source = copy.copy(source)
            source.draws = stream_key(source.draws, draw)
        micro_batch = MicroBatch(indices=batch_slice.samples, weight=1.0)
        return source[batch_slice.step, micro_batch]


def read_batches(
    state: "State", slices: list[BatchSlice], draws: int = 1
) -> Generator[Any, None, None]:
    """Yield the batches of all slices, then again with other random numbers: `draws` times in all.

    A sample's random numbers depend on its position, so within a draw they are the same in each
    batch that has the sample. Close the generator to stop its loader worker.
    """
    items: list[tuple[int, BatchSlice]] = []
    for draw in range(draws):
        for batch_slice in slices:
            items.append((draw, batch_slice))
    return state.loader.read_apart(_Draws(state.loader.source), items)


def evaluate(state: "State", batches: Iterable[Any], draws: int = 1) -> Evaluation:
    """Compute the sums of the batches from `read_batches`."""
    vectors: list[torch.Tensor] = []
    names: list[str] = []
    seed = state.config.train.seed
    world = state.world
    with torch.no_grad():
        for number, batch in enumerate(batches):
            # The model's random numbers differ from batch to batch, but not from run to run.
            seed_random(seed, STEP, number, world.rank, device=world.device)
            loss = parallel.forward(compute_loss, state, move(batch, world.device))
            check_loss(loss, is_trained=False)
            vectors.append(loss_vector(loss))
            names = names_of(loss)
    # From [draws * batches, names] to [draws, batches, names].
    sums = torch.stack(vectors).unflatten(0, (draws, -1))
    return Evaluation(sums, names)


def names_of(loss: LossSum) -> list[str]:
    """Name the entries of a loss vector."""
    names = ["loss", "count"]
    for name, metric in loss.metrics.items():
        # A metric with its own count is a tuple.
        has_own_count = isinstance(metric, tuple)
        names += [name, f"count of {name}" if has_own_count else "count"]
    return names


@dataclass(frozen=True)
class Comparison:
    """Sums and counts of a batch and of its two halves, averaged over the draws.

    All tensors have the shape [names].
    """

    # The number of samples in the batch.
    samples: int
    names: list[str]
    whole: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    # The largest magnitude of each sum and count, to which differences are relative.
    scale: torch.Tensor
    # The relative difference between the sum of the halves and the batch, and its standard error.
    relative: torch.Tensor
    standard_error: torch.Tensor

    @property
    def limit(self) -> torch.Tensor:
        """Return the largest relative difference that rounding and randomness explain."""
        return TOLERANCE + 4 * self.standard_error

    @property
    def is_random(self) -> bool:
        """Tell whether the draws differ noticeably."""
        return self._largest_error() > TOLERANCE / 100

    @property
    def is_too_random(self) -> bool:
        """Tell whether the draws differ too much for a verdict."""
        return TOLERANCE + 4 * self._largest_error() > TOO_RANDOM

    def _largest_error(self) -> float:
        """Return the largest standard error of the sums and counts that are not NaN."""
        return float(self.standard_error.nan_to_num(nan=0.0).max())

    @property
    def wrong(self) -> list[int]:
        """Return the indices of the sums and counts that do not add up."""
        # Written with `not`, since a NaN must count as wrong.
        return [i for i in range(len(self.names)) if not self.relative[i] <= self.limit[i]]

    def describe(self, index: int) -> str:
        """Name a sum and give its values for the batch and for its two halves."""
        whole = f"{self.names[index]} of {self.samples} samples {self.whole[index]:.6g}"
        return f"{whole}, in parts {self.first[index]:.6g} + {self.second[index]:.6g}"

    def advice(self, index: int) -> str:
        """Say what to do about a sum that does not add up."""
        # Each sum is followed by its count, so counts have odd indices.
        if index % 2 == 1:
            return NOT_A_SUM["count"]
        if self._is_mean(index):
            return NOT_A_SUM["mean"]
        return NOT_A_SUM["batch"]

    def _is_mean(self, index: int) -> bool:
        """Tell whether the value of the batch is the mean of those of its halves.

        The mean is weighted by the counts, or by the numbers of samples if the counts are wrong.
        """
        count = index + 1
        if count in self.wrong:
            weight_of_first = first_part(self.samples) / self.samples
        else:
            weight_of_first = self.first[count] / (self.first[count] + self.second[count])
        mean = weight_of_first * self.first[index] + (1 - weight_of_first) * self.second[index]
        difference = (mean - self.whole[index]).abs() / self.scale[index]
        return bool(difference <= self.limit[index])


def first_part(samples: int) -> int:
    """Return the number of samples in the first half."""
    return (samples + 1) // 2


def compare(evaluation: Evaluation, samples: int) -> Comparison:
    """Compare the sums of a batch with those of its two halves."""
    # The axes are draws, then the batch and its two halves, then names.
    sums = evaluation.sums.double().cpu()
    # The bound avoids a division by 0.
    scale = sums.abs().amax((0, 1)).clamp(min=1e-12)
    draws = len(sums)
    whole_draws, first_draws, second_draws = sums.unbind(1)
    differences = (first_draws + second_draws - whole_draws) / scale
    if draws > 1:
        standard_error = differences.std(0) / math.sqrt(draws)
    else:
        standard_error = torch.zeros_like(scale)
    whole, first, second = sums.mean(0)
    return Comparison(
        samples=samples,
        names=evaluation.names,
        whole=whole,
        first=first,
        second=second,
        scale=scale,
        relative=(first + second - whole).abs() / scale,
        standard_error=standard_error,
    )


def whole_and_parts(samples: int) -> list[BatchSlice]:
    """Return the first samples of the first batch, as one batch and as two halves."""
    middle = first_part(samples)
    return [
        BatchSlice(0, slice(0, samples)),
        BatchSlice(0, slice(0, middle)),
        BatchSlice(0, slice(middle, samples)),
    ]


def warn_unless_sums_add_up(state: "State") -> None:
    """Warn if the sums of compute_loss do not add up, in a new run that splits its batches.

    Collective: all ranks evaluate the same few samples. The results of the run stay the same.
    """
    world = state.world
    settings = state.config.train
    is_split = world.size > 1 or len(state.plan) > 1
    if state.step > 0 or not is_split or need_not_add_up():
        return
    samples = min(settings.micro_batch_size, settings.global_batch_size, MAX_SAMPLES)
    # One sample has no halves. The global batch has at least two samples, since it is split.
    samples = max(samples, 2)
    with unchanged(state):
        difference = _find_difference(state, samples)
    if difference is None or world.rank > 0:
        return
    comparison, index = difference
    log.warning(
        "compute_loss does not add up: %s. So training depends on the number of ranks and "
        "micro-batches: %s. If you intend that, set ADDS_UP = False in model.py",
        comparison.describe(index),
        comparison.advice(index),
    )


def _find_difference(state: "State", samples: int) -> tuple[Comparison, int] | None:
    """Evaluate a batch and its halves; return the first sum that does not add up, if there is one.

    One draw is enough if all sums add up. If not, a second one shows whether the model or its data
    is random; if so, only the means of many draws tell.
    """
    for draws in (1, 2, DRAWS):
        evaluation = _try_evaluate(state, samples, draws)
        if evaluation is None:
            return None
        comparison = compare(evaluation, samples)
        wrong = [index for index in comparison.wrong if is_certain(comparison, index)]
        if not wrong:
            return None
        if draws == 2 and not comparison.is_random:
            return comparison, wrong[0]
    # Here the sums of a random model still do not add up after all draws.
    if comparison.is_too_random:
        return None
    return comparison, wrong[0]


def is_certain(comparison: Comparison, index: int) -> bool:
    """Tell whether a sum fails to add up for a reason other than rounding or a NaN."""
    whole = comparison.whole[index]
    values = torch.stack([whole, comparison.first[index], comparison.second[index]])
    if not values.isfinite().all():
        return False
    if index <= COUNT_OF_LOSS:
        return True
    # This is a metric. If its values are whole numbers, rounding may have moved some samples.
    if bool((values == values.round()).all()):
        return False
    return bool(comparison.relative[index] > TOLERANCE_OF_METRICS)


def _try_evaluate(state: "State", samples: int, draws: int) -> Evaluation | None:
    """Evaluate a batch and its halves, averaged over the ranks; None if that fails on any rank."""
    # An error here is not reported: training may work nevertheless, and if it does not, its first
    # step raises the error again.
    world = state.world
    problem: Exception | None = None
    evaluation = None
    slices = whole_and_parts(samples)
    batches: list[Any] = []
    if parallel.SHARDED:
        # A forward of a sharded model is collective, so first all ranks must have read the data.
        try:
            batches = [*read_batches(state, slices, draws)]
        except Exception as error:
            problem = error
        if _any_failed(problem, world):
            return None
    try:
        if parallel.SHARDED:
            evaluation = evaluate(state, batches, draws)
        else:
            with contextlib.closing(read_batches(state, slices, draws)) as reading:
                evaluation = evaluate(state, reading, draws)
    except Exception as error:
        problem = error
    if _any_failed(problem, world):
        return None
    assert evaluation is not None  # no rank failed
    # All ranks have to come to the same decision, so all see the same sums.
    parallel.require_same({"metrics of compute_loss (model.py)": evaluation.names}, world)
    sums = parallel.all_reduce(evaluation.sums, world) / world.size
    return Evaluation(sums, evaluation.names)


def _any_failed(problem: Exception | None, world: World) -> bool:
    """Return whether any rank has a problem, and log this rank's; collective."""
    if problem is not None:
        log.debug("could not check whether compute_loss adds up", exc_info=problem)
    failed = torch.tensor(float(problem is not None), device=world.device)
    return bool(parallel.all_reduce(failed, world) > 0)


@contextlib.contextmanager
def unchanged(state: "State") -> Iterator[None]:
    """Restore modes, buffers and random states after the block, which runs in evaluation mode."""
    # Each buffer, with the dictionary and the name under which its module holds it.
    buffers: list[tuple[dict[str, Any], str, Any]] = []
    copies: list[Any] = []
    for module in state.model.modules():
        for name, buffer in module._buffers.items():
            buffers.append((module._buffers, name, buffer))
            copies.append(buffer.detach().clone() if buffer is not None else None)
    python_numbers = random.getstate()
    numpy_numbers = np.random.get_state()
    devices = [state.world.device] if state.world.device.type == "cuda" else []
    try:
        # `state.module` may wrap `state.model`. Setting its mode sets that of the model, too.
        with torch.random.fork_rng(devices), evaluation_mode(state.module), without_compilation():
            yield
    finally:
        random.setstate(python_numbers)
        np.random.set_state(numpy_numbers)
        with torch.no_grad():
            # A forward may also have replaced a buffer with another tensor.
            for (holder, name, buffer), values in zip(buffers, copies, strict=True):
                holder[name] = buffer
                if buffer is not None:
                    buffer.copy_(values)
    if parallel.SHARDED:
        # FSDP may still hold gathered weights. A hook of FSDP on state_dict() frees them.
        state.model.state_dict()


def without_compilation() -> contextlib.AbstractContextManager[Any]:
    """Run compiled functions eagerly inside the block.

    Otherwise they would be compiled for the sizes of these batches, and again for dynamic sizes.
    """
    # If anything is compiled, torch.compile has imported dynamo. Importing it takes a second.
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()
