"""Where checkpoints are: on disk, in the run directory, which all machines share."""

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
    """Checkpoints on disk."""

    # Whether the run directory has no checkpoints.
    far = False


def open_storage(run_dir: Path, config: StorageConfig, group: Group, identity: Any) -> Publisher:
    """Return what publishes and finds a run's checkpoints; UserError if a store has them."""
    return Publisher(checkpoints_of(run_dir), config, group)


def on_disk(config: C) -> C:
    """Return the settings of a run that saves to this machine's disk: these do."""
    return config


def end_in_time(stop: Stop) -> None:
    """Do nothing: only requests to a store have to end before the launcher kills this process."""
