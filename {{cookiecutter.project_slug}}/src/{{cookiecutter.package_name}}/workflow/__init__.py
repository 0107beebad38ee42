"""The engineering workflow as commands, each closed by a gate that measures the project's loop."""

from dataclasses import dataclass

from ..errors import UserError

STAGES = {
    "baseline": "Measure one eager process: determinism, learning, throughput, waiting for data.",
    "compile": "Try torch.compile: graph breaks, recompiles, same numbers, speedup, warm caches.",
    "profile": "Trace some steps for Perfetto: where a step's time goes, and what to try next.",
    "scale": "Run on 1 to n processes: same losses, efficiency, memory per rank, DDP or FSDP.",
    "checkpoint": "Drill the recovery: restore, reshard, kill, damage; say how often to save.",
}
"""In the order in which they build on each other."""


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
