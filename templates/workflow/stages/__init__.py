"""The engineering workflow as commands: stages that measure the project's loop and judge it.

Importing this imports no torch, so that `--help` stays quick.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import RankError, UserError
from .rank_stages import RANK_STAGES

# The stages in the order in which they build on each other, and what each does.
STAGES = {
    "baseline": "Measure one eager process: determinism, learning, throughput, waiting for data.",
    "compile": "Try torch.compile: graph breaks, recompiles, same numbers, speedup, warm caches.",
    "profile": "Trace some steps for Perfetto: where a step's time goes, and what to try next.",
    **RANK_STAGES,
    "checkpoint": "Drill the recovery: restore, reshard, kill, damage; say how often to save.",
}
COMMANDS = STAGES | {
    "fit": "Tell how much memory a rank needs on a GPU, and what fits, on any machine.",
    "workflow": "Run all stages in order, up to the first failed gate; then write the report.",
    "report": "Write report.html: loss, throughput, scaling, memory, checkpoints, checks, advice.",
}


@dataclass(frozen=True)
class WorkflowConfig:
    """How far the stages go."""

    ranks: int = 0
    """Maximum number of processes (0: one per GPU of this machine; 2 without a GPU)."""
    hours_between_failures: float = 24.0
    """Mean hours between failures of the job, including preemptions; sets the save interval."""
    keep_going: bool = False
    """Continue after a failed gate."""
    force: bool = False
    """Repeat stages that were already measured with these settings and this code."""

    def __post_init__(self) -> None:
        if self.ranks < 0 or not self.hours_between_failures > 0:
            raise UserError("workflow: ranks must be >= 0 and hours-between-failures > 0")


def run_command(
    name: str, arguments: list[str], parse: Callable[[type], Any], measure_again: str = ""
) -> int:
    """Run one of `COMMANDS`; `parse` reads the settings of a class from the arguments.

    The workflow measures the stage `measure_again` even if its result could be used again.
    """
    if name == "fit":
        from .fit import FitConfig, fit

        return fit(parse(FitConfig), arguments)
    from ..checkpoint.storage import on_disk
    from ..config import RunLocation
    from .chain import run_stages
    from .report import publish_report
    from .stage import StageConfig

    if name == "report":
        print(publish_report(parse(RunLocation).directory))
        return 0
    config = parse(StageConfig)
    if name == "workflow":
        code = run_stages(config, arguments, measure_again)
        with contextlib.suppress(UserError, RankError):  # a crashed stage may have left nothing
            print(f"report: {publish_report(config.directory)}")
        return code
    # The module of a stage has its name, but for the checkpoint stage.
    module = "recovery" if name == "checkpoint" else name
    stage = importlib.import_module(f"{__package__}.{module}")
    return stage.measure(on_disk(config))
