"""The stages of the workflow, and what this answer adds: a search, `compare`, expectations.

Importing this imports no torch, so that `--help` stays quick.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import stages

STAGES = stages.STAGES
COMMANDS = stages.COMMANDS | {
    "compare": "Tell what is better or worse in one run, or result of a stage, than in another.",
}


@dataclass(frozen=True)
class WorkflowConfig(stages.WorkflowConfig):
    """How far the stages go, and what they have to reach."""

    expect: Path | None = None
    """TOML file with expected losses; if it does not exist, a proposal is written to it."""


def run_command(name: str, arguments: list[str], parse: Callable[[type], Any]) -> int:
    """Run one of `COMMANDS`; `parse` reads the settings of a class from the arguments."""
    if name == "compare":
        from .compare import CompareConfig, compare

        return compare(parse(CompareConfig))
    if name == "baseline":
        # In this project the stage also searches for faster settings.
        from ..checkpoint.storage import on_disk
        from .stage import StageConfig
        from .tuning import measure

        return measure(on_disk(parse(StageConfig)))
    measure_again = ""
    if name == "workflow":
        from .expected import read_expected
        from .stage import StageConfig

        expect = parse(StageConfig).workflow.expect
        # A file that holds no expectations is refused before anything is measured.
        read_expected(expect)
        if expect:
            # The file may expect other losses by now.
            measure_again = "baseline"
    return stages.run_command(name, arguments, parse, measure_again)
