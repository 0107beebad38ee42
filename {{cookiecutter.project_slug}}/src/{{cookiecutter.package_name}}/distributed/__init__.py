"""Processes that train together: joining, agreeing, stopping, noticing hangs."""

from .agreement import Group
from .world import World, join, launched_ranks, leave

__all__ = ["Group", "World", "join", "launched_ranks", "leave"]
