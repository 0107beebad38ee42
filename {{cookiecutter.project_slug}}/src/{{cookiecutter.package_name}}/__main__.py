"""The commands: `python -m` this package, or the project's console script.

Bare `--help` imports no torch: each command imports what it needs.
"""

import argparse
import contextlib
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import workflow
from .errors import RankError, UserError, exit_code
from .files import read_json
from .run.logs import log_to_console

log = logging.getLogger(__package__)
PROGRAM = f"python -m {__package__}"
ON_MANY_RANKS = ("train", "profile")
MANY = 8  # more names than these are not listed


def train(arguments: list[str]) -> int:
    """Train, or continue to train: the same command resumes an interrupted run."""
    from .config import Config
    from .distributed.stop import TO_BE_RESTARTED
    from .train import run

    config = parse("train", Config, arguments)
    result = run(config)
    lines = summary(config.directory, result.step) if os.environ.get("RANK", "0") == "0" else []
    if result.status == "already finished":
        lines.append("to train further: raise --train.steps; to start over: --fresh")
    elif result.status == "preempted":
        lines.append("to resume: the same command again")
    log.info("\n  ".join([f"{result.status} at step {result.step}", *lines]))
    return TO_BE_RESTARTED if result.status == "regrouping" else 0


def summary(run_dir: Path, step: int) -> list[str]:
    """The results of a run up to `step`, from its files."""
    from .checkpoint.paths import checkpoints_of, published
    from .run import journal

    lines = journal.summary(run_dir, step)
    try:
        directory = checkpoints_of(run_dir)
        names = shortened([path.name for path in published(directory)])
        where = "" if isinstance(directory, Path) else f" in {directory}"
    except (OSError, RankError, UserError):
        names, where = "cannot be listed now", ""
    lines.append(f"checkpoints: {names}{where}")
    # A full disk has been warned of, and a run that was finished before has no such figure.
    with contextlib.suppress(UserError, ValueError, TypeError, KeyError):
        waited = read_json(run_dir / "status.json")["checkpoint_blocked_seconds"]
        lines[-1] += f" (training waited {waited:.2f} s for saves)"
    return [*lines, f"everything is in {run_dir}"]


def shortened(names: list[str]) -> str:
    """A list of names as a line; of many the first and the last."""
    many = len(names) > MANY
    return f"{names[0]} … {names[-1]} ({len(names)})" if many else ", ".join(names) or "none"


def verify(arguments: list[str]) -> int:
    """List the checkpoints of a run and verify every byte; exit code 1 when one is damaged."""
    from .checkpoint.publish import list_checkpoints
    from .config import RunLocation

    lines, damaged = list_checkpoints(parse("verify", RunLocation, arguments).directory)
    print("\n".join(lines))
    return 1 if damaged else 0


def export(arguments: list[str]) -> int:
    """Write a checkpoint as one file (.pt, .safetensors), or such a file as a run to resume."""
    from .checkpoint import transfer
    from .config import RunLocation

    @dataclass(frozen=True, kw_only=True)
    class Export(RunLocation, transfer.ExportConfig):
        """The run, its checkpoint, and the file to write."""

    options = parse("export", Export, arguments)
    print(transfer.export(options.directory, options))
    return 0


def infer(arguments: list[str]) -> int:
    """Use a trained model, in one plain process, however many saved it."""
    if not Path(__file__).with_name("infer.py").exists():
        raise UserError("this project has no infer.py, which says what to do with a trained model")
    import torch

    from . import infer as task
    from .checkpoint.transfer import load_weights
    from .config import RunLocation, load
    from .data import build_datasets
    from .device import pick_device
    from .distributed import Group
    from .model import build_model

    @dataclass(frozen=True)
    class Inference(RunLocation, task.InferConfig):
        """The run, its checkpoint, and the input."""

        step: int | None = None
        """Use the checkpoint of this step (default: the newest good one)."""
        device: str = "auto"

    options = parse("infer", Inference, arguments)
    if not (options.directory / "config.json").exists():
        raise UserError(f"there is no run in {options.directory}: train first, or give --name")
    config = load(options.directory / "config.json")
    _, _, spec = build_datasets(config)
    model = build_model(config, spec)
    loaded = load_weights(options.directory, model, options.step, Group(), strict=True)
    log.info("weights: %s", loaded)
    model.to(pick_device(options.device)).eval()
    with torch.no_grad():
        task.infer(model, spec, config, options)
    return 0


OURS = {command.__name__: command for command in (train, verify, export, infer)}
HELP = {"train": train.__doc__, **workflow.COMMANDS}
HELP |= {name: command.__doc__ for name, command in OURS.items()}


def parse(name: str, kind: type, arguments: list[str]) -> Any:
    """Settings of a kind from the arguments of a command; a run's start from a preset or a file."""
    import tyro

    from .config import Config, load, preset
    from .model import PRESETS

    about, start = HELP[name], {}
    if issubclass(kind, Config):
        parser = argparse.ArgumentParser(PROGRAM, add_help=False, allow_abbrev=False)
        either = parser.add_mutually_exclusive_group()
        either.add_argument("--preset", default="default")
        either.add_argument("--config", type=Path)
        given, arguments = parser.parse_known_args(arguments)
        start["default"] = load(given.config, kind) if given.config else preset(given.preset, kind)
        about += f" Start from --preset NAME ({', '.join(PRESETS)}) or "
        about += "--config runs/NAME/config.json, then override."
    prog = f"{PROGRAM} {name}"
    return tyro.cli(kind, prog=prog, description=about, args=arguments, **start)


def dispatch(arguments: list[str]) -> int:
    """Run the command that the first argument names."""
    lines = [f"  {name:<12}{about}" for name, about in HELP.items()]
    usage = "\n".join([f"usage: {PROGRAM} COMMAND [--help] [options]", "", *lines])
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(usage)
        return 0
    if name not in HELP:
        raise UserError(f"there is no command {name!r}\n{usage}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and name not in ON_MANY_RANKS:
        raise UserError(f"{name} starts the processes that it needs: run it without torchrun")
    if name in OURS:
        return OURS[name](rest)
    return workflow.run_command(name, rest, lambda kind: parse(name, kind, rest))


def main() -> int:
    """Run a command; its exit code: 0, 1 when something is wrong, 2 for bad input."""
    log_to_console()
    return exit_code(lambda: dispatch(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
