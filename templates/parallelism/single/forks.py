"""Processes of the stages: each is a new Python."""

import subprocess

Process = subprocess.Popen[str]


def prepare() -> None:
    """Nothing has to be prepared."""


def fork(command: list[str], environment: dict[str, str], piped: bool) -> None:
    """No process is forked here."""
