"""The order of the samples, as a pure function of (seed, position), and the loader of batches.

Training reads one endless stream of samples. Position p is in epoch p // N, at place p % N of the
permutation of (seed, epoch); global batch k has the positions k * B ... (k + 1) * B - 1. No index
array is built and no loader state is saved: any batch of any data costs the same.
"""

import contextlib
import itertools
import random
import signal
import threading
import time
from functools import partial
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from .device import annotated
from .distributed import Group, World
from .distributed.stop import Stop
from .errors import STOP_SIGNALS, UserError

PATIENCE = 20.0  # seconds that a batch may take after a stop signal: it comes before the save
WAITING = "waiting for data"  # the loader's part of a step in a trace
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the increment of SplitMix64
MASK = (1 << 64) - 1
ROUNDS = 6  # four are measurably biased on small domains
TABLE_BELOW = 4096  # under this a sorted table is cheaper than a cipher and exactly uniform
STEP = 2  # purpose of the random numbers of a step
BLOCK = 16384  # positions computed at once: about 10 ns each, against 300 ns one batch at a time


def mix(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def stream_key(*words: int) -> int:
    """Fold integers into one 64-bit key; any change of any word gives an unrelated key."""
    key = 0
    for word in words:  # Python integers: numpy is ten times slower on single words
        key = (key + GOLDEN + word) & MASK
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB & MASK
        key ^= key >> 31
    return key


def sample_keys(seed: int, positions: np.ndarray) -> np.ndarray:
    """One random 64-bit word per sample, a function of (seed, position), for augmentation."""
    return mix(positions.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(stream_key(seed, 1)))


def seed_random(*words: int, device: torch.device | None = None) -> None:
    """Make random numbers a function of these words: no state is saved."""
    key = stream_key(*words) >> 1
    torch.default_generator.manual_seed(key)  # torch.manual_seed takes a hundred times as long
    if device is None:  # for all that data may draw
        np.random.seed(key & 0xFFFFFFFF)
        random.seed(key)
    elif device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)
    elif device.type == "mps":
        torch.mps.manual_seed(key)


class Permutation:
    """A keyed bijection of 0 ... size - 1, computed only at the positions that are read.

    A balanced Feistel network over the next even number of bits (Luby and Rackoff, 1988), walked
    until it lands inside the domain (Black and Rogaway, 2002: fewer than four walks on average).
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        count = size if ROUNDS < size < TABLE_BELOW else ROUNDS
        words = mix(np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key))
        self.table = np.argsort(words[:size], kind="stable") if size < TABLE_BELOW else None
        self.keys = words[:ROUNDS]
        half = ((size - 1).bit_length() + 1) // 2
        self.half, self.mask = np.uint64(half), np.uint64((1 << half) - 1)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Map places (int64, any shape of one axis) to sample ids (int64)."""
        if self.table is not None:
            return self.table[positions]
        values = self._encrypt(positions.astype(np.uint64))
        while (outside := np.flatnonzero(values >= self.size)).size:
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self.half, values & self.mask
        for key in self.keys:
            scrambled = right ^ key  # in place from here: the cost is passes over memory
            scrambled *= np.uint64(0xBF58476D1CE4E5B9)
            scrambled ^= scrambled >> np.uint64(32)
            scrambled *= np.uint64(0x94D049BB133111EB)
            scrambled >>= np.uint64(64) - self.half
            scrambled ^= left
            left, right = right, scrambled
        return (left << self.half) | right


class GlobalBatches:
    """The sample ids of every global batch, the same whatever the number of ranks."""

    # Those of another `purpose` have nothing to do with these.
    def __init__(self, size: int, batch_size: int, seed: int, *purpose: int) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.purpose = purpose or (0,)
        self.per_block = max(1, BLOCK // batch_size)
        self.block, self.ids_of_block = -1, np.empty(0, np.int64)  # the last one that was read

    def positions(self, step: int) -> np.ndarray:
        """Positions in the endless stream of global batch `step`, int64 of shape [batch_size]."""
        return np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)

    def ids(self, step: int) -> np.ndarray:
        """Sample ids of global batch `step`, int64 of shape [batch_size]."""
        block, row = divmod(step, self.per_block)
        if block != self.block:
            length = self.per_block * self.batch_size
            self.ids_of_block = self.ids_at(block * length, (block + 1) * length)
            self.block = block
        return self.ids_of_block[row * self.batch_size : (row + 1) * self.batch_size]

    def drawn(self, step: int) -> dict[str, int]:
        """Samples of each source in the batches before `step`; {} without several sources."""
        return {}

    def ids_at(self, start: int, stop: int) -> np.ndarray:
        """The ids at positions start ... stop - 1, int64: one permutation an epoch."""
        parts = [np.empty(0, np.int64)]
        while start < stop:
            epoch, offset = divmod(start, self.size)
            count = min(stop - start, self.size - offset)
            permutation = Permutation(self.size, stream_key(self.seed, *self.purpose, epoch))
            parts.append(permutation(np.arange(offset, offset + count, dtype=np.int64)))
            start += count
        return np.concatenate(parts)


def fixed_subset(size: int, count: int) -> np.ndarray:
    """The same `count` ids of 0 ... size - 1 each time, in no order (0: all of them)."""
    return Permutation(size, stream_key(0, 3))(np.arange(min(count or size, size)))


class Share(NamedTuple):
    """A micro-batch: places within the global batch, and whether they count (1.0) or pad (0.0)."""

    places: slice
    weight: float


def shares(size: int, micro_batch_size: int, rank: int, ranks: int, first: int = 0) -> list[Share]:
    """A rank's micro-batches of a global batch, or of `size` samples of it from `first` on."""
    # All are near-equal: 9 samples in micro-batches of up to 8 are 5 and 4, as batch statistics of
    # one sample would fail. Every rank gets the same number of micro-batches, since collectives
    # inside forward and backward must match: a rank with nothing left, which has none larger than
    # one sample, puts one through at weight zero.
    start, stop = (first + size * r // ranks for r in (rank, rank + 1))
    padding = Share(slice(first, first + 1), 0.0)
    count = -(-size // (ranks * micro_batch_size))  # rounded up, as the cuts are
    cuts = [start - (start - stop) * i // count for i in range(count + 1)]
    pairs = itertools.pairwise(cuts)
    return [Share(slice(low, high), 1.0) if low < high else padding for low, high in pairs]


def check_dataset(dataset: Any, name: str) -> None:
    """UserError unless it is a map-style dataset with at least one sample."""
    by_number = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if isinstance(dataset, IterableDataset) or not (by_number and hasattr(dataset, "__len__")):
        raise UserError(
            f"the {name} data (build_datasets in data.py) is a {type(dataset).__name__}: it needs "
            "__len__, and __getitem__ or __getitems__. Write a stream to files first, or render "
            "with samples=stream"
        )
    if not len(dataset):
        raise UserError(f"the {name} data is empty")


def fetch(
    dataset: Any, ids: np.ndarray, keys: np.ndarray | None = None, draws: tuple[int, ...] = ()
) -> Any:
    """Read samples as one batch of tensors.

    `dataset.__getitems__(ids)` may return a finished batch, or a list of samples to collate; a
    dataset with `__getitem__` alone works too. With `keys` (uint64, one per sample), the dataset's
    `augment(batch, keys)` changes the batch. `draws` (a key, the first position) seeds the global
    random numbers, for 10 us a sample or `__getitems__`, unless the dataset says `draws = False`.
    """
    key, position = draws or (0, 0)
    seed = seed_random if draws and getattr(dataset, "draws", True) else lambda *words: None
    if hasattr(dataset, "__getitems__"):
        seed(key, position)
        batch = dataset.__getitems__(ids.tolist())
    else:
        batch = []
        for place, number in enumerate(ids.tolist(), position):
            seed(key, place)
            batch.append(dataset[number])
    try:
        batch = default_collate(batch) if isinstance(batch, list) else batch
    except RuntimeError as error:
        raise UserError(f"the samples of a batch cannot be stacked: {error}") from None
    return batch if keys is None else dataset.augment(batch, keys)


class _MicroBatches(Dataset):
    """Micro-batches by (step, share), so that no sample's number is sent to loader workers."""

    def __init__(self, dataset: Any, order: GlobalBatches) -> None:
        self.dataset, self.order = dataset, order
        self.draws = stream_key(order.seed, 5)

    def __getitem__(self, item: tuple[int, Share]) -> Any:
        step, (places, _) = item
        keys, draws = None, (self.draws, step * self.order.batch_size + places.start)
        if hasattr(self.dataset, "augment"):
            keys = sample_keys(self.order.seed, self.order.positions(step)[places])
        return fetch(self.dataset, self.order.ids(step)[places], keys, draws)


class Loader:
    """This rank's micro-batches, step after step; `seconds` is the time that the loop waited."""

    def __init__(
        self, dataset: Any, order: GlobalBatches, plan: list[Share], workers: int, pin: bool
    ) -> None:
        self.source = _MicroBatches(dataset, order)
        self.size = len(dataset) if hasattr(dataset, "__len__") else None  # None of a stream
        self.plan, self.workers, self.pin = plan, workers, pin
        self.step, self.seconds = 0, 0.0
        self.iterator: Any = None

    def position(self) -> dict[str, Any]:
        """What a manifest must say to resume the loader: nothing, as any step is sought at once."""
        return {}

    def resume(self, step: int, manifest: dict[str, Any], group: Group) -> None:
        """Continue with global batch `step` of a restored run; costs the same for any step."""
        self.close()
        self.step = step

    def next(self) -> list[Any]:
        """The micro-batches of one step, in the order of the plan."""
        started = time.perf_counter()
        with annotated(WAITING):
            if self.workers:
                batches = [self._wait() for _ in self.plan]
            else:
                batches = [self.source[self.step, share] for share in self.plan]
        self.step += 1
        self.seconds += time.perf_counter() - started
        return batches

    def of(self, step: int, plan: list[Share]) -> list[Any]:
        """The micro-batches of any step by any plan, read at once."""
        return [self.source[step, share] for share in plan]

    def _wait(self) -> Any:
        """The workers' next batch; a stop signal ends the wait for it after `PATIENCE`."""
        if self.iterator is None:
            loader = DataLoader(
                self.source,
                batch_size=None,
                sampler=((at, share) for at in itertools.count(self.step) for share in self.plan),
                num_workers=self.workers,
                timeout=5,  # looks for stop signals meanwhile
                pin_memory=self.pin,
                worker_init_fn=_set_up_worker,
                generator=torch.Generator(),  # else it draws from the trainer's random numbers
            )
            self.iterator = iter(loader)
        asked = time.monotonic()
        while True:
            try:
                return next(self.iterator)
            except UserError as error:  # its text begins with the worker's whole traceback
                raise UserError(str(error).strip().rpartition("UserError: ")[2]) from None
            except RuntimeError as error:  # of the loader's timeout, or of a worker
                pinning = getattr(self.iterator, "_pin_memory_thread", threading.main_thread())
                if not str(error).startswith("DataLoader timed out") or not pinning.is_alive():
                    raise
                if time.monotonic() - max(Stop.since, asked) > PATIENCE:
                    raise KeyboardInterrupt("the loader workers do not answer") from None

    def close(self) -> None:
        """Stop the workers; `next` starts them again."""
        # Its finaliser does so too, but a traceback can keep the iterator alive, and Python waits
        # at exit for workers, which ignore its signal.
        if self.iterator is not None:
            with contextlib.ExitStack() as stack:  # also after Ctrl-C
                for worker in self.iterator._workers:
                    stack.callback(worker.kill)  # one that still hangs
                self.iterator._shutdown_workers()
        self.iterator = None


def _set_up_worker(worker: int) -> None:
    # torchrun signals the whole session, and a dead worker fails the step before the last save.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]


def _send_error(queue: Queue, error: Exception, item: tuple[int, Any]) -> None:
    """Send this in place of a batch that cannot be sent; else the trainer would wait for ever."""
    ways_out = "set TMPDIR to a short path, or --train.loader-workers 0"
    problem = UserError(f"a loader worker cannot send a batch: {error}: {ways_out}")
    with contextlib.suppress(ValueError):  # closed: the run ends, and nobody waits for a batch
        queue.put((item[0], ExceptionWrapper((UserError, problem, None))))


def open_loader(dataset: Any, train: Any, plan: list[Share], world: World) -> Loader:
    """The loader of a training set; UserError unless it is a map-style dataset."""
    check_dataset(dataset, "training")
    own_order = getattr(dataset, "order", None)  # a dataset may bring one
    order = (own_order or partial(GlobalBatches, len(dataset)))(train.global_batch_size, train.seed)
    return Loader(dataset, order, plan, train.loader_workers, pin=world.device.type == "cuda")
