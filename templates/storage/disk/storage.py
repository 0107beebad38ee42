"""Where checkpoints lie: on disk, in the run directory, which all machines share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..distributed import Group
from .paths import Place, checkpoints_of, located
from .publish import Publisher, RetentionConfig

C = TypeVar("C")
__all__ = ["Place", "StorageConfig", "located", "on_disk", "open_storage"]
"""Settings that other projects have, with the answer that they need."""


@dataclass(frozen=True)
class StorageConfig(RetentionConfig):
    """Checkpoints on disk."""

    far = False  # they are in the run directory


def open_storage(
    run_dir: Path, config: StorageConfig, group: Group, identity: dict[str, Any] | None
) -> Publisher:
    """What publishes and finds the checkpoints of a run."""
    return Publisher(run_dir / "checkpoints", config, group)


def refuse_to_forget(run_dir: Path, directory: Path) -> None:
    """UserError if a run without checkpoints in `directory` has some in another place."""
    checkpoints_of(run_dir)


def on_disk(config: C) -> C:
    """The settings of a run on this machine's disk: these."""
    return config
