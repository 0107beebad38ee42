"""Agreement between the ranks: of their host sides, and of the model's buffers."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..errors import RankError, UserError
from .world import PATIENCE, World

T = TypeVar("T")


@dataclass
class Outcome:
    """What became of an action on a rank: its result, or its error as it can be sent."""

    result: Any = None
    error: UserError | RankError | None = None

    def __enter__(self) -> "Outcome":
        """The outcome of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        """Keep an error by its message: those of other types cannot all be sent."""
        if isinstance(error, Exception):
            known = isinstance(error, UserError | RankError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            self.error = UserError(text) if isinstance(error, UserError) else RankError(text)
        return isinstance(error, Exception)


class Group:
    """Agreement between the ranks' host sides; on one plain process everything is immediate.

    It has a gloo group of its own, so that it never waits behind the device's collectives.
    """

    def __init__(self, world: World | None = None) -> None:
        self.rank, self.size = (world.rank, world.size) if world else (0, 1)
        self.step_limit = world.step_limit if world else PATIENCE
        self.patient, self.resumed = 1, 0.0  # start-up, until the watchdog has seen a first step
        self.maxima: Callable[[], list[float]] | None = None
        self.process_group = None
        if world and world.distributed:
            self.process_group = dist.new_group(backend="gloo", timeout=PATIENCE)
            # new_group has no barrier: rank 0 could leave, and its store with it, too early.
            dist.barrier(self.process_group)

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Allow inside what may take longer than a step: a validation, a save (watchdog.py)."""
        self.patient += 1
        try:
            yield
        finally:
            self.resumed = time.monotonic()  # first, for the watchdog's thread
            self.patient -= 1

    def agree(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; rank 0 gets all results, the others their own in a list.

        RankError on every rank, naming those that failed, when it failed on any.
        """
        with Outcome() as outcome:
            outcome.result = action()
        gathered = [outcome]
        if self.process_group is not None:
            gathered = [outcome] * self.size if self.rank == 0 else None
            dist.gather_object(outcome, gathered, group_dst=0, group=self.process_group)
        failures = {rank: one.error for rank, one in enumerate(gathered or []) if one.error}
        _raise_if(self._broadcast(failures))
        return [one.result for one in gathered or [outcome]]

    def from_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only and give its result to all; RankError on all if it failed."""
        with Outcome() as outcome:
            if self.rank == 0:
                outcome.result = action()
        outcome = self._broadcast(outcome)
        _raise_if({0: outcome.error} if outcome.error else {})
        return outcome.result

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

    def maximum(self, values: list[float]) -> Callable[[], list[float]]:
        """Start an element-wise maximum over the ranks; returns a function that waits for it."""
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, self.process_group, async_op=True)

        def wait() -> list[float]:
            try:
                work.wait(self.waits)
            except RuntimeError as error:  # too late, or a rank is gone
                raise RankError(f"a rank did not answer the others: {error}") from error
            return tensor.tolist()

        return wait

    @property
    def waits(self) -> timedelta:
        """How long hosts wait for each other; while stepping, longer than the watchdog does.

        The watchdog ends a hang, and names a rank, within the limit, 30 s and twice the longest
        step. This limit is for when its thread hangs as well, on a disk that went with a machine.
        """
        if self.patient:
            return PATIENCE
        return min(2 * self.step_limit + timedelta(minutes=1), max(PATIENCE, 2 * self.step_limit))

    def _broadcast(self, value: Any) -> Any:
        if self.process_group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.process_group)
        return box[0]


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
    error.agreed = True
    raise error


def agree_on_buffers(model: nn.Module, world: World) -> None:
    """Give all ranks the same persistent buffers: the mean of those that differ (batch statistics).

    Equal buffers keep their bits. Integers (batches counted) are the same on all ranks anyway.
    """
    saved = model.state_dict(keep_vars=True)
    buffers = [b for name, b in model.named_buffers() if name in saved and b.is_floating_point()]
    if world.size == 1 or not buffers:
        return
    flat = torch.cat([buffer.detach().flatten().double() for buffer in buffers])
    extremes, total = torch.stack([flat, -flat]), flat.clone()
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    agreed = torch.where(extremes[0] == -extremes[1], flat, total / world.size)  # equal: kept
    for buffer, values in zip(buffers, agreed.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))  # back to its own dtype


def all_reduce(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Sum over the ranks, in place."""
    if world.distributed:
        dist.all_reduce(tensor)
    return tensor
