"""No experiment tracker: metrics.jsonl is the log."""

from dataclasses import dataclass
from typing import Any

# The callbacks that log to the tracker.
TRACKERS: tuple[Any, ...] = ()


@dataclass(frozen=True)
class TrackerConfig:
    """An experiment tracker: none."""
