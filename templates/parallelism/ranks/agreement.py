"""Agreement between the ranks: of their host sides, and of running buffers."""

import contextlib
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankError, UserError
from ..files import naming, open_to_write
from .world import PHASE_LIMIT, World

log = logging.getLogger(__name__)
T = TypeVar("T")
LOADED = "the checksum of what was loaded, which a bad disk or memory changes,"


def _attempt(action: Callable[[], T]) -> tuple[T | None, UserError | RankError | None]:
    """The result of `action` and its error, by its message: not every error can be sent."""
    try:
        return action(), None
    except (UserError, RankError) as error:
        return None, (UserError if isinstance(error, UserError) else RankError)(str(error))
    except Exception as error:
        log.debug("the other ranks only get the message of this error", exc_info=True)
        return None, RankError(f"{type(error).__name__}: {error}")


class Group:
    """Agreement between the ranks' host sides; on one plain process everything is immediate."""

    console: TextIO | None = None  # of a rank whose stderr is redirected into its log

    def __init__(self, world: World | None = None) -> None:
        self.rank, self.size = (world.rank, world.size) if world else (0, 1)
        self.step_limit = world.step_limit if world else PHASE_LIMIT
        self.phases, self.resumed = 1, 0.0  # start-up, until the watchdog has seen a first step
        self.maxima: Callable[[], list[float]] | None = None
        self.doing = "step"
        self.process_group: Any = None
        if world and world.distributed:
            # A group of its own, so that it never waits behind the device's collectives.
            self.process_group = dist.new_group(backend="gloo", timeout=PHASE_LIMIT)
            # new_group has no barrier: rank 0 could leave, and its store with it, too early.
            dist.barrier(self.process_group)

    def __str__(self) -> str:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"rank {self.rank} of {self.size}, restarts so far: {restarts}, "

    @contextlib.contextmanager
    def printing_to(self, file: TextIO, handler: Any) -> Iterator[None]:
        """Redirect what this rank prints to `file`; `handler` keeps logging to the console."""
        # By descriptor, so that what libraries print, and the stacks of a crash, are in it, too.
        with open(os.dup(1), "wb") as out, open(os.dup(2), "w", encoding="utf-8") as err:
            _print_to(file.fileno(), file.fileno())
            handler.stream = self.console = err
            try:
                yield
            finally:
                _print_to(out.fileno(), err.fileno())
                handler.stream = self.console = None

    def say(self, text: str) -> None:
        """Print to the console and to a redirected stderr, without waiting for a lock."""
        for file in filter(None, (self.console, sys.stderr)):  # the latter may be on a disk
            with contextlib.suppress(OSError):
                print(text, file=file, flush=True)

    @contextlib.contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """Allow PHASE_LIMIT for the block: a validation, a save (watchdog.py)."""
        self.phases, self.doing = self.phases + 1, doing
        try:
            yield
        finally:
            self.resumed = time.monotonic()  # first, for the watchdog's thread
            self.phases, self.doing = self.phases - 1, "step"

    def agree(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; rank 0 gets all results, the others their own in a list.

        RankError on every rank, naming those that failed, when it failed on any.
        """
        outcome: Any = _attempt(action)
        gathered: Any = [outcome]
        if self.process_group is not None:
            gathered = [outcome] * self.size if self.rank == 0 else None
            dist.gather_object(outcome, gathered, group_dst=0, group=self.process_group)
        failures = {rank: error for rank, (_, error) in enumerate(gathered or []) if error}
        _raise_if(self._broadcast(failures))
        return [result for result, _ in gathered or [outcome]]

    def from_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only and give its result to all; RankError on all if it failed."""
        result, error = self._broadcast(_attempt(action) if self.rank == 0 else None)
        _raise_if({0: error} if error else {})
        return result

    def prove_shared(self, folder: Path) -> None:
        """Each rank must find a file that rank 0 has just written to a folder (UserError)."""
        nonce = folder / f".nonce-{self.from_first(lambda: uuid.uuid4().hex)}"

        def write() -> None:
            for left in folder.glob(".nonce-*"):  # by a start that was killed
                left.unlink()
            with naming(nonce), open_to_write(nonce) as file:
                file.write("shared\n")

        def look() -> None:
            with contextlib.suppress(FileNotFoundError):
                os.listdir(folder)  # a network file system then refreshes its cache
            if not nonce.exists():
                problem = f"{socket.gethostname()} does not see what rank 0 writes to {folder}"
                raise UserError(f"{problem}: put --run-dir where all machines see the same files")

        self.from_first(write)
        self.agree(look)
        if self.rank == 0:
            with contextlib.suppress(OSError):  # else the next start removes it
                nonce.unlink()

    def exchange(self, flags: list[int]) -> list[int]:
        """Send `flags`; return the maxima over the ranks of those sent at the call before.

        So nobody waits, and all ranks read the same. Only the first call waits, for its own flags.
        """
        if self.process_group is None:
            return flags
        self.maxima = self.maxima or self.maximum(flags)
        agreed = self.maxima()
        self.maxima = self.maximum(flags)
        return [int(flag) for flag in agreed]

    def settle(self) -> None:
        """Wait for the exchange under way: no collective may be left unfinished at the end."""
        if self.maxima:
            self.maxima()

    def maximum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start an element-wise maximum over the ranks; returns a function that waits for it."""
        tensor = torch.tensor(values, dtype=torch.float64)
        work: Any = dist.all_reduce(tensor, dist.ReduceOp.MAX, self.process_group, async_op=True)

        def wait() -> list[float]:
            # Longer than the watchdog needs to name a rank. This is for when the watchdog hangs,
            # too, on a disk that went with a machine.
            limit = PHASE_LIMIT if self.phases else 2 * self.step_limit + timedelta(minutes=1)
            try:
                work.wait(limit)
            except RuntimeError as error:  # too late, or a rank is gone
                raise RankError(f"a rank did not answer the others: {error}") from error
            return tensor.tolist()

        return wait

    def _broadcast(self, value: Any) -> Any:
        if self.process_group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.process_group)
        return box[0]


def _print_to(out: int, err: int) -> None:
    """Point this process's stdout and stderr at these descriptors."""
    for number, target, stream in ((1, out, sys.stdout), (2, err, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()
        os.dup2(target, number)


def _raise_if(errors: dict[int, UserError | RankError]) -> None:
    """Raise the same error on all ranks: of the user first, else all different ones."""
    if not errors:
        return
    error = next((one for one in errors.values() if isinstance(one, UserError)), None)
    if error is None:
        first = {str(error): rank for rank, error in reversed(errors.items())}
        texts = [f"rank {rank}: {text}" for text, rank in first.items()][::-1]
        texts[4:] = [f"and {len(texts) - 4} more"] if len(texts) > 4 else []
        error = RankError("; ".join(texts))
    raise error


def agree_on_buffers(running: Any, step: int, world: World) -> None:
    """Give all ranks the same RunningBuffers (run/bad_steps.py), after the forwards of a step.

    Only those that forward changes are sent. They are found by value, since batch normalisation
    counts no versions: at the first step and at each 50th, when the host waits for the device.
    """
    if world.size == 1 or not running.slots:
        return
    tensors = running.tensors()
    if running.changing is None or step % 50 == 0:
        pairs = zip(tensors, running.copies, strict=True)
        changed = torch.stack([(now != then).any() for now, then in pairs]).float()
        dist.all_reduce(changed)
        running.changing = {*(running.changing or ()), *changed.nonzero().flatten().tolist()}
    tensors = [tensors[index] for index in sorted(running.changing)]
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    for dtype in (torch.float64, torch.int64):  # the mean of fractional ones, rank 0's of others
        alike = [t for t in tensors if t.is_floating_point() == dtype.is_floating_point]
        if alike:
            flat = torch.cat([tensor.flatten().to(dtype) for tensor in alike])
            flat *= 1 if dtype.is_floating_point or world.rank == 0 else 0
            dist.all_reduce(flat)
            flat = flat / world.size if dtype.is_floating_point else flat
            for tensor, values in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(values.view_as(tensor))  # back to its own dtype


def require_same(values: dict[str, Any], world: World, error: Any = UserError) -> None:
    """An error, on every rank, if two ranks have different values of one name."""
    each: list[Any] = [values] * world.size
    if world.distributed:
        dist.all_gather_object(each, values)
    first: dict[str, Any] = {}
    for rank, own in enumerate(each):
        for name, value in own.items():
            other, expected = first.setdefault(name, (rank, value))
            if value != expected:
                text = f"{name} must be the same on all ranks: {value} on rank {rank}"
                raise error(f"{text}, {expected} on rank {other}")


def bit_sum(tensors: Iterable[Tensor]) -> int:
    """A checksum that one other bit changes."""
    parts = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors)
    return sum(int(part.sum(dtype=torch.int64)) for part in parts)


def all_reduce(tensor: Tensor, world: World) -> Tensor:
    """Sum over the ranks, in place."""
    if world.distributed:
        dist.all_reduce(tensor)
    return tensor
