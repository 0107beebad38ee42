"""The ranks of a run: joining, agreeing, stopping, noticing hangs and stragglers."""

from .agreement import Group
from .watchdog import watchdog
from .world import World, check_ranks, join, launched_ranks, launcher, leave, regrouping

__all__ = [
    "Group",
    "World",
    "check_ranks",
    "join",
    "launched_ranks",
    "launcher",
    "leave",
    "regrouping",
    "watchdog",
]
