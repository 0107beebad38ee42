"""Load training samples from a map-style dataset (map_style.py) or from a stream.

A stream is an iterable with `state_dict` and `load_state_dict`, like torchdata's nodes and Hugging
Face's streaming datasets. Each rank reads its own stream. The manifest of a checkpoint has the
position of each rank in its stream.
"""

import copy
import json
import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset

from . import map_style
from .collate import batch_of
from .device import annotated
from .distributed import Group, World
from .distributed.stop import Stop
from .errors import UserError

# `as` exports a name again: other modules import it from this one.
from .map_style import STEP as STEP
from .map_style import VALIDATION_DRAWS as VALIDATION_DRAWS
from .map_style import WAITING as WAITING
from .map_style import GlobalBatches as GlobalBatches
from .map_style import Loader as Loader
from .map_style import MicroBatch as MicroBatch
from .map_style import check_dataset as check_dataset
from .map_style import fetch as fetch
from .map_style import fixed_subset as fixed_subset
from .map_style import micro_batches as micro_batches
from .map_style import sample_keys as sample_keys
from .map_style import seed_random as seed_random
from .map_style import seed_start as seed_start
from .permutation import Permutation as Permutation
from .permutation import stream_key as stream_key

if TYPE_CHECKING:
    from .config import TrainConfig

log = logging.getLogger(__name__)
# Advice for a stream without `state_dict` and `load_state_dict`.
WAYS_OUT = (
    "add both, like torchdata's nodes and Hugging Face's streaming datasets, or write the samples "
    "to files and read them as a map-style dataset"
)


class StreamOrder(GlobalBatches):
    """The order of a stream. Its samples have no ids, so their positions serve as ids."""

    def ids(self, step: int) -> np.ndarray:
        """Return the sample ids of global batch `step`, int64 of shape [batch_size]."""
        return self.positions(step)


class StreamLoader(Loader):
    """Loads this rank's micro-batches from the next samples of its stream, step by step.

    When the stream ends, it starts over. The loader reads samples ahead only for measurements,
    before the first step. So at a save, the next sample of the stream is the first one that no step
    has used.
    """

    def __init__(
        self, stream: Any, train: "TrainConfig", plan: list[MicroBatch], world: World
    ) -> None:
        # The size of a stream is unknown, and its ids do not depend on it.
        order = StreamOrder(0, train.global_batch_size, train.seed)
        # `_FirstSamples` reads `self.stream`, so set it first.
        self.stream = stream
        super().__init__(_FirstSamples(self), order, plan, workers=0, pin=False)
        self.world = world
        self.epoch = 0
        self.group: Group | None = None
        self.stream_iterator: Any = None
        # This rank's samples of the first step that this process reads; measurements reuse them.
        self.first: list[Any] = []
        # This rank's samples of the next step, if they have been read already.
        self.ahead: list[Any] = []
        # This rank's samples of the last step; empty before the first step of this process.
        self.last: list[Any] = []

    def next(self, stop: Stop | None = None) -> list[Any]:
        """Return the micro-batches of the next step, in the order of the plan."""
        started = time.perf_counter()
        is_first = not self.last
        with annotated(WAITING):
            batches = self.of(self.step, self.plan)
        # `of` has read the samples of this step into `ahead`.
        self.last = self.ahead
        self.ahead = []
        self.step += 1
        self.seconds += time.perf_counter() - started
        # If the stream's state cannot be saved, fail at the first step, not at the first save.
        if is_first:
            self.stream_state()
        return batches

    def of(self, step: int, plan: list[MicroBatch]) -> list[Any]:
        """Return micro-batches of the last step, or of the next step without advancing to it."""
        if step < self.step and self.last:
            samples = self.last
        else:
            samples = self._peek()
        # A plan's indices count from the start of the global batch, but `samples` has only this
        # rank's slice of that batch.
        first_index = self.plan[0].indices.start
        batches: list[Any] = []
        for micro_batch in plan:
            indices = micro_batch.indices
            chosen = samples[indices.start - first_index : indices.stop - first_index]
            # Samples of a stream have no ids, so errors name their indices in the global batch.
            batches.append(batch_of(chosen, range(indices.start, indices.stop), self.stream))
        return batches

    def _peek(self) -> list[Any]:
        """Return this rank's samples of the next step, without advancing to that step."""
        # The seed depends only on the run's seed, the step and the rank, so a resumed run draws
        # the same random numbers.
        if not self.ahead:
            seed_random(self.source.draws, self.step, self.world.rank)
        samples_per_rank = self.source.order.batch_size // self.world.size
        while len(self.ahead) < samples_per_rank:
            self.ahead.append(self._read())
        if not self.first:
            self.first = self.ahead
        return self.ahead

    def _read(self) -> Any:
        """Return the stream's next sample; if the stream has ended, begin the next epoch."""
        if self.stream_iterator is None:
            self.stream_iterator = iter(self.stream)
        # Each of these two loops returns at its first sample. If the stream has no further sample,
        # the code after the loop runs.
        for sample in self.stream_iterator:
            return sample
        self._set_epoch(self.epoch + 1)
        self.stream_iterator = iter(self.stream)
        for sample in self.stream_iterator:
            return sample
        raise UserError(
            "the training stream (build_datasets in data.py) has no samples: check its path"
        )

    def _set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        # `set_epoch` gives a stream another order in each epoch.
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def position(self) -> dict[str, Any]:
        """Return the stream positions of all ranks on rank 0, for the manifest; collective.

        If the position of a rank cannot be saved, all ranks raise an error.
        """
        assert self.group, "`resume` is called before training"
        with self.group.together():
            state = self.stream_state()
        return {"streams": self.group.gather(state)}

    def resume(self, step: int, manifest: dict[str, Any], group: Group) -> None:
        """Continue with global batch `step`; collective.

        If the stream of a rank cannot resume there, all ranks raise UserError.
        """
        self.group = group
        if step:
            positions = manifest.get("streams")
            saved_by = "no stream"
            if isinstance(positions, list):
                saved_by = f"{len(positions)} ranks"
            if not isinstance(positions, list) or len(positions) != group.size:
                raise UserError(
                    f"the checkpoint has the stream positions of {saved_by}, but this run has "
                    f"{group.size}. Resume with the same number of ranks, or start a new run from "
                    "its weights (--init-from)"
                )
            with group.together():
                self.load_stream_state(positions[group.rank])
        self.step = step

    def stream_state(self) -> dict[str, Any]:
        """Return this rank's position; UserError if it cannot be saved as JSON."""
        state = copy.deepcopy(self.stream.state_dict())
        try:
            if json.loads(json.dumps(state)) == state:
                return {"epoch": self.epoch, "state": state}
        except (TypeError, ValueError):
            pass
        kind = type(self.stream).__name__
        raise UserError(
            f"state_dict() of the training stream, a {kind}, cannot be saved as JSON: {state}. "
            "Return only dictionaries with string keys, lists, numbers and strings"
        )

    def load_stream_state(self, position: dict[str, Any]) -> None:
        """Continue from a position; UserError if the stream refuses it."""
        try:
            self._set_epoch(position["epoch"])
            self.stream.load_state_dict(position["state"])
        # A user's stream may raise any error.
        except Exception as error:
            raise UserError(
                f"the training stream cannot resume at its saved position: {error!r}"
            ) from error
        # Measurements may have read ahead from the start of the stream: drop those samples.
        self.ahead = []
        # The next `_peek` first seeds the random numbers, and then `_read` starts the stream.
        self.stream_iterator = None


class _FirstSamples:
    """A dataset that repeats a stream's first samples, for measurements before training."""

    def __init__(self, loader: StreamLoader) -> None:
        self.loader = loader
        if hasattr(loader.stream, "collate"):
            self.collate = loader.stream.collate

    def __getitems__(self, ids: list[int]) -> list[Any]:
        first = self.loader.first or self.loader._peek()
        return [first[sample_id % len(first)] for sample_id in ids]


def open_loader(dataset: Any, train: "TrainConfig", plan: list[MicroBatch], world: World) -> Loader:
    """Build the loader of a map-style dataset or a stream; UserError for any other dataset."""
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if has_items and not isinstance(dataset, IterableDataset):
        return map_style.open_loader(dataset, train, plan, world)
    problem = f"the training stream (build_datasets in data.py) is a {type(dataset).__name__}"
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        raise UserError(f"{problem} without state_dict and load_state_dict: {WAYS_OUT}")
    if train.loader_workers:
        raise UserError(
            "--train.loader-workers must be 0 for a stream: let the stream itself read ahead"
        )
    if train.global_batch_size % world.size:
        raise UserError(
            f"--train.global-batch-size {train.global_batch_size}: with a stream it must be a "
            f"multiple of the number of ranks ({world.size})"
        )
    if has_shuffle_buffer(dataset):
        log.warning(
            "the training stream shuffles in a buffer, which its state_dict() does not save: a "
            "resume is not exact, since it skips the samples in the buffer. Shuffle the files "
            "instead"
        )
    return StreamLoader(dataset, train, plan, world)


def has_shuffle_buffer(stream: Any) -> bool:
    """Return whether a Hugging Face stream, or a stream that it reads, shuffles in a buffer."""
    if "Shuffle" in type(stream).__name__ and getattr(stream, "buffer_size", 0) > 1:
        return True
    # In these attributes, a Hugging Face stream keeps the streams that it reads.
    sources: list[Any] = list(getattr(stream, "ex_iterables", None) or ())
    for name in ("dataset", "_ex_iterable", "ex_iterable"):
        source = getattr(stream, name, None)
        if source is not None:
            sources.append(source)
    return any(has_shuffle_buffer(source) for source in sources if source is not stream)
