"""The commands: `python -m` this package, or the project's console script."""

import json
import logging
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from . import config as configuration
from .config import Config
from .engine import UserError
from .engine.control import HostGroup, RankError, launched_ranks
from .engine.metrics import log_to_console
from .engine.snapshots import SnapshotError, best_by_validation, published, verify
from .infer import InferConfig
from .model import PRESETS

log = logging.getLogger(__package__)


def train(arguments: list[str]) -> int:
    """Train, or go on training: the same command resumes an interrupted run."""
    from .train import run

    config = parse_config("train", train, arguments)
    result = run(config)
    log.info("%s at step %d", result.status, result.step)
    for line in summary(config.directory) if os.environ.get("RANK", "0") == "0" else ():
        log.info("  %s", line)
    if result.status == "already finished":
        log.info("  to go on: raise --train.steps; to start over: --fresh (keeps the old run)")
    elif result.status == "preempted":
        log.info("  to go on from here: the same command again")
    return 0


def summary(run_dir: Path) -> list[str]:
    """What a run measured and where it lies, from its files."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = []
    for name in ("samples_per_second", "tokens_per_second", "mfu"):
        if values := [record[name] for record in records if name in record]:
            middle = statistics.median(values)
            text = f"{middle:.1%}" if name == "mfu" else f"{middle:,.0f}"
            lines.append(f"{name.replace('_', ' ')}: {text} (median)")
    for name, value in records[-1].items():
        if name.startswith("validation_"):
            lines.append(f"{name.replace('_', ' ')}: {value:.4f}")
    blocked = sum(record["checkpoint_blocked_seconds"] for record in records)
    steps = [path.name for path in published(run_dir / "checkpoints")]
    lines.append(f"checkpoints: {', '.join(steps)} (held training up for {blocked:.2f} s in all)")
    lines.append(f"everything is in {run_dir}")
    return lines


def baseline(arguments: list[str]) -> int:
    """Measure one eager process: determinism, learning, throughput; see workflow/baseline.json."""
    from .workflow.baseline import measure

    return measure(parse_config("baseline", baseline, arguments))


def profile(arguments: list[str]) -> int:
    """Trace a few steps for Perfetto and print the top operators. Touches no checkpoint."""
    from . import parallel
    from .engine.profiling import trace_steps
    from .train import setup, train_step

    config = parse_config("profile", profile, arguments)
    state = setup(config)
    traces = trace_steps(config.profile, config.directory / "traces", state, train_step)
    if state.world.rank == 0:
        print(traces.table)
        print(f"open {traces.written[-1]} at https://ui.perfetto.dev")
    world = state.world
    del state
    parallel.teardown(world)
    return 0


@dataclass(frozen=True)
class Place:
    """Which run."""

    name: str = "default"
    run_dir: Path | None = None
    """Where the run lives (default: runs/NAME)."""

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.run_dir or Path("runs") / self.name


def verify_command(arguments: list[str]) -> int:
    """List the checkpoints of a run and verify every byte; exit code 1 when one is damaged."""
    place = tyro.cli(Place, prog=prog("verify"), description=verify_command.__doc__, args=arguments)
    paths = published(place.directory / "checkpoints")
    if not paths:
        raise UserError(f"there are no checkpoints in {place.directory}: train first")
    found = {path: verify(path) for path in paths}
    best = best_by_validation({path: m for path, (m, problems) in found.items() if not problems})
    for path, (manifest, problems) in found.items():
        if problems:
            print(f"{path.name}  DAMAGED  {'; '.join(problems)}")
            continue
        size = sum(entry["size"] for entry in manifest["files"].values()) / 1e6
        loss = manifest.get("validation_loss")
        notes = f"  validation loss {loss:.4f}" if loss is not None else ""
        notes += "  best" if path == best else ""
        print(f"{path.name}  good  {size:,.1f} MB in {len(manifest['files'])} files{notes}")
    aside = [path.name for path in (place.directory / "checkpoints").glob("step_*.damaged-*")]
    for name in sorted(aside):
        print(f"{name}  set aside earlier")
    return 1 if any(problems for _, problems in found.values()) else 0


@dataclass(frozen=True)
class Inference(Place, InferConfig):
    """Which run, which of its checkpoints, and what to do with it."""

    step: int | None = None
    """Use the checkpoint of this step (default: the newest good one)."""
    device: str = "auto"


def infer(arguments: list[str]) -> int:
    """Use a trained model, in one plain process, whatever number of ranks saved it."""
    import torch

    from .data import build_datasets
    from .engine.control import pick_device
    from .engine.state import load_weights
    from .infer import infer as use
    from .model import build_model

    options = tyro.cli(Inference, prog=prog("infer"), description=infer.__doc__, args=arguments)
    if not (options.directory / "config.json").exists():
        raise UserError(f"there is no run in {options.directory}: train first, or give --name")
    config = configuration.load(options.directory / "config.json")
    _, _, spec = build_datasets(config)
    model = build_model(config, spec)
    log.info("weights: %s", load_weights(options.directory, model, options.step, HostGroup()))
    model.to(pick_device(options.device)).eval()
    with torch.no_grad():
        use(model, spec, config, options)
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "baseline": baseline,
    "profile": profile,
    "verify": verify_command,
    "infer": infer,
}
UNDER_TORCHRUN = ("train", "profile")


def parse_config(command: str, function: Callable[..., int], arguments: list[str]) -> Config:
    """Settings from --preset or --config, then from the other options."""
    base, rest, given = configuration.preset(), [], {}
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("--preset", "--config"):
            given[option] = value if equals else next(words, "")
        else:
            rest.append(word)
    if "--config" in given:
        base = configuration.load(Path(given["--config"]))
    if "--preset" in given:
        base = configuration.preset(given["--preset"])
    description = (
        f"{function.__doc__} Start from --preset NAME ({', '.join(PRESETS)}) or from the settings "
        "of another run (--config runs/NAME/config.json); the options below go over them."
    )
    return tyro.cli(
        Config,
        default=base,
        prog=prog(command),
        description=description,
        args=rest,
    )


def prog(command: str) -> str:
    """The command as the user types it."""
    return f"python -m {__package__} {command}"


def usage() -> str:
    """The commands, a line each."""
    lines = [f"  {name:<10}{function.__doc__}" for name, function in COMMANDS.items()]
    head = f"usage: python -m {__package__} COMMAND [--help] [options]"
    return "\n".join([head, "", *lines])


def main() -> int:
    """Run a command; returns its exit code: 0, 1 when something is wrong, 2 for bad input."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(usage())
        return 0
    log_to_console(__package__)
    try:
        if command not in COMMANDS:
            raise UserError(f"there is no command {command!r}\n{usage()}")
        if launched_ranks() > 1 and command not in UNDER_TORCHRUN:
            raise UserError(f"{command} starts what it needs itself: run it without torchrun")
        return COMMANDS[command](arguments)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the others would only repeat it
            print(f"error: {error}", file=sys.stderr)
        code = 2
    except (SnapshotError, RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except Exception:
        if launched_ranks() == 1:
            raise
        traceback.print_exc()
        code = 1
    if "RANK" in os.environ:
        # The process group cannot be left in order: its finalisers may wait for ranks that are
        # gone. The checkpoints are safe at every instant, so leave at once.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
