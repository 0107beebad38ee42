"""No experiment tracker: metrics.jsonl is the log."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrackerConfig:
    """Logging elsewhere: none."""


class Tracker:
    """Logs nothing."""

    logged = sys.maxsize

    def __init__(
        self, config: TrackerConfig, run_dir: Path, settings: dict[str, Any], step: int, status: str
    ) -> None:
        pass

    def scalars(self, step: int, values: dict[str, float], time: float) -> None:
        """Nothing to log to."""

    def file(self, path: Path) -> None:
        """Nothing to hand it to."""

    def close(self, status: str) -> None:
        """Nothing to close."""
