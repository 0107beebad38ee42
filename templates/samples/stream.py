"""How training samples are loaded: by their numbers, or as a stream has them.

A stream is an iterable with `state_dict` and `load_state_dict`, as torchdata's nodes and Hugging
Face's streaming data sets are. Each rank reads on in its own; the place goes into the manifest.
"""

import copy
import json
import time
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function
from torch.utils.data import IterableDataset, default_collate

from .config import TrainConfig
from .distributed import Group, World
from .errors import UserError
from .sampling import NOTHING, WAITING, GlobalBatches, Loader, Share, check_dataset

WAYS_OUT = (
    "give it both, as torchdata's nodes and Hugging Face's streaming data sets have them, or write "
    "its samples to files and read these by number"
)


class StreamOrder(GlobalBatches):
    """The numbers of a stream's samples: their places in it."""

    def ids(self, step: int) -> np.ndarray:
        """Numbers of the samples of global batch `step`, int64 of shape [batch_size]."""
        return self.positions(step)


class StreamLoader(Loader):
    """This rank's micro-batches, step after step: what comes next in its stream.

    At the end the stream begins anew. It is read one step ahead at the most, and only before the
    first step: at a save its place is that of the samples that were trained on.
    """

    def __init__(self, stream: Any, batch_size: int, plan: list[Share], world: World) -> None:
        order = StreamOrder(0, batch_size, 0)
        super().__init__(_FirstSamples(self), order, plan, workers=0, pin=False)
        self.stream, self.ranks, self.epoch = stream, world.size, 0
        self.iterating: Any = None
        self.first: list[Any] = []  # samples; measurements use them again and again
        self.ahead: list[Any] = []
        self.last: list[Any] = []

    @property
    def size(self) -> int | None:
        """Nobody knows how many samples there are."""
        return None

    def next(self) -> list[Any]:
        """The micro-batches of one step, in the order of the plan."""
        started, first = time.perf_counter(), not self.last
        with record_function(WAITING) if torch.autograd._profiler_enabled() else NOTHING:
            batches = self.of(self.step, self.plan)
        self.last, self.ahead = self.ahead, []
        self.step += 1
        self.seconds += time.perf_counter() - started
        if first:
            self.place()  # to refuse at once what no checkpoint could hold
        return batches

    def of(self, step: int, plan: list[Share]) -> list[Any]:
        """Micro-batches of the step before or, without going on, of the next one."""
        samples = self.last if step < self.step and self.last else self._peek()
        start = self.plan[0].places.start
        places = (slice(share.places.start - start, share.places.stop - start) for share in plan)
        return [default_collate(samples[place]) for place in places]

    def _peek(self) -> list[Any]:
        while len(self.ahead) < self.source.order.batch_size // self.ranks:
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

    def place(self) -> dict[str, Any]:
        """Where this rank's stream is, as JSON holds it; UserError for what JSON does not hold."""
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

    def return_to(self, place: dict[str, Any]) -> None:
        """Go on from a place; UserError if the stream does not know it."""
        try:
            self._set_epoch(place["epoch"])
            self.stream.load_state_dict(place["state"])
        except Exception as error:  # whatever the stream raises
            raise UserError(f"the training stream does not find its place: {error!r}") from error
        self.iterating = iter(self.stream)


class _FirstSamples:
    """A stream's first samples by number, over and over, for what is measured before training."""

    def __init__(self, loader: StreamLoader) -> None:
        self.loader = loader

    def __getitems__(self, ids: list[int]) -> list[Any]:
        first = self.loader.first or self.loader._peek()
        return [first[i % len(first)] for i in ids]


def open_loader(dataset: Any, train: TrainConfig, plan: list[Share], world: World) -> Loader:
    """The loader of a training set; UserError if it has neither numbers nor a place."""
    numbered = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if isinstance(dataset, IterableDataset) or not numbered:
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
        return StreamLoader(dataset, train.global_batch_size, plan, world)
    check_dataset(dataset, "training")
    order = GlobalBatches(len(dataset), train.global_batch_size, train.seed)
    return Loader(dataset, order, plan, train.loader_workers, pin=world.device.type == "cuda")


def place_of(loader: Loader, group: Group) -> dict[str, Any]:
    """What a manifest has to say of the loader: each rank's place in its stream."""
    return {"streams": group.agree(loader.place)} if isinstance(loader, StreamLoader) else {}


def go_on(loader: Loader, step: int, manifest: dict[str, Any], group: Group) -> None:
    """Continue with global batch `step`; UserError where a stream cannot."""
    if isinstance(loader, StreamLoader) and step:
        places = manifest.get("streams")
        if not isinstance(places, list) or len(places) != group.size:
            before = f"{len(places)} ranks" if isinstance(places, list) else "no stream"
            raise UserError(
                f"this run's checkpoint is of {before}, each at its place in its own: it cannot go "
                f"on with {group.size}. Use as many, or start anew from its weights (--init-from)"
            )
        group.agree(lambda: loader.return_to(places[group.rank]))
    loader.seek(step)
