"""Stands in for the module of this name until measuring.py is renamed."""

from .measuring import *  # noqa: F403
