"""Define the commands of the full workflow: the stages, a search for settings, and `compare`.

This module does not import torch, so that `--help` is fast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import stages

STAGES = stages.STAGES
COMMANDS = stages.COMMANDS | {
    "compare": "Compare two runs, or two results of a stage: which metrics are better or worse.",
}


@dataclass(frozen=True)
class WorkflowConfig(stages.WorkflowConfig):
    """Settings of the workflow's stages."""

    expect: Path | None = None
    """TOML file with expected losses; if it does not exist, `baseline` fails and proposes one."""


def run_command(name: str, arguments: list[str], parse: Callable[[type], Any]) -> int:
    """Run one of `COMMANDS`; `parse(cls)` parses the arguments into settings of type `cls`."""
    if name == "compare":
        from .compare import CompareConfig, compare

        return compare(parse(CompareConfig))
    if name == "baseline":
        # Use tuning.py instead of baseline.py: it measures the baseline and also searches for
        # faster settings.
        from ..checkpoint.storage import on_disk
        from .stage import StageConfig
        from .tuning import measure

        # The stage measures this machine, so `on_disk` removes an object store from the settings.
        return measure(on_disk(parse(StageConfig)))
    measure_again = ""
    if name == "workflow":
        from .expected import read_expected
        from .stage import StageConfig

        expect = parse(StageConfig).workflow.expect
        # If the file is invalid, this raises an error before anything is measured.
        read_expected(expect)
        if expect:
            # The workflow would reuse an earlier result of `baseline` if settings and code are the
            # same, even if the content of this file has changed since.
            measure_again = "baseline"
    return stages.run_command(name, arguments, parse, measure_again)
