"""Compute the order of samples as a pure function of (seed, position), and load batches.

The order of N samples is endless. Position p is in epoch p // N, at index p % N of the permutation
for (seed, epoch). Global batch k of B samples has positions k * B ... (k + 1) * B - 1. There is no
index array and no loader state to save, so seeking to any batch is O(1).
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
from .worker_errors import raise_if_a_worker_died, shortage, start_workers

if TYPE_CHECKING:
    from .config import TrainConfig

# Seconds that the workers have for a batch after a stop signal; then the run ends without a save.
PATIENCE = 20.0
# If the wait itself hangs, the workers are killed this many seconds after `PATIENCE` is over.
AFTER_PATIENCE = 7.0
# While waiting for workers, check for a stop signal at this interval (seconds).
POLL = 5.0
# Time limit of a batch in `read_apart` (seconds). It is long, since the first batch may be slow.
READ_APART = 1500.0
# The label of the wait for data in profiler traces.
WAITING = "waiting for data"

# The purpose is part of the key of random numbers, so that different purposes get independent
# numbers from one seed. STEP is for forward and backward, such as dropout. DRAWS are the numbers
# that a dataset draws while it reads a sample.
ORDER = 0
AUGMENTATION = 1
STEP = 2
SUBSET = 3
MIXTURE = 4
DRAWS = 5
VALIDATION_DRAWS = 6

# The number of ids computed at once: about 10 ns each, compared with 300 ns one batch at a time.
BLOCK = 16384


def sample_keys(seed: int, positions: np.ndarray) -> np.ndarray:
    """Compute a random 64-bit word per sample from (seed, position), for augmentation."""
    return random_words(stream_key(seed, AUGMENTATION), positions.astype(np.uint64))


def seed_random(*words: int, device: torch.device | None = None) -> None:
    """Seed generators with a hash of these integers, so that their states need not be saved.

    With a device, it seeds torch on the CPU and on the device. Without one, it seeds the generators
    that a dataset may use: torch on the CPU, NumPy and Python.
    """
    # 63 bits, so that the seed also fits a signed integer.
    key = stream_key(*words) >> 1
    # Not torch.manual_seed, which seeds all devices and takes a hundred times as long.
    torch.default_generator.manual_seed(key)
    if device is None:
        np.random.seed(key & 0xFFFFFFFF)
        random.seed(key)
    elif device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)
    elif device.type == "mps":
        torch.mps.manual_seed(key)


def seed_start(seed: int) -> None:
    """Seed all generators as at the start of a run: for a random split, and initial weights."""
    # This seeds NumPy and Python, and `manual_seed` torch on all devices. The remainder makes any
    # integer a valid seed.
    seed_random(seed)
    torch.manual_seed(seed % 2**63)


class GlobalBatches:
    """The sample ids of every global batch, independent of the number of ranks.

    Orders of different `purpose` are independent, even with the same seed.
    """

    def __init__(self, size: int, batch_size: int, seed: int, *purpose: int) -> None:
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.purpose = purpose or (ORDER,)
        # Ids are computed for a block of batches at a time. The last block is cached; -1 is none.
        self.per_block = max(1, BLOCK // batch_size)
        self.block = -1
        self.ids_of_block = np.empty(0, np.int64)

    def positions(self, step: int) -> np.ndarray:
        """Return the stream positions of global batch `step`, int64 of shape [batch_size]."""
        return np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)

    def ids(self, step: int) -> np.ndarray:
        """Return the sample ids of global batch `step`, int64 of shape [batch_size]."""
        block, batch = divmod(step, self.per_block)
        if block != self.block:
            block_size = self.per_block * self.batch_size
            self.ids_of_block = self.ids_at(block * block_size, (block + 1) * block_size)
            self.block = block
        return self.ids_of_block[batch * self.batch_size : (batch + 1) * self.batch_size]

    def drawn(self, step: int) -> dict[str, int]:
        """Count the samples of each source before `step`; {} without several sources."""
        return {}

    def ids_at(self, start: int, stop: int) -> np.ndarray:
        """Return the sample ids at positions start ... stop - 1, int64."""
        # If start == stop, this empty chunk is the only one.
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
    """Choose `count` ids of 0 ... size - 1 (0: all), always the same ones, in shuffled order."""
    permutation = Permutation(size, stream_key(0, SUBSET))
    return permutation(np.arange(min(count or size, size)))


class MicroBatch(NamedTuple):
    """The samples of a global batch that go through the model at once."""

    # The indices of these samples in the global batch.
    indices: slice
    # The factor of their loss, gradients and counts: 1.0, or 0.0 for padding.
    weight: float


def micro_batches(
    size: int, micro_batch_size: int, rank: int, ranks: int, first: int = 0
) -> list[MicroBatch]:
    """Split `size` samples of a batch, from index `first` on; return this rank's micro-batches."""
    # Each rank gets a consecutive slice of nearly equal size, split into nearly equal
    # micro-batches: 9 samples in micro-batches of up to 8 become 5 and 4. With 8 and 1, batch
    # normalization would fail on the single sample.
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
            # This rank has fewer samples than micro-batches. Pad with the batch's first sample at
            # weight 0, which adds nothing to the loss, the gradients or the counts. All other
            # micro-batches of this rank have one sample, too, so padding costs no more than they.
            result.append(MicroBatch(slice(first, first + 1), 0.0))
    return result


def divide_up(numerator: int, denominator: int) -> int:
    """Divide two integers, and round up."""
    return -(-numerator // denominator)


def check_dataset(dataset: Any, name: str) -> None:
    """Raise UserError unless the dataset is map-style and has at least one sample."""
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    is_map_style = has_items and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise UserError(
            f"the {name} data (build_datasets in data.py) is a {type(dataset).__name__}: it needs "
            "__len__, and __getitem__ or __getitems__. Write a stream to files first, or create "
            "the project with samples=stream"
        )
    if not len(dataset):
        raise UserError(f"the {name} data (build_datasets in data.py) is empty: check its path")


def fetch(
    dataset: Any,
    ids: np.ndarray,
    keys: np.ndarray | None = None,
    draws: tuple[int, int] | None = None,
) -> Any:
    """Read samples as one batch of tensors.

    A dataset has `__getitem__`, or `__getitems__(ids)`, which returns a whole batch or a list of
    samples. Samples become a batch with the dataset's `collate(samples) -> batch`, otherwise with
    collate.py. With `keys` (uint64, one per sample), the dataset's `augment(batch, keys)` changes
    the batch. Both methods are also found inside torch's `Subset`. `draws` (a key and the first
    sample's position) seeds the global random generators, unless the dataset sets `draws = False`,
    which saves 10 us per sample (with `__getitems__`, per batch).
    """
    # The seed depends only on the position. So a sample gets the same random numbers with any
    # number of ranks and workers, and after a resume. A batch of `__getitems__` has one seed, so
    # its numbers change with the number of ranks and the micro-batch size.
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
    """Reads the samples of (step, micro-batch); loader workers compute the ids themselves."""

    def __init__(self, dataset: Any, order: GlobalBatches, augments: bool) -> None:
        self.dataset = dataset
        self.order = order
        # Whether to call the dataset's `augment`, if it has one.
        self.augments = augments
        # The key of the random numbers that the dataset draws.
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
    """Loads this rank's micro-batches, step by step; `seconds` is the time that the loop waited."""

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
        # The number of samples; None for a stream.
        self.size = len(dataset) if hasattr(dataset, "__len__") else None
        self.plan = plan
        self.workers = workers
        self.pin = pin
        self.step = 0
        self.seconds = 0.0
        self.iterator: Any = None
        # The start of the current wait for workers (time.monotonic()); infinity without one.
        self.asked = math.inf
        self.stop: Stop | None = None
        # Whether the workers did not respond in time after a stop signal.
        self.gave_up = False

    def position(self) -> dict[str, Any]:
        """Return the loader's state for the manifest: nothing, since the step is enough."""
        return {}

    def resume(self, step: int, manifest: dict[str, Any], group: Group) -> None:
        """Continue with global batch `step` of a restored run; O(1) for any step."""
        self.close()
        self.step = step

    def next(self, stop: Stop | None = None) -> list[Any]:
        """Return the micro-batches of the next step, in the order of the plan.

        Raises KeyboardInterrupt if, after a stop signal, the workers take longer than `PATIENCE`.
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
        """Read the micro-batches of any step and plan, without the workers of training."""
        items = [(step, micro_batch) for micro_batch in plan]
        # Before the workers start, this process must not open the data's files: see `read_apart`.
        if self.workers and self.iterator is None:
            return list(self.read_apart(self.source, items))
        return [self.source[item] for item in items]

    def start(self) -> None:
        """Start the workers, if there are any and they do not run."""
        if self.workers and self.iterator is None:
            loader = self._data_loader(self.source, self._items(self.step), self.workers, POLL)
            self.iterator = start_workers(loader, self.source.dataset)
            watching = threading.Thread(target=self._watch, args=(self.iterator,), daemon=True)
            watching.start()

    def _wait(self, stop: Stop | None) -> Any:
        """Return the workers' next batch; after a stop signal, wait at most `PATIENCE`."""
        self.start()
        self.stop = stop
        self.asked = time.monotonic()
        while True:
            try:
                return next(self.iterator)
            except UserError as error:
                # DataLoader prepends the worker's traceback to the message.
                raise UserError(str(error).strip().rpartition("UserError: ")[2]) from None
            except (RuntimeError, OSError, EOFError) as error:
                if self.gave_up:
                    raise KeyboardInterrupt("the loader workers do not answer") from None
                line = shortage(error)
                if line:
                    raise UserError(line) from None
                if isinstance(error, OSError | EOFError):
                    raise_if_a_worker_died()
                # After DataLoader's timeout, check for a stop signal, then wait again. Other errors
                # end the run. So does a dead pinning thread, which DataLoader does not notice when
                # it has a timeout.
                timed_out = str(error).startswith("DataLoader timed out")
                # Without pinning the main thread stands in, since it is always alive.
                pinning = getattr(self.iterator, "_pin_memory_thread", threading.main_thread())
                if not timed_out or not pinning.is_alive():
                    raise
                if self._overdue() > 0:
                    self.gave_up = True
                    raise KeyboardInterrupt("the loader workers do not answer") from None

    def _overdue(self) -> float:
        """Return the seconds that a stop has waited beyond `PATIENCE`; below 0 if it has not."""
        if self.stop is None:
            return -math.inf
        # A batch that was requested after the signal has the full time, too.
        waits_since = max(self.stop.received_at, self.asked)
        return time.monotonic() - waits_since - PATIENCE

    def _watch(self, iterator: Any) -> None:
        """Kill the workers if a stop would wait for them forever; runs in a thread."""
        # A worker that hangs in C code and holds the GIL cannot hand over the shared memory of a
        # batch that it has already sent. DataLoader waits for that without a limit.
        while self.iterator is iterator and not self.gave_up:
            time.sleep(1.0)
            if self._overdue() > AFTER_PATIENCE:
                self.gave_up = True
                for worker in iterator._workers:
                    worker.kill()

    def read_apart(self, source: Dataset, items: list[Any]) -> Generator[Any, None, None]:
        """Read items of a dataset outside training; in a worker, if the run has workers.

        A dataset may open a file at its first sample. If this process did that before it forks the
        run's workers, all of them would share the file position.
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
                # A worker may hang, as in `close`.
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
            # Each item of the source is a whole batch already.
            batch_size=None,
            sampler=items,
            num_workers=workers,
            timeout=timeout,
            pin_memory=self.pin,
            worker_init_fn=_set_up_worker,
            # Otherwise DataLoader would draw a seed from the trainer's generator.
            generator=torch.Generator(),
        )

    def _items(self, first_step: int) -> Iterator[tuple[int, MicroBatch]]:
        """Yield the items for the workers to read: the plan of each step, without end."""
        for step in itertools.count(first_step):
            for micro_batch in self.plan:
                yield step, micro_batch

    def close(self) -> None:
        """Stop the workers; `next` starts them again."""
        # There is no wait any more, so `_watch` must not act.
        self.asked = math.inf
        if self.iterator is not None:
            if self.gave_up:
                # DataLoader would wait ten seconds for each worker that hangs, so kill the workers.
                # DataLoader would raise an error for that, so first remove their process ids.
                signal_handling._remove_worker_pids(id(self.iterator))
                self.iterator._worker_pids_set = False
                for worker in self.iterator._workers:
                    worker.kill()
            # The iterator's finalizer would also stop the workers, but a traceback can keep the
            # iterator alive. Then Python would wait for them at exit, since they ignore SIGTERM.
            try:
                self.iterator._shutdown_workers()
            finally:
                # A worker may still hang, and Ctrl-C may have interrupted the wait for it.
                for worker in self.iterator._workers:
                    worker.kill()
        self.iterator = None


def _set_up_worker(worker: int) -> None:
    # torchrun sends stop signals to the whole session. The run still finishes its step and saves,
    # for which the workers must live.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]


def _send_error(queue: Queue, error: Exception, item: tuple[int, Any]) -> None:
    """Send an error instead of a batch that cannot be sent, so that the trainer does not hang."""
    index, _ = item
    ways_out = "set TMPDIR to a short path, or --train.loader-workers 0"
    line = shortage(error) or f"{error}: {ways_out}"
    problem = UserError(f"a loader worker cannot send a batch: {line}")
    # A closed queue (ValueError) means that the run is ending and does not wait for this batch.
    with contextlib.suppress(ValueError):
        queue.put((index, ExceptionWrapper((UserError, problem, None))))


def open_loader(dataset: Any, train: "TrainConfig", plan: list[MicroBatch], world: World) -> Loader:
    """Build the loader of a training set; UserError unless it is a map-style dataset."""
    check_dataset(dataset, "training")
    # `owner_of` raises UserError for an `augment` or `collate` that would never be called.
    owner_of("augment", dataset)
    owner_of("collate", dataset)
    # A dataset such as a mixture may define its own order.
    own_order: Any = getattr(dataset, "order", None)
    if callable(own_order):
        order: Any = own_order(train.global_batch_size, train.seed)
    else:
        order = GlobalBatches(len(dataset), train.global_batch_size, train.seed)
    return Loader(
        dataset,
        order,
        plan,
        train.loader_workers,
        pin=world.device.type == "cuda",
        # --train.overfit trains on a few samples without augmentation.
        augments=not train.overfit,
    )
