"""Use no experiment tracker; metrics are only in metrics.jsonl."""

from dataclasses import dataclass
from typing import Any

# The callbacks that log to the tracker.
TRACKERS: tuple[Any, ...] = ()


@dataclass(frozen=True)
class TrackerConfig:
    """Settings of the experiment tracker: there are none."""
