"""No experiment tracker: metrics.jsonl is the log."""

from dataclasses import dataclass
from typing import Any

TRACKERS: tuple[Any, ...] = ()  # the callbacks that log to the tracker


@dataclass(frozen=True)
class TrackerConfig:
    """An experiment tracker: none."""
