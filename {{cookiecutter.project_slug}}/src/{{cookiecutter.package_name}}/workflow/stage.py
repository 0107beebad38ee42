"""Stands in for the module of this name until gates.py is renamed."""

from .gates import *  # noqa: F403
