"""One process: whatever several would have to agree on is decided at once."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..device import pick_device
from ..errors import RankError, UserError
from .parallel import ParallelConfig, check_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process and its device."""

    rank: int
    size: int
    device: torch.device
    distributed: bool = False


class Group:
    """What several processes would do together: one process returns at once."""

    rank, size, process_group = 0, 1, None
    is_first = True
    doing = "step"

    def __init__(self, world: World | None = None) -> None:
        """There is nobody to agree with."""

    def __str__(self) -> str:
        return ""

    @contextlib.contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """Take as long as it takes: nobody waits for this process."""
        self.doing = doing
        yield
        self.doing = "step"

    def prove_shared(self, folder: Path) -> None:
        """Nobody else has to see what this process writes."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block of host work; its errors become a RankError, except those of the user."""
        try:
            yield
        except (UserError, RankError):
            raise
        except Exception as error:
            raise RankError(f"{type(error).__name__}: {error}") from error

    def broadcast(self, value: T) -> T:
        """The value itself."""
        return value

    def gather(self, value: T) -> list[T]:
        """The value of the one process."""
        return [value]

    def any(self, flag: bool) -> bool:
        """The flag itself."""
        return flag

    def exchange(self, flags: list[int]) -> list[int]:
        """The flags themselves."""
        return flags

    def settle(self) -> None:
        """No exchange is ever under way."""


def launcher() -> str | None:
    """No launcher is needed."""
    return None


def join(config: ParallelConfig, device_name: str) -> World:
    """Take the one device; UserError when torchrun started several processes."""
    check_ranks(config, int(os.environ.get("WORLD_SIZE", "1")))
    device = pick_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return World(0, 1, device)


def leave(world: World) -> None:
    """Nothing to leave."""


def regrouping(told_to_stop: Callable[[], bool]) -> bool:
    """No other machine can join or leave."""
    return False


def monitors(state: Any, run_dir: Path, group: Group) -> tuple[list[Any], list[Any]]:
    """Nobody waits for this process, so nothing watches it."""
    return [], []
