"""Processes that train together: joining, agreeing, stopping, noticing hangs."""

from . import parallel
from .agreement import Group
from .elastic import launcher
from .watchdog import watchdog
from .world import World, launched_ranks

join, leave, check_ranks = parallel.setup, parallel.teardown, parallel.check_ranks

__all__ = [
    "Group",
    "World",
    "check_ranks",
    "join",
    "launched_ranks",
    "launcher",
    "leave",
    "parallel",
    "watchdog",
]
