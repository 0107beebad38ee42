"""The commands: `python -m` this package, or the project's console script."""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import commands
from . import config as configuration
from .checkpoint.transfer import ExportConfig
from .checkpoint.transfer import export as write_export
from .commands import PROGRAM, ask, exit_code
from .config import Config, Place
from .distributed import Group
from .distributed.elastic import TO_BE_RESTARTED
from .errors import UserError
from .infer import InferConfig
from .model import PRESETS
from .run.directory import list_checkpoints, summary
from .run.logs import log_to_console
from .settings import on_disk
from .workflow import STAGES

log = logging.getLogger(__package__)


def train(arguments: list[str]) -> int:
    """Train, or go on training: the same command resumes an interrupted run."""
    from .train import run

    config = parse_config(train, arguments)
    result = run(config)
    log.info("%s at step %d", result.status, result.step)
    if os.environ.get("RANK", "0") == "0":
        for line in summary(config.directory, result.step):
            log.info("  %s", line)
    if result.status == "already finished":
        log.info("  to go on: raise --train.steps; to start over: --fresh (keeps the old run)")
    elif result.status == "preempted":
        log.info("  to go on from here: the same command again")
    return TO_BE_RESTARTED if result.status == "regrouping" else 0


def stage(name: str) -> Callable[[list[str]], int]:
    """The command of a stage of the workflow."""

    def run_stage(arguments: list[str]) -> int:
        file = {"checkpoint": "recovery"}.get(name, name)
        module = importlib.import_module(f"{__package__}.workflow.{file}")
        return module.measure(on_disk(parse_config(run_stage, arguments)))

    run_stage.__name__, run_stage.__doc__ = name, STAGES[name]
    return run_stage


def workflow(arguments: list[str]) -> int:
    """Run all five stages in their order, up to the first failed gate; then write the report."""
    from .workflow.sequence import run_all

    return run_all(parse_config(workflow, arguments), arguments)


def report(arguments: list[str]) -> int:
    """Write report.html: loss, throughput, scaling, memory, checkpoints, verdicts, advice."""
    from .workflow.report import publish_report

    print(publish_report(ask(report, Place, arguments).directory))
    return 0


def verify(arguments: list[str]) -> int:
    """List the checkpoints of a run and verify every byte; exit code 1 when one is damaged."""
    place = ask(verify, Place, arguments)
    lines, damaged = list_checkpoints(place.directory)
    print("\n".join(lines))
    return 1 if damaged else 0


@dataclass(frozen=True, kw_only=True)
class Export(Place, ExportConfig):
    """Which run, which of its checkpoints, and what to make of it."""


def export(arguments: list[str]) -> int:
    """Write a checkpoint as one file (.pt, .safetensors), or such a file as a run to go on in."""
    options = ask(export, Export, arguments)
    print(write_export(options.directory, options))
    return 0


@dataclass(frozen=True)
class Inference(Place, InferConfig):
    """Which run, which of its checkpoints, and what to do with it."""

    step: int | None = None
    """Use the checkpoint of this step (default: the newest good one)."""
    device: str = "auto"


def infer(arguments: list[str]) -> int:
    """Use a trained model, in one plain process, whatever number of ranks saved it."""
    import torch

    from .checkpoint.transfer import load_weights
    from .data import build_datasets
    from .device import pick_device
    from .infer import infer as use
    from .model import build_model

    options = ask(infer, Inference, arguments)
    if not (options.directory / "config.json").exists():
        raise UserError(f"there is no run in {options.directory}: train first, or give --name")
    config = configuration.load(options.directory / "config.json")
    _, _, spec = build_datasets(config)
    model = build_model(config, spec)
    loaded = load_weights(options.directory, model, options.step, Group(), strict=True)
    log.info("weights: %s", loaded)
    model.to(pick_device(options.device)).eval()
    with torch.no_grad():
        use(model, spec, config, options)
    return 0


COMMANDS = (train, *map(stage, STAGES), workflow, report, verify, export, infer)


def parse_config(command: Callable[..., int], arguments: list[str]) -> Config:
    """Settings from --preset or --config, then from the other options."""
    parser = argparse.ArgumentParser(PROGRAM, add_help=False, allow_abbrev=False)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--preset", default="default")
    either.add_argument("--config", type=Path)
    given, rest = parser.parse_known_args(arguments)
    base = configuration.load(given.config) if given.config else configuration.preset(given.preset)
    more = (
        f" Start from --preset NAME ({', '.join(PRESETS)}) or from the settings of another run "
        "(--config runs/NAME/config.json); the options below go over them."
    )
    return ask(command, Config, rest, more, default=base)


def dispatch(arguments: list[str]) -> int:
    """Run the command that the first argument names."""
    return commands.dispatch(COMMANDS, arguments, many_ranks=("train", "profile"))


def main() -> int:
    """Run a command; its exit code: 0, 1 when something is wrong, 2 for bad input."""
    log_to_console()
    return exit_code(lambda: dispatch(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
