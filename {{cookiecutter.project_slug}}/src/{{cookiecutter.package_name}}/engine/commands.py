"""A command line with commands: which one is meant, and its options as typed settings."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import tyro

from . import UserError
from .control import launched_ranks

T = TypeVar("T")
Command = Callable[[list[str]], int]
PROGRAM = f"python -m {__package__.split('.')[0]}"


def ask(command: Command, kind: type[T], words: list[str], more: str = "", **how: T) -> T:
    """Settings of some kind from the words behind a command; its docstring is the help."""
    prog = f"{PROGRAM} {command.__name__}"
    return tyro.cli(kind, prog=prog, description=command.__doc__ + more, args=words, **how)


def dispatch(commands: Iterable[Command], words: list[str], many_ranks: Iterable[str]) -> int:
    """Run the command that the first word names; those in `many_ranks` also under torchrun."""
    known = {command.__name__: command for command in commands}
    name, *rest = words or ["--help"]
    lines = [f"  {name:<12}{command.__doc__}" for name, command in known.items()]
    usage = "\n".join([f"usage: {PROGRAM} COMMAND [--help] [options]", "", *lines])
    if name in ("-h", "--help"):
        print(usage)
        return 0
    if name not in known:
        raise UserError(f"there is no command {name!r}\n{usage}")
    if launched_ranks() > 1 and name not in many_ranks:
        raise UserError(f"{name} starts what it needs itself: run it without torchrun")
    return known[name](rest)
