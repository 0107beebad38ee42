"""Run in one process: the functions by which several ranks agree wait for nobody here."""

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
    """The methods by which several ranks agree; in one process they return at once."""

    rank = 0
    size = 1
    process_group = None
    is_first = True
    # The current activity, for the message after a stop signal.
    doing = "step"

    def __init__(self, world: World | None = None) -> None:
        """Accept the same arguments as the class for several ranks."""

    def log_prefix(self) -> str:
        """Return the beginning of the log's first line: empty, since there is only one rank."""
        return ""

    @contextlib.contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """Set `doing` in a block. The block has no time limit, since no other process waits."""
        self.doing = doing
        yield
        self.doing = "step"

    def prove_shared(self, folder: Path) -> None:
        """Do nothing, since no other process needs to see this one's files."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block of host work; convert its errors to RankError, except UserError."""
        try:
            yield
        except (UserError, RankError):
            raise
        except Exception as error:
            raise RankError(f"{type(error).__name__}: {error}") from error

    def broadcast(self, value: T) -> T:
        """Return the value itself."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes: there is only this one."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Return the flag itself."""
        return flag

    def exchange(self, flags: list[int]) -> list[int]:
        """Return the flags themselves."""
        return flags

    def settle(self) -> None:
        """Do nothing, since there is never a pending exchange."""


def require_same_model(model: Any, world: World) -> None:
    """Do nothing, since no other process has built a model."""


def require_same_optimizer(optimizer: Any, model: Any, world: World) -> None:
    """Do nothing, since no other process has built an optimizer."""


def launcher() -> str | None:
    """Return None, since no launcher started this process."""
    return None


def join(config: ParallelConfig, device_name: str) -> World:
    """Pick the device; UserError if torchrun has started several processes."""
    check_ranks(config, int(os.environ.get("WORLD_SIZE", "1")))
    device = pick_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return World(0, 1, device)


def leave(world: World) -> None:
    """Do nothing, since there is no process group."""


def regrouping(told_to_stop: Callable[[], bool]) -> bool:
    """Return False, since no other machine can join or leave."""
    return False


def monitors(state: Any, run_dir: Path, group: Group) -> tuple[list[Any], list[Any]]:
    """Return no callbacks, since no other process waits for this one."""
    return [], []
