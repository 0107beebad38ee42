"""The commands: `python -m` this package, or the project's console script.

Each command imports what it needs, so that `--help` without a command does not import torch.
"""

import argparse
import difflib
import gc
import importlib
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UserError, printable, run_main
from .run.logs import log_to_console, make_lenient

log = logging.getLogger(__package__)
PROGRAM = f"python -m {__package__}"
HERE = Path(__file__).parent
# The variables in which srun and mpirun pass on the number of processes that they start.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def train(arguments: list[str]) -> int:
    """Train, or continue to train: the same command resumes an interrupted run."""
    # Garbage collection would scan the imported modules again and again, which takes a quarter of
    # the start-up time.
    gc.disable()
    from .config import Config
    from .distributed.stop import TO_BE_RESTARTED
    from .run.summary import summary
    from .train import run

    config = parse("train", Config, arguments)
    # Ignore errors when callbacks print to a terminal or pipe that has been closed.
    make_lenient(sys.stdout)
    # Optimizers would import this large module later. Import it now, so that gc.freeze() exempts
    # its objects from garbage collection, too.
    import torch._dynamo  # noqa: F401

    gc.freeze()
    gc.enable()
    result = run(config)
    lines = [f"{result.status} at step {result.step}"]
    if os.environ.get("RANK", "0") == "0":
        lines += summary(config.directory, result)
    log.info("\n  ".join(lines))
    # "regrouping": another machine has left the job, so torchrun must restart the remaining ranks.
    return TO_BE_RESTARTED if result.status == "regrouping" else 0


def verify(arguments: list[str]) -> int:
    """List the checkpoints of a run and verify every byte; exit code 1 when one is damaged."""
    from .checkpoint.verify import list_checkpoints
    from .config import RunLocation

    listing = list_checkpoints(parse("verify", RunLocation, arguments).directory)
    print(printable("\n".join(listing.lines)))
    return 1 if listing.any_damaged else 0


def export(arguments: list[str]) -> int:
    """Export a checkpoint to a file (.pt, .safetensors, .pt2), or turn a .pt back into a run."""
    from .config import RunLocation

    # huggingface.py, which only some projects have, adds a format to those of transfer.py.
    name = ".huggingface" if (HERE / "huggingface.py").exists() else ".checkpoint.transfer"
    module: Any = importlib.import_module(name, __package__)

    @dataclass(frozen=True, kw_only=True)
    class Export(RunLocation, module.ExportConfig):
        """The run, its checkpoint, and what to write."""

    options = parse("export", Export, arguments)
    if options.to.suffix == ".pt2":
        from .program import export_program

        print(export_program(options.directory, options))
    else:
        print(module.export(options.directory, options))
    return 0


def infer(arguments: list[str]) -> int:
    """Use a trained model in one process, whatever number of ranks saved it."""
    import torch

    from . import infer as infer_module
    from . import load_trained
    from .checkpoint.transfer import Step, Weights
    from .config import RunLocation

    @dataclass(frozen=True)
    class Inference(RunLocation, infer_module.InferConfig):
        """The run, its checkpoint, and the input."""

        step: Step = None
        """Step of the checkpoint, or "best" by validation (none: the newest good one)."""
        weights: Weights = "last"
        """Weights to use: the last ones, or their EMA (--optim.ema)."""
        base: Path | None = None
        """New path of the frozen weights that --checkpoint.frozen no left out, if they moved."""
        device: str = "auto"
        """Device: auto (a GPU if there is one), cpu, cuda, cuda:1 or mps."""

    options = parse("infer", Inference, arguments)
    model, spec, config = load_trained(
        options.directory, options.device, options.step, options.weights, options.base
    )
    with torch.no_grad():
        infer_module.infer(model, spec, config, options)
    return 0


def tokens(arguments: list[str]) -> int:
    """Train a tokenizer on a folder of text, and write the text as token files."""
    module = importlib.import_module(".tokens", __package__)
    print(module.write_tokens(parse("tokens", module.TokensConfig, arguments)))
    return 0


# The commands of this file. The commands of workflow/ are in `workflow.COMMANDS`.
OURS = {command.__name__: command for command in (train, verify, export)}
# You may delete infer.py and workflow/; only some projects have tokens.py.
for command in (infer, tokens):
    if (HERE / f"{command.__name__}.py").exists():
        OURS[command.__name__] = command
workflow: Any = None
if (HERE / "workflow").exists():
    workflow = importlib.import_module(".workflow", __package__)
HELP = {name: command.__doc__ or "" for name, command in OURS.items()}
HELP |= getattr(workflow, "COMMANDS", {})


def parse(name: str, kind: type, arguments: list[str]) -> Any:
    """Parse a command's arguments into settings of type `kind`.

    Settings of a run start from a preset or a file, which the arguments override.
    """
    import tyro

    from .config import Config, load, outweighing, override, preset
    from .files import expand_home
    from .model import PRESETS
    from .run.directory import with_saved

    about = HELP[name]
    program_name = f"{PROGRAM} {name}"
    # Only commands with the settings of a training run accept --preset and --config.
    if not issubclass(kind, Config):
        options = tyro.cli(kind, prog=program_name, description=about, args=arguments)
        return expand_home(options)
    parser = argparse.ArgumentParser(program_name, add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", default="")
    parser.add_argument("--config", type=Path)
    given, rest = parser.parse_known_args(arguments)
    given.config = expand_home(given.config)
    # The names of the settings on the command line, such as train.log_every for --train.log-every.
    given_names: set[str] = set()
    for word in rest:
        if word.startswith("--"):
            given_names.add(word.removeprefix("--").partition("=")[0].replace("-", "_"))
    about += (
        f"\n\n  --preset NAME  Settings to start from: {', '.join(PRESETS)}."
        "\n  --config FILE  TOML or a run's config.json, which overrides the preset."
    )

    def read(saved: dict[str, Any] | None = None) -> Any:
        # Later settings override earlier ones: saved, preset, file, command line.
        start = preset(given.preset, kind, saved)
        if given.config is not None:
            start = load(given.config, kind, start)
        # A setting on the command line turns off those that would override it. For example,
        # --train.steps turns off the epochs of a preset.
        start = override(start, outweighing(given_names))
        options = tyro.cli(kind, prog=program_name, description=about, args=rest, default=start)
        return expand_home(options)

    # A config.json sets everything, so nothing is taken from the saved settings of a resumed run.
    has_all_settings = given.config is not None and given.config.suffix != ".toml"
    if name != "train" or has_all_settings:
        return read()
    # The first `read` has no saved settings, and finds the run. If the run has saved settings,
    # `with_saved` calls `read` again with them.
    return with_saved(read(), read)


def usage() -> str:
    """Return the list of commands."""
    lines = [f"usage: {PROGRAM} COMMAND [--help] [options]", ""]
    for name, about in HELP.items():
        lines.append(f"  {name:<12}{about}")
    return "\n".join(lines)


def dispatch(arguments: list[str]) -> int:
    """Run the command that the first argument names."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in HELP:
        near = difflib.get_close_matches(name, HELP, 1)
        advice = f": did you mean {near[0]}?" if near else ""
        raise UserError(f"there is no command {name!r}{advice}\n{usage()}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and name not in ("train", "profile"):
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, as under torchrun, but {name} is one "
            "process, or starts its own: run it without torchrun"
        )
    if "RANK" not in os.environ:
        refuse_ranks_without_torchrun()
    if name in OURS:
        return OURS[name](rest)
    # `run_command` decides which type of settings the command has, and passes it to the lambda.
    return workflow.run_command(name, rest, lambda kind: parse(name, kind, rest))


def refuse_ranks_without_torchrun() -> None:
    """Raise UserError if srun or mpirun has started several processes."""
    for variable in TASKS:
        if os.environ.get(variable, "1") != "1":
            raise UserError(
                f"{variable} is {os.environ[variable]}: srun or mpirun has started several "
                "processes, which would not work together. Let it start launch.sh once per "
                "machine; torchrun starts the ranks there"
            )


def main() -> int:
    """Run a command and return its exit code.

    The code is 0 on success (and when `train` has saved after a stop signal), 1 when something is
    wrong, 2 for bad input, and 128 + n when signal n ended the command. Under torchrun it may also
    be FAILED_AT_START or TO_BE_RESTARTED.
    """
    log_to_console()
    # Waiting OpenMP threads spin and so occupy cores that other work could use. GOMP_SPINCOUNT,
    # which OpenMP reads when torch is imported, makes them sleep soon.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    # Expandable segments reduce fragmentation of GPU memory. The first variable is the older name
    # of the second.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # File names may contain bytes that cannot be encoded. A notebook's stdout has no `reconfigure`.
    stdout: Any = sys.stdout
    if hasattr(stdout, "reconfigure"):
        stdout.reconfigure(errors="backslashreplace")
    return run_main(lambda: dispatch(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
