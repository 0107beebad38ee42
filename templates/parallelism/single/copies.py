"""Processes of the stages: each is a new Python."""

import subprocess

Process = subprocess.Popen[str]


def prepare() -> None:
    """Nothing has to be prepared."""


def copy(command: list[str], environment: dict[str, str], piped: bool) -> None:
    """None: one process at a time is started, and there is no copy of any."""
