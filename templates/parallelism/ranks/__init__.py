"""Coordinate the ranks of a run: join, agree, stop, and detect hangs."""

from .agreement import Group as Group
from .agreement import require_same_model as require_same_model
from .agreement import require_same_optimizer as require_same_optimizer
from .watchdog import monitors as monitors
from .world import World as World
from .world import join as join
from .world import launcher as launcher
from .world import leave as leave
from .world import regrouping as regrouping
