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

    # Whether checkpoints are in an object store, and whether they are only there.
    in_store = False
    far = False


def open_storage(run_dir: Path, config: StorageConfig, group: Group, identity: Any) -> Publisher:
    """Return the publisher of a run's checkpoints; UserError if they are in an object store.

    `identity` is not used here: a resume compares it with the checkpoint.
    """
    return Publisher(checkpoints_of(run_dir), config, group)


def on_disk(config: C) -> C:
    """Return settings that save to disk, which these already do."""
    return config


def end_in_time(stop: Stop | None) -> None:
    """Do nothing: only requests to an object store need a deadline after a stop signal."""
