"""The order of the samples, as a pure function of (seed, position), and the loader of batches.

Training reads one endless stream of samples. Position p is in epoch p // N, at index p % N of the
permutation of (seed, epoch); global batch k has the positions k * B ... (k + 1) * B - 1. No index
array is built and no loader state is saved: reading any batch of any dataset costs the same.
"""

import contextlib
import itertools
import math
import random
import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import signal_handling

from .collate import batch_of, owner_of, reads_batches
from .device import annotated
from .distributed import Group, World
from .distributed.stop import Stop
from .errors import STOP_SIGNALS, UserError
from .permutation import Permutation as Permutation
from .permutation import random_words
from .permutation import stream_key as stream_key
from .worker_errors import shortage, start_workers

if TYPE_CHECKING:
    from .config import TrainConfig

# Seconds that a batch may take after a stop signal. The save comes after it.
PATIENCE = 20.0
# A wait that does not even notice that this time is over is ended so many seconds later.
AFTER_PATIENCE = 7.0
# Seconds after which a wait for the workers looks for a stop signal.
POLL = 5.0
# Seconds that a batch may take that is read by `read_apart`.
READ_APART = 120.0
# The name of the loader's part of a step in a trace.
WAITING = "waiting for data"

# Random numbers of different purposes have nothing to do with each other, even with one seed: the
# purpose is a word of their key.
ORDER = 0
AUGMENTATION = 1
STEP = 2
SUBSET = 3
MIXTURE = 4
DRAWS = 5
VALIDATION_DRAWS = 6

# Positions whose ids are computed at once: about 10 ns each, against 300 ns one batch at a time.
BLOCK = 16384


def sample_keys(seed: int, positions: np.ndarray) -> np.ndarray:
    """Compute a random 64-bit word per sample from (seed, position), for augmentation."""
    return random_words(stream_key(seed, AUGMENTATION), positions.astype(np.uint64))


def seed_random(*words: int, device: torch.device | None = None) -> None:
    """Make random numbers a function of these words, so that no generator's state is saved.

    With a device, those of torch on the CPU and there; without one, those that a dataset may draw:
    of torch on the CPU, NumPy and Python.
    """
    key = stream_key(*words) >> 1
    # torch.manual_seed seeds all devices, which takes a hundred times as long.
    torch.default_generator.manual_seed(key)
    if device is None:
        np.random.seed(key & 0xFFFFFFFF)
        random.seed(key)
    elif device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)
    elif device.type == "mps":
        torch.mps.manual_seed(key)


class GlobalBatches:
    """The sample ids of every global batch, the same whatever the number of ranks.

    Orders of different `purpose` are independent, even with the same seed.
    """

    def __init__(self, size: int, batch_size: int, seed: int, *purpose: int) -> None:
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.purpose = purpose or (ORDER,)
        # Ids are computed for a block of batches at a time; the last block is kept.
        self.per_block = max(1, BLOCK // batch_size)
        self.block = -1
        self.ids_of_block = np.empty(0, np.int64)

    def positions(self, step: int) -> np.ndarray:
        """Return the stream positions of global batch `step`, int64 of shape [batch_size]."""
        return np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)

    def ids(self, step: int) -> np.ndarray:
        """Return the sample ids of global batch `step`, int64 of shape [batch_size]."""
        block, row = divmod(step, self.per_block)
        if block != self.block:
            length = self.per_block * self.batch_size
            self.ids_of_block = self.ids_at(block * length, (block + 1) * length)
            self.block = block
        return self.ids_of_block[row * self.batch_size : (row + 1) * self.batch_size]

    def drawn(self, step: int) -> dict[str, int]:
        """Count the samples of each source before `step`; {} without several sources."""
        return {}

    def ids_at(self, start: int, stop: int) -> np.ndarray:
        """Return the sample ids at positions start ... stop - 1, int64."""
        chunks = [np.empty(0, np.int64)]
        while start < stop:
            # Each epoch has its own permutation; a batch may span several epochs.
            epoch, offset = divmod(start, self.size)
            count = min(stop - start, self.size - offset)
            permutation = Permutation(self.size, stream_key(self.seed, *self.purpose, epoch))
            chunks.append(permutation(np.arange(offset, offset + count, dtype=np.int64)))
            start += count
        return np.concatenate(chunks)


def fixed_subset(size: int, count: int) -> np.ndarray:
    """Choose the same `count` ids of 0 ... size - 1 each time, shuffled (0: all of them)."""
    return Permutation(size, stream_key(0, SUBSET))(np.arange(min(count or size, size)))


class MicroBatch(NamedTuple):
    """Which samples of a global batch go through the model at once."""

    # Their indices in the global batch.
    indices: slice
    # The factor of their loss, gradients and counts: 1.0, or 0.0 for padding.
    weight: float


def micro_batches(
    size: int, micro_batch_size: int, rank: int, ranks: int, first: int = 0
) -> list[MicroBatch]:
    """Divide a batch of `size` samples, from index `first` on; return this rank's micro-batches."""
    # The ranks take consecutive slices of near-equal size, and cut each into near-equal
    # micro-batches: 9 samples in micro-batches of up to 8 are 5 and 4. With 8 and 1 the batch
    # statistics of the single sample would fail.
    start = first + size * rank // ranks
    stop = first + size * (rank + 1) // ranks
    # Forward and backward may contain collectives, which every rank must enter. So every rank gets
    # the same number of micro-batches: as many as the largest slice needs.
    count = divide_up(size, ranks * micro_batch_size)
    cuts = [start + divide_up((stop - start) * i, count) for i in range(count + 1)]
    result: list[MicroBatch] = []
    for low, high in itertools.pairwise(cuts):
        if low < high:
            result.append(MicroBatch(slice(low, high), 1.0))
        else:
            # This rank has fewer samples than micro-batches. It pads with the batch's first sample
            # at weight 0, which adds nothing to the loss, the gradients or the counts. Its other
            # micro-batches have one sample each, so padding costs no more than they do.
            result.append(MicroBatch(slice(first, first + 1), 0.0))
    return result


def divide_up(numerator: int, denominator: int) -> int:
    """Divide two integers, and round up."""
    return -(-numerator // denominator)


def check_dataset(dataset: Any, name: str) -> None:
    """Check that it is a map-style dataset with at least one sample (UserError)."""
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    is_map_style = has_items and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise UserError(
            f"the {name} data (build_datasets in data.py) is a {type(dataset).__name__}: it needs "
            "__len__, and __getitem__ or __getitems__. Write a stream to files first, or render "
            "with samples=stream"
        )
    if not len(dataset):
        raise UserError(f"the {name} data is empty")


def fetch(
    dataset: Any,
    ids: np.ndarray,
    keys: np.ndarray | None = None,
    draws: tuple[int, int] | None = None,
) -> Any:
    """Read samples as one batch of tensors.

    `dataset.__getitems__(ids)` may return a finished batch, or a list of samples to collate; a
    dataset with `__getitem__` alone works too. If the dataset has `collate(samples) -> batch`, that
    makes the batch of such samples, in place of collate.py. With `keys` (uint64, one per sample),
    the dataset's `augment(batch, keys)` changes the batch. Both are found within torch's `Subset`.
    `draws` (a key, the first sample's position) seeds the global random numbers, unless the dataset
    says `draws = False`, which saves 10 us a sample, or a batch with `__getitems__`.
    """
    # The seed is a function of the position, not of the rank, the worker or what was read before.
    # So a sample gets the same random numbers on any number of ranks and workers, and after a
    # resume.
    is_seeded = draws is not None and getattr(dataset, "draws", True)
    key, position = draws or (0, 0)
    if reads_batches(dataset):
        if is_seeded:
            seed_random(key, position)
        batch = dataset.__getitems__(ids.tolist())
    else:
        batch = []
        for sample_position, sample_id in enumerate(ids.tolist(), position):
            if is_seeded:
                seed_random(key, sample_position)
            batch.append(dataset[sample_id])
    if isinstance(batch, list):
        batch = batch_of(batch, ids.tolist(), dataset)
    if keys is None:
        return batch
    return owner_of("augment", dataset).augment(batch, keys)


class _BatchReader(Dataset):
    """Reads micro-batches by (step, micro-batch); loader workers compute the ids themselves."""

    def __init__(self, dataset: Any, order: GlobalBatches, augments: bool) -> None:
        self.dataset = dataset
        self.order = order
        # Whether the dataset's `augment` is called, if it has one.
        self.augments = augments
        self.draws = stream_key(order.seed, DRAWS)

    def __getitem__(self, item: tuple[int, MicroBatch]) -> Any:
        step, micro_batch = item
        indices = micro_batch.indices
        keys = None
        if self.augments and owner_of("augment", self.dataset) is not None:
            keys = sample_keys(self.order.seed, self.order.positions(step)[indices])
        ids = self.order.ids(step)[indices]
        first_position = step * self.order.batch_size + indices.start
        return fetch(self.dataset, ids, keys, draws=(self.draws, first_position))


class Loader:
    """This rank's micro-batches, step after step; `seconds` is the time that the loop waited."""

    def __init__(
        self,
        dataset: Any,
        order: GlobalBatches,
        plan: list[MicroBatch],
        workers: int,
        pin: bool,
        augments: bool = True,
    ) -> None:
        self.source = _BatchReader(dataset, order, augments)
        # The number of samples, None for a stream.
        self.size = len(dataset) if hasattr(dataset, "__len__") else None
        self.plan = plan
        self.workers = workers
        self.pin = pin
        self.step = 0
        self.seconds = 0.0
        self.iterator: Any = None
        # When the loop began to wait for the workers, and what knows of stop signals.
        self.asked = math.inf
        self.stop: Stop | None = None
        # Whether the workers did not answer in time.
        self.gave_up = False

    def position(self) -> dict[str, Any]:
        """Return what a manifest must hold to resume here: nothing, the step is enough."""
        return {}

    def resume(self, step: int, manifest: dict[str, Any], group: Group) -> None:
        """Continue with global batch `step` of a restored run; costs the same for any step."""
        self.close()
        self.step = step

    def next(self, stop: Stop | None = None) -> list[Any]:
        """Return the micro-batches of the next step, in the order of the plan.

        After a signal that `stop` has received, the workers' next batch is waited for `PATIENCE` at
        most (KeyboardInterrupt).
        """
        started = time.perf_counter()
        with annotated(WAITING):
            if self.workers:
                batches = [self._wait(stop) for _ in self.plan]
                self.asked = math.inf
            else:
                batches = self.of(self.step, self.plan)
        self.step += 1
        self.seconds += time.perf_counter() - started
        return batches

    def of(self, step: int, plan: list[MicroBatch]) -> list[Any]:
        """Read the micro-batches of any step by any plan, in this process."""
        return [self.source[step, micro_batch] for micro_batch in plan]

    def _wait(self, stop: Stop | None) -> Any:
        """Return the workers' next batch; after a stop signal, wait for `PATIENCE` at most."""
        if self.iterator is None:
            loader = self._data_loader(self.source, self._items(self.step), self.workers, POLL)
            self.iterator = start_workers(loader, self.source.dataset)
            watching = threading.Thread(target=self._watch, args=(self.iterator,), daemon=True)
            watching.start()
        self.stop = stop
        self.asked = time.monotonic()
        while True:
            try:
                return next(self.iterator)
            except UserError as error:
                # DataLoader puts the worker's traceback in front of the message.
                raise UserError(str(error).strip().rpartition("UserError: ")[2]) from None
            except (RuntimeError, OSError, EOFError) as error:
                if self.gave_up:
                    raise KeyboardInterrupt("the loader workers do not answer") from None
                line = shortage(error)
                if line:
                    raise UserError(line) from None
                # DataLoader's timeout is the time to look for a stop signal; then it waits again.
                # Any other error ends the run, and so does a pinning thread that has died, which
                # DataLoader does not notice when it has a timeout.
                pinning = getattr(self.iterator, "_pin_memory_thread", threading.main_thread())
                if not str(error).startswith("DataLoader timed out") or not pinning.is_alive():
                    raise
                # Each batch has this time, also one that is asked for long after the signal.
                if self._overdue() > 0:
                    self.gave_up = True
                    raise KeyboardInterrupt("the loader workers do not answer") from None

    def _overdue(self) -> float:
        """Return how long the workers have let a stop wait beyond `PATIENCE`, in seconds."""
        if self.stop is None:
            return -math.inf
        return time.monotonic() - max(self.stop.received_at, self.asked) - PATIENCE

    def _watch(self, iterator: Any) -> None:
        """Kill the workers when a stop waits for them without end; runs on a thread."""
        # A worker that hangs in C code, and holds Python's lock, cannot hand over the memory of a
        # batch that it has sent before. For that DataLoader waits without a limit.
        while self.iterator is iterator and not self.gave_up:
            time.sleep(1.0)
            if self._overdue() > AFTER_PATIENCE:
                self.gave_up = True
                for worker in iterator._workers:
                    worker.kill()

    def read_apart(self, source: Dataset, items: list[Any]) -> Generator[Any, None, None]:
        """Read items of a dataset that are not trained on; by a worker, if the run has workers.

        A file that a dataset opens at its first sample must not be open in this process when the
        run's workers are forked from it, since all of them would share its position.
        """
        if self.workers == 0:
            for item in items:
                yield source[item]
        else:
            loader = self._data_loader(source, items, workers=1, timeout=READ_APART)
            iterator = start_workers(loader, self.source.dataset)
            try:
                yield from iterator
            finally:
                # As in `close`.
                try:
                    iterator._shutdown_workers()
                finally:
                    for worker in iterator._workers:
                        worker.kill()

    def _data_loader(
        self, source: Dataset, items: Iterable[Any], workers: int, timeout: float
    ) -> DataLoader:
        return DataLoader(
            source,
            batch_size=None,
            sampler=items,
            num_workers=workers,
            timeout=timeout,
            pin_memory=self.pin,
            worker_init_fn=_set_up_worker,
            # Otherwise it would draw a seed from the trainer's random numbers.
            generator=torch.Generator(),
        )

    def _items(self, first_step: int) -> Iterator[tuple[int, MicroBatch]]:
        """Yield what the workers are to read: the plan of each step from one on, without end."""
        for step in itertools.count(first_step):
            for micro_batch in self.plan:
                yield step, micro_batch

    def close(self) -> None:
        """Stop the workers; `next` starts them again."""
        # The iterator's finaliser would stop them too, but a traceback can keep the iterator alive.
        # Then Python waits at exit for the workers, which ignore its signal.
        # Nothing is waited for any more, so `_watch` does nothing.
        self.asked = math.inf
        if self.iterator is not None:
            if self.gave_up:
                # DataLoader would wait ten seconds for each worker that hangs. It also raises an
                # error when a worker is killed, until it has forgotten their numbers.
                signal_handling._remove_worker_pids(id(self.iterator))
                self.iterator._worker_pids_set = False
                for worker in self.iterator._workers:
                    worker.kill()
            try:
                self.iterator._shutdown_workers()
            finally:
                # A worker may still hang, and Ctrl-C may have ended the wait for it.
                for worker in self.iterator._workers:
                    worker.kill()
        self.iterator = None


def _set_up_worker(worker: int) -> None:
    # torchrun signals the whole session. A worker that died of it would fail the step that comes
    # before the last save.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]


def _send_error(queue: Queue, error: Exception, item: tuple[int, Any]) -> None:
    """Send an error in place of a batch that cannot be sent: the trainer would wait for ever."""
    index, _ = item
    ways_out = "set TMPDIR to a short path, or --train.loader-workers 0"
    line = shortage(error) or f"{error}: {ways_out}"
    problem = UserError(f"a loader worker cannot send a batch: {line}")
    # A closed queue (ValueError) means that the run ends: nobody waits for this batch.
    with contextlib.suppress(ValueError):
        queue.put((index, ExceptionWrapper((UserError, problem, None))))


def open_loader(dataset: Any, train: "TrainConfig", plan: list[MicroBatch], world: World) -> Loader:
    """Build the loader of a training set; UserError unless it is a map-style dataset."""
    check_dataset(dataset, "training")
    # Here an `augment` or `collate` that would not be called is refused before the first step.
    owner_of("augment", dataset)
    owner_of("collate", dataset)
    # A dataset may bring an order, as a mixture does.
    own_order = getattr(dataset, "order", None)
    if own_order:
        order = own_order(train.global_batch_size, train.seed)
    else:
        order = GlobalBatches(len(dataset), train.global_batch_size, train.seed)
    return Loader(
        dataset,
        order,
        plan,
        train.loader_workers,
        pin=world.device.type == "cuda",
        # --train.overfit trains on few samples as they are.
        augments=not train.overfit,
    )
