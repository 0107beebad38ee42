"""Define the command `baseline`, which measures and checks the training loop.

This module does not import torch, so that `--help` is fast.
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
    """Settings of the workflow: the baseline has none."""


def run_command(name: str, arguments: list[str], parse: Callable[[type], Any]) -> int:
    """Run the only command; `parse(cls)` parses its arguments into settings of type `cls`."""
    from ..checkpoint.storage import on_disk
    from .baseline import measure
    from .stage import StageConfig

    # `on_disk` leaves out the object store, if there is one: the stage measures this machine.
    return measure(on_disk(parse(StageConfig)))
