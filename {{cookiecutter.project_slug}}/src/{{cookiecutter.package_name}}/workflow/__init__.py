"""The engineering workflow as commands, each closed by a gate that measures the project's loop."""

import importlib
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

STAGES = {
    "baseline": "Measure one eager process: determinism, learning, throughput, waiting for data.",
    "compile": "Try torch.compile: graph breaks, recompiles, same numbers, speedup, warm caches.",
    "profile": "Trace some steps for Perfetto: where a step's time goes, and what to try next.",
    "scale": "Run on 1 to n processes: same losses, efficiency, memory per rank, DDP or FSDP.",
    "checkpoint": "Drill the recovery: restore, reshard, kill, damage; say how often to save.",
}
"""In the order in which they build on each other."""
COMMANDS = STAGES | {
    "workflow": "Run all stages in order, up to the first failed gate; then write the report.",
    "report": "Write report.html: loss, throughput, scaling, memory, checkpoints, checks, advice.",
}


def run_command(name: str, arguments: list[str], parse: Any) -> int:
    """Run one of `COMMANDS`; `parse(kind)` reads settings of that kind from the arguments."""
    from ..checkpoint.storage import on_disk
    from ..config import Config, RunLocation

    if name == "report":
        from .report import publish_report

        print(publish_report(parse(RunLocation).directory))
        return 0
    if name == "workflow":
        from .sequence import run_all

        return run_all(parse(Config), arguments)
    return importlib.import_module(f"{__name__}.{name}").measure(on_disk(parse(Config)))


@dataclass(frozen=True)
class WorkflowConfig:
    """How far the stages go."""

    ranks: int = 0
    """The most processes to start (0: one per GPU of this machine, on a CPU 2)."""
    hours_between_failures: float = 24.0
    """Mean time between failures of the whole job, preemptions included: what the interval between
    checkpoints is worked out from."""
    go_on: bool = False
    """Go on behind a gate that failed."""
    again: bool = False
    """Measure anew what was measured already with these settings and this code."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if self.ranks < 0:
            raise UserError("--workflow.ranks must not be negative")
        if not self.hours_between_failures > 0:
            raise UserError("--workflow.hours-between-failures must be positive")
