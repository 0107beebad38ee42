"""Define the commands of the workflow: stages that measure and check the training loop.

This module does not import torch, so that `--help` is fast.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import RankError, UserError
from .rank_stages import RANK_STAGES

# The stages with their help, in the order in which they build on each other.
STAGES = {
    "baseline": "Measure one eager process: determinism, learning, throughput, waiting for data.",
    "compile": "Try torch.compile: graph breaks, recompiles, same numbers, speedup, warm caches.",
    "profile": "Trace some steps for Perfetto: where a step's time goes, and what to try next.",
    **RANK_STAGES,
    "checkpoint": "Test recovery: restore, reshard, kill, damage; recommend how often to save.",
}
COMMANDS = STAGES | {
    "fit": "Estimate the GPU memory of a rank, and what fits, on any machine.",
    "workflow": "Run all stages in order, up to the first failed stage; then write the report.",
    "report": "Write report.html: loss, throughput, scaling, memory, checkpoints, checks, advice.",
}


@dataclass(frozen=True)
class WorkflowConfig:
    """Settings of the workflow's stages."""

    ranks: int = 0
    """Maximum number of processes (0: one per GPU of this machine; 2 without a GPU)."""
    hours_between_failures: float = 24.0
    """Mean hours between failures of the job, including preemptions; sets the save interval."""
    keep_going: bool = False
    """Continue after a failed stage."""
    force: bool = False
    """Repeat stages that were already measured with these settings and this code."""

    def __post_init__(self) -> None:
        if self.ranks < 0 or not 0 < self.hours_between_failures < 1e9:
            raise UserError("workflow: ranks must be >= 0, hours-between-failures > 0 and finite")


def run_command(
    name: str, arguments: list[str], parse: Callable[[type], Any], measure_again: str = ""
) -> int:
    """Run one of `COMMANDS`; `parse(StageConfig)` turns the arguments into settings of that class.

    The command `workflow` also passes `arguments` to the processes of its stages, and `fit` repeats
    them in the command that it prints. `workflow` measures the stage `measure_again` even if an
    earlier result of that stage could be reused.
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
        exit_code = run_stages(config, arguments, measure_again)
        try:
            print(f"report: {publish_report(config.directory)}")
        except (UserError, RankError) as error:
            # A missing report does not change the exit code. For example, there is nothing to
            # report if the first stage crashed.
            print(f"no report: {error}")
        return exit_code
    # The stage `checkpoint` is in recovery.py. The module of any other stage has the stage's name.
    module = "recovery" if name == "checkpoint" else name
    stage = importlib.import_module(f"{__package__}.{module}")
    return stage.measure(on_disk(config))
