"""Agreement between the ranks' host sides, over gloo groups of its own."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import RankError, UserError
from .network import PATIENCE
from .world import World

log = logging.getLogger(__name__)
T = TypeVar("T")


class Group:
    """Agreement between the ranks' host sides; on one plain process everything is immediate."""

    limit = PATIENCE
    """How long `wait` waits: the loop shortens it while it steps (distributed/watchdog.py)."""

    def __init__(self, world: World | None = None) -> None:
        self.rank, self.size = (world.rank, world.size) if world else (0, 1)
        self.group, self.patient = None, 0
        if world and world.distributed:
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
            dist.barrier(self.group)  # only now may rank 0 leave, and its store with it

    def agree(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; rank 0 gets all results, the others their own in a list.

        RankError on every rank, naming those that failed, when it failed on any.
        """
        outcome = self._attempt(action)
        gathered = [outcome]
        if self.group is not None:
            gathered = [outcome] * self.size if self.rank == 0 else None
            dist.gather_object(outcome, gathered, group_dst=0, group=self.group)
        failed = None
        if gathered:
            failed = [(r, *o[:2]) for r, o in enumerate(gathered) if o[0]]
        _raise_if(self._broadcast(failed))
        return [value for _, _, value in gathered or [outcome]]

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """What may take longer than a step."""
        before, self.limit, self.patient = self.limit, PATIENCE, self.patient + 1
        try:
            yield
        finally:
            self.limit, self.patient = before, self.patient - 1

    def from_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only and give its result to all; RankError on all if it failed."""
        problem, by_user, value = self._broadcast(self._attempt(action) if self.rank == 0 else None)
        _raise_if([(0, problem, by_user)] if problem else [])
        return value

    def all_max(self, values: torch.Tensor) -> dist.Work | None:
        """Start an element-wise maximum over the ranks, in place (CPU tensor)."""
        if self.group is None:
            return None
        return dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def wait(self, work: dist.Work) -> None:
        """Wait for what was started; RankError when some rank has not come within `limit`."""
        try:
            work.wait(self.limit)
        except RuntimeError as error:  # also that a rank is gone
            raise RankError(f"a rank did not answer the others: {error}") from error

    def _broadcast(self, value: Any) -> Any:
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]

    @staticmethod
    def _attempt(action: Callable[[], T]) -> tuple[str | None, bool, T | None]:
        try:
            return None, False, action()
        except UserError as error:
            return str(error), True, None
        except RankError as error:
            return str(error), False, None
        except Exception as error:
            log.debug("failed on this rank", exc_info=True)
            return f"{type(error).__name__}: {error}", False, None


def _raise_if(failures: list[tuple[int, str, bool]]) -> None:
    if any(by_user for _, _, by_user in failures):
        error = UserError(next(problem for _, problem, by_user in failures if by_user))
        error.agreed = True
        raise error
    if failures:
        first = {problem: rank for rank, problem, _ in reversed(failures)}  # each said once
        texts = [f"rank {rank}: {problem}" for problem, rank in first.items()][::-1]
        texts[4:] = [f"and {len(texts) - 4} more"] if len(texts) > 4 else []
        error = RankError("; ".join(texts))
        error.agreed = True
        raise error
