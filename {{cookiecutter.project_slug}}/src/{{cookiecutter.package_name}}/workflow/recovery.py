"""The checkpoint stage, until its files are one."""

from .checkpoint import measure as measure
