"""Where checkpoints are: on disk, in the run directory, which all machines share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..distributed import Group
from .paths import checkpoints_of
from .publish import Publisher, RetentionConfig

C = TypeVar("C")


@dataclass(frozen=True)
class StorageConfig(RetentionConfig):
    """Checkpoints on disk."""

    far = False  # they are in the run directory


def open_storage(run_dir: Path, config: StorageConfig, group: Group, identity: Any) -> Publisher:
    """What publishes and finds the checkpoints of a run; UserError if it has them in a store."""
    return Publisher(checkpoints_of(run_dir), config, group)


def on_disk(config: C) -> C:
    """The settings of a run on this machine's disk: these."""
    return config
