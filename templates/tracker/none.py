"""Use no experiment tracker; metrics are only in metrics.jsonl."""

from dataclasses import dataclass
from typing import Any

# The callbacks that log to a tracker: there are none.
TRACKERS: tuple[Any, ...] = ()


@dataclass(frozen=True)
class TrackerConfig:
    """Settings of the experiment tracker: there are none."""
