"""The loader of training samples: of a map-style dataset (map_style.py), or of a stream.

A stream is an iterable with `state_dict` and `load_state_dict`, like torchdata's nodes and Hugging
Face's streaming data sets. Each rank reads its own, and the manifest has each rank's position.
"""

import copy
import json
import logging
import time
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from . import map_style
from .device import annotated
from .distributed import Group, World
from .errors import UserError
from .map_style import STEP as STEP
from .map_style import WAITING as WAITING
from .map_style import GlobalBatches as GlobalBatches
from .map_style import Loader as Loader
from .map_style import Permutation as Permutation
from .map_style import Share as Share
from .map_style import check_dataset as check_dataset
from .map_style import fetch as fetch
from .map_style import fixed_subset as fixed_subset
from .map_style import sample_keys as sample_keys
from .map_style import seed_random as seed_random
from .map_style import shares as shares
from .map_style import stream_key as stream_key

log = logging.getLogger(__name__)
WAYS_OUT = (
    "give it both, as torchdata's nodes and Hugging Face's streaming data sets have them, or write "
    "its samples to files and read these by number"
)


class StreamOrder(GlobalBatches):
    """The numbers of a stream's samples: their positions in it."""

    def ids(self, step: int) -> np.ndarray:
        """Numbers of the samples of global batch `step`, int64 of shape [batch_size]."""
        return self.positions(step)


class StreamLoader(Loader):
    """This rank's micro-batches, step after step: what comes next in its stream.

    At its end the stream starts over. It is read at most one step ahead, and only before the first
    step, so at a save its position is that of the samples that were trained on.
    """

    def __init__(self, stream: Any, train: Any, plan: list[Share], world: World) -> None:
        order = StreamOrder(0, train.global_batch_size, train.seed)
        super().__init__(_FirstSamples(self), order, plan, workers=0, pin=False)
        self.stream, self.world, self.epoch = stream, world, 0
        self.group: Group | None = None
        self.iterating: Any = None
        self.first: list[Any] = []  # samples; measurements use them again and again
        self.ahead: list[Any] = []
        self.last: list[Any] = []

    def next(self) -> list[Any]:
        """The micro-batches of one step, in the order of the plan."""
        started, first = time.perf_counter(), not self.last
        with annotated(WAITING):
            batches = self.of(self.step, self.plan)
        self.last, self.ahead = self.ahead, []
        self.step += 1
        self.seconds += time.perf_counter() - started
        if first:
            self.stream_state()  # to refuse at once what no checkpoint could hold
        return batches

    def of(self, step: int, plan: list[Share]) -> list[Any]:
        """Micro-batches of the step before or, without reading further, of the next one."""
        samples = self.last if step < self.step and self.last else self._peek()
        start = self.plan[0].places.start
        places = (slice(share.places.start - start, share.places.stop - start) for share in plan)
        return [fetch(samples[place], np.arange(len(samples[place]))) for place in places]

    def _peek(self) -> list[Any]:
        if not self.ahead:
            seed_random(self.source.draws, self.step, self.world.rank)
        while len(self.ahead) < self.source.order.batch_size // self.world.size:
            self.ahead.append(self._read())
        self.first = self.first or self.ahead
        return self.ahead

    def _read(self) -> Any:
        if self.iterating is None:
            self.iterating = iter(self.stream)
        for sample in self.iterating:
            return sample
        self._set_epoch(self.epoch + 1)
        self.iterating = iter(self.stream)
        for sample in self.iterating:
            return sample
        raise UserError("the training stream (build_datasets in data.py) has no samples")

    def _set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.stream, "set_epoch"):  # another order, where the stream has one
            self.stream.set_epoch(epoch)

    def position(self) -> dict[str, Any]:
        """Each rank's position in its stream, for the manifest; collective, after `resume`."""
        assert self.group, "`resume` is called before training"
        with self.group.together():
            state = self.stream_state()
        return {"streams": self.group.gather(state)}

    def resume(self, step: int, manifest: dict[str, Any], group: Group) -> None:
        """Continue with global batch `step`; UserError where the streams cannot."""
        self.group = group
        if step:
            positions = manifest.get("streams")
            if not isinstance(positions, list) or len(positions) != group.size:
                before = f"{len(positions)} ranks" if isinstance(positions, list) else "no stream"
                raise UserError(
                    f"the checkpoint has the stream positions of {before}, and this run has "
                    f"{group.size}. Resume with as many ranks, or start a new run from its weights "
                    "(--init-from)"
                )
            with group.together():
                self.load_stream_state(positions[group.rank])
        self.step = step

    def stream_state(self) -> dict[str, Any]:
        """This rank's position, as JSON holds it; UserError for what JSON does not hold."""
        state = copy.deepcopy(self.stream.state_dict())
        try:
            if json.loads(json.dumps(state)) == state:
                return {"epoch": self.epoch, "state": state}
        except (TypeError, ValueError):
            pass
        kind = type(self.stream).__name__
        raise UserError(
            f"state_dict() of the training stream, a {kind}, holds more than dictionaries with "
            f"names, lists, numbers and text, which are all that a checkpoint keeps of it: {state}"
        )

    def load_stream_state(self, position: dict[str, Any]) -> None:
        """Continue from a position; UserError if the stream refuses it."""
        try:
            self._set_epoch(position["epoch"])
            self.stream.load_state_dict(position["state"])
        except Exception as error:  # whatever the stream raises
            raise UserError(
                f"the training stream cannot resume at its position: {error!r}"
            ) from error
        self.ahead = []  # what was measured before training is not the next batch
        self.iterating = None  # `_read` starts it, once its random numbers are seeded


class _FirstSamples:
    """A stream's first samples by number, over and over, for what is measured before training."""

    def __init__(self, loader: StreamLoader) -> None:
        self.loader = loader

    def __getitems__(self, ids: list[int]) -> list[Any]:
        first = self.loader.first or self.loader._peek()
        return [first[i % len(first)] for i in ids]


def open_loader(dataset: Any, train: Any, plan: list[Share], world: World) -> Loader:
    """The loader of a training set; UserError if it is neither map-style nor a stream."""
    map_style_dataset = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if map_style_dataset and not isinstance(dataset, IterableDataset):
        return map_style.open_loader(dataset, train, plan, world)
    kind = f"the training stream (build_datasets in data.py) is a {type(dataset).__name__}"
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        raise UserError(f"{kind} without state_dict and load_state_dict: {WAYS_OUT}")
    if train.loader_workers:
        raise UserError("--train.loader-workers: a stream is read ahead by workers of its own")
    if train.global_batch_size % world.size:
        raise UserError(
            f"--train.global-batch-size {train.global_batch_size} of a stream must be a "
            f"multiple of the {world.size} ranks"
        )
    if has_shuffle_buffer(dataset):
        log.warning(
            "the training stream shuffles in a buffer, which its state_dict() leaves out: a resume "
            "is not exact, as it passes over the samples in the buffer. Shuffle the files instead"
        )
    return StreamLoader(dataset, train, plan, world)


def has_shuffle_buffer(part: Any) -> bool:
    """Whether a Hugging Face stream, or a part of one, shuffles in a buffer."""
    if "Shuffle" in type(part).__name__ and getattr(part, "buffer_size", 0) > 1:
        return True
    names = ("dataset", "_ex_iterable", "ex_iterable")
    sources = [getattr(part, name, None) for name in names]
    sources += getattr(part, "ex_iterables", None) or ()
    return any(has_shuffle_buffer(it) for it in sources if it is not None and it is not part)
