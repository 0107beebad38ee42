"""The baseline as a command: it measures the project's loop and judges it.

Importing this imports no torch, so that `--help` stays quick.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STAGES = {
    "baseline": "Measure one eager process: determinism, learning, throughput, waiting for data.",
}
COMMANDS = STAGES


@dataclass(frozen=True)
class WorkflowConfig:
    """Settings of the stages; the baseline has none of its own."""


def run_command(name: str, arguments: list[str], parse: Callable[[type], Any]) -> int:
    """Run one of `COMMANDS`; `parse` reads the settings of a class from the arguments."""
    from ..checkpoint.storage import on_disk
    from .baseline import measure
    from .stage import StageConfig

    return measure(on_disk(parse(StageConfig)))
