"""One process: whatever several would have to agree on is decided at once."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..device import pick_device
from ..errors import RankError, UserError
from .parallel import ParallelConfig, check_ranks

__all__ = [
    "Group",
    "World",
    "check_ranks",
    "join",
    "launched_ranks",
    "launcher",
    "leave",
    "regrouping",
    "watchdog",
]

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process and its device."""

    rank: int
    size: int
    device: torch.device
    distributed: bool = False

    def check_batch(self, samples: int) -> None:
        """One process can take any batch."""


class Group:
    """Where several processes would agree: the action runs, and what failed is a RankError."""

    rank, size, process_group = 0, 1, None

    def __init__(self, world: World | None = None) -> None:
        """There is nobody to agree with."""

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Take as long as it takes: nobody waits for this process."""
        yield

    def agree(self, action: Callable[[], T]) -> list[T]:
        """The result of `action`, in a list; RankError when it failed."""
        return [self.from_first(action)]

    def from_first(self, action: Callable[[], T]) -> T:
        """The result of `action`; RankError when it failed, except by an error of the user."""
        try:
            return action()
        except (UserError, RankError):
            raise
        except Exception as error:
            raise RankError(f"{type(error).__name__}: {error}") from error

    def exchange(self, flags: list[int]) -> list[int]:
        """The flags themselves."""
        return flags

    def settle(self) -> None:
        """No exchange is ever under way."""


def launched_ranks() -> int:
    """Number of processes that torchrun started for this run (1 when it did not start any)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launcher() -> str | None:
    """No launcher is needed."""
    return None


def join(config: ParallelConfig, device_name: str) -> World:
    """Take the one device; UserError when torchrun started several processes."""
    check_ranks(config, launched_ranks())
    return World(0, 1, pick_device(device_name))


def leave(world: World) -> None:
    """Nothing to leave."""


def regrouping(told_to_stop: Callable[[], bool]) -> bool:
    """No other machine can join or leave."""
    return False


def watchdog(
    run_dir: Path, world: World, group: Group, module: nn.Module, say: Callable[[str], None]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Nobody waits for this process, so nothing watches over it."""
    return (), ()
