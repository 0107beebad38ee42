"""Store checkpoints on disk, in the run directory, which all machines share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..distributed import Group
from ..distributed.stop import Stop
from .paths import checkpoints_of
from .publish import Publisher, RetentionConfig

C = TypeVar("C")


@dataclass(frozen=True)
class StorageConfig(RetentionConfig):
    """Settings of checkpoints on disk."""

    # These are not settings. `in_store`: whether checkpoints are in an object store. `far`: whether
    # they are only there.
    in_store = False
    far = False


def open_storage(run_dir: Path, config: StorageConfig, group: Group, identity: Any) -> Publisher:
    """Return the publisher of a run's checkpoints; UserError if they are in an object store.

    `identity` is not used: only the publisher for an object store needs it.
    """
    return Publisher(checkpoints_of(run_dir), config, group)


def on_disk(config: C) -> C:
    """Return the settings unchanged, since they already save checkpoints on disk."""
    return config


def end_in_time(stop: Stop | None) -> None:
    """Do nothing, since only requests to an object store need a deadline after a stop signal."""
