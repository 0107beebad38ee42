"""No experiment tracker: metrics.jsonl is the log."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrackerConfig:
    """An experiment tracker: none."""


def tracking(config: Any, run_dir: Path, step: int) -> tuple[Any, ...]:
    """The callbacks that log to the tracker."""
    return ()
