"""Compute the order of samples as a pure function of (seed, position), and load batches.

The order of N samples is endless. Position p is in epoch p // N, at index p % N of the permutation
for (seed, epoch). Global batch k of B samples has positions k * B ... (k + 1) * B - 1. So a run
saves no loader state, and it can continue at any batch in O(1).
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

# After a stop signal, wait for a batch at most this long (seconds), then end without a save.
PATIENCE = 20.0
# If that wait hangs, kill the workers this many seconds after `PATIENCE` is over.
AFTER_PATIENCE = 7.0
# While waiting for workers, check for a stop signal at this interval (seconds).
POLL = 5.0
# `read_apart` waits at most this long for a batch (seconds), since the first batch may be slow.
READ_APART = 1500.0
# Profiler traces show this label while the training loop waits for data.
WAITING = "waiting for data"

# Purposes of random numbers. Each key is a hash of the seed and a purpose, so that one seed gives
# independent numbers for each purpose. STEP is for forward and backward, such as dropout. DRAWS is
# for the numbers that a dataset draws while it reads a training sample.
ORDER = 0
AUGMENTATION = 1
STEP = 2
SUBSET = 3
MIXTURE = 4
DRAWS = 5
VALIDATION_DRAWS = 6

# Compute about this many ids at once: 10 ns per id. One batch at a time would take 300 ns per id.
BLOCK = 16384


def sample_keys(seed: int, positions: np.ndarray) -> np.ndarray:
    """Return a random 64-bit key for the sample at each position; `augment` gets these keys."""
    return random_words(stream_key(seed, AUGMENTATION), positions.astype(np.uint64))


def seed_random(*words: int, device: torch.device | None = None) -> None:
    """Seed random generators with a hash of `words`, so that a run need not save their states.

    With a device, this seeds torch's generators of the CPU and of the device. Without a device, it
    seeds the generators that a dataset may use: those of torch on the CPU, NumPy and Python.
    """
    # Keep 63 of the 64 bits, so that the seed also fits into a signed integer.
    key = stream_key(*words) >> 1
    # torch.manual_seed would seed all devices, which takes a hundred times longer.
    torch.default_generator.manual_seed(key)
    if device is None:
        np.random.seed(key & 0xFFFFFFFF)
        random.seed(key)
    elif device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)
    elif device.type == "mps":
        torch.mps.manual_seed(key)


def seed_start(seed: int) -> None:
    """Seed all generators at the start of a run, for a random data split and initial weights."""
    # `seed_random` seeds NumPy and Python, and `torch.manual_seed` seeds torch on all devices. The
    # remainder makes any integer a valid seed.
    seed_random(seed)
    torch.manual_seed(seed % 2**63)


class GlobalBatches:
    """Computes the sample ids of any global batch; they do not depend on the number of ranks.

    Two orders with the same seed but a different `purpose` are independent of each other.
    """

    def __init__(self, size: int, batch_size: int, seed: int, *purpose: int) -> None:
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.purpose = purpose or (ORDER,)
        # `ids` computes a whole block of batches at once, and keeps the last block. `block` is that
        # block's number; -1 if there is none yet.
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
        """Count the samples of each source before `step`; {} if there is only one source."""
        return {}

    def ids_at(self, start: int, stop: int) -> np.ndarray:
        """Return the sample ids at positions start ... stop - 1, int64."""
        # np.concatenate needs at least one array. If start == stop, this empty one is the result.
        chunks = [np.empty(0, np.int64)]
        while start < stop:
            # Each epoch has its own permutation, and the positions may span several epochs.
            epoch, offset = divmod(start, self.size)
            count = min(stop - start, self.size - offset)
            permutation = Permutation(self.size, stream_key(self.seed, *self.purpose, epoch))
            chunks.append(permutation(np.arange(offset, offset + count, dtype=np.int64)))
            start += count
        return np.concatenate(chunks)


def fixed_subset(size: int, count: int) -> np.ndarray:
    """Choose `count` of the ids 0 ... size - 1 (0: all), shuffled; the result never changes."""
    permutation = Permutation(size, stream_key(0, SUBSET))
    return permutation(np.arange(min(count or size, size)))


class MicroBatch(NamedTuple):
    """The samples of a global batch that go through the model at once."""

    # The indices of these samples in the global batch.
    indices: slice
    # The factor for the loss, gradients and counts of these samples: 1.0, or 0.0 for padding.
    weight: float


def micro_batches(
    size: int, micro_batch_size: int, rank: int, ranks: int, first: int = 0
) -> list[MicroBatch]:
    """Split the `size` samples of a global batch from index `first` on; return this rank's part."""
    # Each rank gets a consecutive slice, and all slices are nearly equal in size. So are the
    # micro-batches of a slice: with at most 8 samples in each, 9 samples are split into 5 and 4. If
    # they were split into 8 and 1, batch normalization would fail on the single sample.
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
            # This rank has fewer samples than micro-batches. Pad with the sample at index `first`:
            # with weight 0 it adds nothing to the loss, the gradients or the counts.
            result.append(MicroBatch(slice(first, first + 1), 0.0))
    return result


def divide_up(numerator: int, denominator: int) -> int:
    """Divide two integers and round up: `//` rounds down, so negate before and after it."""
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
    """Read the samples with these ids as one batch.

    A dataset has `__getitem__(id)`, which returns a sample, or `__getitems__(ids)`, which returns a
    whole batch or a list of samples. The dataset's `collate(samples)` turns a list into a batch; if
    there is no such method, collate.py does. With `keys` (uint64, one per sample), the dataset's
    `augment(batch, keys)` returns the final batch. Both methods are also found inside a `Subset`.

    `draws` is a key and the first sample's position. They seed the global random generators before
    each sample (with `__getitems__`, once per batch). A dataset can set `draws = False`, which
    skips this and saves 10 us each time.
    """
    # A sample's seed depends only on the key and its position. So the sample gets the same random
    # numbers with any number of ranks and workers, and after a resume. With `__getitems__` a batch
    # has only one seed, so its numbers change with the number of ranks and the micro-batch size.
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
    """Dataset of whole batches with the index (step, micro-batch); workers compute sample ids."""

    def __init__(self, dataset: Any, order: GlobalBatches, augments: bool) -> None:
        self.dataset = dataset
        self.order = order
        # Whether to call the dataset's `augment`.
        self.augments = augments and owner_of("augment", dataset) is not None
        # `fetch` seeds the dataset's random numbers with this key and the position.
        self.draws = stream_key(order.seed, DRAWS)

    def __getitem__(self, item: tuple[int, MicroBatch]) -> Any:
        step, micro_batch = item
        indices = micro_batch.indices
        keys = None
        if self.augments:
            keys = sample_keys(self.order.seed, self.order.positions(step)[indices])
        ids = self.order.ids(step)[indices]
        first_position = step * self.order.batch_size + indices.start
        return fetch(self.dataset, ids, keys, draws=(self.draws, first_position))


class Loader:
    """Loads this rank's micro-batches, step by step; `seconds` sums up the time spent in `next`."""

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
        # When the current wait for the workers began (time.monotonic()); infinite between waits.
        self.asked = math.inf
        self.stop: Stop | None = None
        # Whether the loader no longer waits for the workers, since a batch took too long after a
        # stop signal.
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
        """Read the micro-batches in `plan` of any step, without the workers of training."""
        items = [(step, micro_batch) for micro_batch in plan]
        # This process must not open the data's files before the workers start: see `read_apart`.
        if self.workers and self.iterator is None:
            return list(self.read_apart(self.source, items))
        return [self.source[item] for item in items]

    def start(self) -> None:
        """Start the workers unless they run already; without workers, do nothing."""
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
                # DataLoader puts the worker's traceback in front of the message; remove it.
                raise UserError(str(error).strip().rpartition("UserError: ")[2]) from None
            except (RuntimeError, OSError, EOFError) as error:
                # Here `gave_up` means that `_watch` has killed the workers and so caused the error.
                if self.gave_up:
                    raise KeyboardInterrupt("the loader workers do not answer") from None
                line = shortage(error)
                if line:
                    raise UserError(line) from None
                if isinstance(error, OSError | EOFError):
                    raise_if_a_worker_died()
                # A timeout of DataLoader only means that `POLL` seconds are over: check for a stop
                # signal, then wait again. Any other error ends the run.
                timed_out = str(error).startswith("DataLoader timed out")
                # If the thread that pins batches has died, no batch will come, so the run ends,
                # too. With a timeout, DataLoader itself does not check that thread. Without
                # pinning, check the main thread instead, which is always alive.
                pinning = getattr(self.iterator, "_pin_memory_thread", threading.main_thread())
                if not timed_out or not pinning.is_alive():
                    raise
                if self._overdue() > 0:
                    self.gave_up = True
                    raise KeyboardInterrupt("the loader workers do not answer") from None

    def _overdue(self) -> float:
        """Return how many seconds longer than `PATIENCE` a stop has waited; negative if shorter."""
        if self.stop is None:
            return -math.inf
        # Count from the signal, or from the request for the batch if that came later. Before a
        # signal `received_at` is infinite, and between waits `asked` is. Then this returns
        # -infinity.
        waits_since = max(self.stop.received_at, self.asked)
        return time.monotonic() - waits_since - PATIENCE

    def _watch(self, iterator: Any) -> None:
        """Kill the workers if a stop would wait for them forever; runs in a thread."""
        # To receive a batch, this process asks the worker that sent it for access to the shared
        # memory. A worker that hangs in C code and holds the GIL does not answer, and DataLoader
        # waits for the answer without a limit, despite its timeout.
        while self.iterator is iterator and not self.gave_up:
            time.sleep(1.0)
            if self._overdue() > AFTER_PATIENCE:
                self.gave_up = True
                for worker in iterator._workers:
                    worker.kill()

    def read_apart(self, source: Dataset, items: list[Any]) -> Generator[Any, None, None]:
        """Yield items of `source`, read by a separate worker if the run has workers.

        A dataset may open a file when it reads its first sample. If this process opened the file
        and then forked the workers of training, all of them would share one file position.
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
                # As in `close`: the worker may hang, or Ctrl-C may interrupt the wait for it.
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
            # Each item of `source` is a whole batch already.
            batch_size=None,
            sampler=items,
            num_workers=workers,
            timeout=timeout,
            pin_memory=self.pin,
            worker_init_fn=_set_up_worker,
            # Without it, DataLoader would draw a seed from the global generator of training.
            generator=torch.Generator(),
        )

    def _items(self, first_step: int) -> Iterator[tuple[int, MicroBatch]]:
        """Yield the items for the workers to read: the plan of each step, without end."""
        for step in itertools.count(first_step):
            for micro_batch in self.plan:
                yield step, micro_batch

    def close(self) -> None:
        """Stop the workers; `next` starts them again."""
        # Nothing waits for the workers any more, so `_watch` must not kill them.
        self.asked = math.inf
        if self.iterator is not None:
            if self.gave_up:
                # DataLoader would wait ten seconds for each worker that hangs, so kill the workers.
                # DataLoader raises an error if a process in its list dies, so clear the list first.
                signal_handling._remove_worker_pids(id(self.iterator))
                self.iterator._worker_pids_set = False
                for worker in self.iterator._workers:
                    worker.kill()
            # The iterator's finalizer would also stop the workers, but a traceback can keep the
            # iterator alive. At exit, Python would then send SIGTERM to the workers, which ignore
            # it, and then wait for them. So stop them here.
            try:
                self.iterator._shutdown_workers()
            finally:
                # A worker may still hang, and Ctrl-C may have interrupted the wait for it.
                for worker in self.iterator._workers:
                    worker.kill()
        self.iterator = None


def _set_up_worker(worker: int) -> None:
    # A stop signal often goes to all processes of a job. Workers ignore it, since the run still
    # needs them to finish its step before it saves.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # A queue sends the worker's batches from a thread. If that fails, the thread calls this method.
    # Python's own method would only print the error.
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]


def _send_error(queue: Queue, error: Exception, item: tuple[int, Any]) -> None:
    """Send an error in place of a batch that cannot be sent, so that the trainer does not hang."""
    index, _ = item
    ways_out = "set TMPDIR to a short path, or --train.loader-workers 0"
    line = shortage(error) or f"{error}: {ways_out}"
    problem = UserError(f"a loader worker cannot send a batch: {line}")
    # `put` raises ValueError if the queue is closed. Then the run is ending and waits for no batch.
    with contextlib.suppress(ValueError):
        queue.put((index, ExceptionWrapper((UserError, problem, None))))


def open_loader(dataset: Any, train: "TrainConfig", plan: list[MicroBatch], world: World) -> Loader:
    """Build the loader of a training set; UserError if the set is not a map-style dataset."""
    check_dataset(dataset, "training")
    # `owner_of` raises UserError for an `augment` or `collate` that would never be called.
    owner_of("augment", dataset)
    owner_of("collate", dataset)
    # A dataset may define its own order of samples, with a method `order(batch_size, seed)`.
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
