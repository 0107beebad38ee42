"""All settings in one typed tree of frozen dataclasses. Each part is declared where it is used.

Settings are changed by dotted names ("train.steps"), saved as JSON (config.json) and read back.
"""

import dataclasses
import difflib
import logging
import tomllib
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar

import torch

from .checkpoint.checkpointer import CheckpointConfig
from .checkpoint.storage import ELSEWHERE, located, on_disk
from .compile import CompileConfig
from .data import DataConfig
from .distributed.parallel import ParallelConfig
from .errors import UserError
from .files import flatten, read_json, to_json
from .model import PRESETS, ModelConfig
from .optim import OptimConfig
from .profiler import ProfileConfig
from .run.tracker import TrackerConfig

log = logging.getLogger(__name__)
C = TypeVar("C")
# Parts whose settings depend on the answers of a render, or did in an earlier release.
OF_AN_ANSWER = ("parallel", "checkpoint", "compile", "tracker")
OF_ONE_RUN = ("name", "run_dir", "fresh", "init_from", "init_strict", "workflow")


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 300
    """Optimizer steps in all; raise it to train a finished run further."""
    global_batch_size: int = 32
    """Samples per optimizer step over all processes. It fixes the order of samples for the run."""
    micro_batch_size: int = 32
    """The most samples in one forward of a process; gradients are accumulated accordingly."""
    log_every: int = 10
    validate_every: int = 100
    """Steps between validations (0: never)."""
    validate_samples: int = 0
    """Validate on this many samples, the same ones each time (0: all)."""
    seed: int = 0
    deterministic: bool = False
    """Only deterministic kernels: on CUDA a resume is then bit-exact, and steps are slower."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Of matrix products; weights and optimizer stay float32. auto: bf16 where CUDA has it."""
    activation_checkpointing: bool = False
    """Keep only each block's input for backward: less memory, a third more compute."""
    loader_workers: int = 0
    """Processes that read data ahead (0: read in the loop, best for data in memory)."""
    on_bad_step: Literal["skip", "stop"] = "skip"
    """A step with a non-finite loss or gradient is skipped; "stop": it ends the run and names the
    samples at fault, for which the host waits for the device at each step."""
    max_bad_steps: int = 20
    """End the run after this many skipped steps in a row (0: never)."""

    def __post_init__(self) -> None:
        positive = ("steps", "global_batch_size", "micro_batch_size", "log_every")
        for name, value in vars(self).items():
            if isinstance(value, int) and value < (least := int(name in positive)):
                raise UserError(f"--train.{name.replace('_', '-')} must be at least {least}")
        if self.seed >= 2**63:
            raise UserError("--train.seed must be below 2^63")

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of matrix products on `device`."""
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
        low = self.precision == "bf16" or (self.precision == "auto" and fast)
        return torch.bfloat16 if low else torch.float32


@dataclass(frozen=True)
class RunLocation:
    """The run, by name or directory."""

    name: str = "default"
    """Starting a run of the same name again resumes it."""
    run_dir: Path | None = None
    """Where the run lives (default: runs/NAME)."""

    @property
    def directory(self) -> Path:
        """The run directory; UserError for a name that leads elsewhere."""
        plain = self.name == Path(self.name).name and self.name.isprintable()
        if not plain or self.name in ("", ".."):
            raise UserError(f"--name {self.name!r} is no plain name; for a path there is --run-dir")
        directory = self.run_dir or Path("runs") / self.name
        located(directory)  # UserError for an address that this project cannot open
        return directory


@dataclass(frozen=True)
class Config(RunLocation):
    """One training run."""

    fresh: bool = False
    """Set the old run of this name aside and start over."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1, mps."""
    init_from: Path | None = None
    """Start at step 0 from the weights of this run, checkpoint, .pt or .safetensors file."""
    init_strict: bool = False
    """Refuse weights to start from that lack a tensor or have one too many."""
    track: bool = True
    """Log to the experiment tracker, too."""
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        if self.fresh and self.checkpoint.far:
            raise UserError("--fresh leaves the object store as it is: give another address")
        if self.fresh and self.init_from:
            if self.init_from.resolve().is_relative_to(self.directory.resolve()):
                raise UserError("--fresh would move what --init-from reads: choose another --name")
            if not located(self.init_from).exists():
                raise UserError(f"--init-from {self.init_from}: there is nothing there")


GONE = ("checkpoint.auto_share", "checkpoint.auto_longest")  # in files of earlier releases
AUTO = ("checkpoint.every", "auto")


def preset(name: str = "default", kind: type[C] = Config) -> C:
    """The settings of a preset; UserError lists the presets when there is none of that name."""
    if name not in PRESETS:
        raise UserError(f"--preset {name}: there is none of that name; try {', '.join(PRESETS)}")
    return override(override(kind(), PRESETS["default"]), PRESETS[name])


def load(path: Path, kind: type[C] = Config, start: str = "default") -> C:
    """A preset, overridden by TOML with any of the settings, or by a run's config.json.

    The latter without what names that run (its name, its store). A setting that it lacks is newer
    than it, and has its own default: a preset's may have become another one since.
    """
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".toml":
        return on_disk(from_json(kind(), path, leave_out=OF_ONE_RUN))
    config = preset(start, kind)
    changes = read_toml(path)
    if gone := [n for n, value in changes.items() if n in GONE or (n, value) == AUTO]:
        log.info(
            "left out of %s, as there are no such settings any more: %s", path, ", ".join(gone)
        )
        changes = {name: value for name, value in changes.items() if name not in gone}
    if kind is Config:  # a run's own settings, from a file for the stages, too
        changes = {n: value for n, value in changes.items() if not n.startswith("workflow.")}
    try:
        return override(config, changes)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file by their dotted names; UserError if it is none."""
    try:
        named = dict(flatten(tomllib.loads(path.read_text("utf-8"))))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read as TOML: {reason}") from None
    return {name.replace("-", "_"): value for name, value in named.items()}


def from_json(config: C, path: Path, leave_out: Iterable[str] = ()) -> C:
    """Override `config` by a JSON file, except for the top-level names in `leave_out`.

    Settings of another answer are left out, with one line that names them; UserError for any other
    that this project does not have.
    """
    unknown: dict[str, Any] = {}
    try:
        content = {k: value for k, value in read_json(path).items() if k not in leave_out}
        config = _replace(config, content, unknown)
    except UserError as error:
        raise UserError(f"{path} is not a config.json that can be used: {error}") from None
    for name in unknown:
        if name.partition(".")[0] not in OF_AN_ANSWER:
            raise UserError(f"{path}: {name} is not a setting of this project")
    if unknown:
        # With the answer to which projects have the setting, if the run made use of it.
        names = [
            f"{name} ({ELSEWHERE[name]})" if value and name in ELSEWHERE else name
            for name, value in unknown.items()
        ]
        text = "left out of %s, as this project has no such settings: %s"
        log.info(text, path, ", ".join(names))
    return config


def override(config: C, changes: dict[str, Any]) -> C:
    """Change settings by dotted names, as in {"train.steps": 20}; UserError for unknown names.

    Changes to one part are made together, since a part may check settings against each other.
    """
    tree: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    for name, value in changes.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    config = _replace(config, tree, unknown)
    if unknown:
        name = next(iter(unknown))
        near = difflib.get_close_matches(name, dict(flatten(to_json(config))), 1)
        advice = f": did you mean {near[0]}?" if near else ""
        raise UserError(f"{name} is not a setting of this project{advice}")
    return config


def _replace(part: Any, changes: dict[str, Any], unknown: dict[str, Any], prefix: str = "") -> Any:
    """Change a part of the settings; names that it does not have go to `unknown`."""
    types, values = typing.get_type_hints(type(part)), {}
    for name, value in changes.items():
        if name not in types or (prefix + name, value) == AUTO:
            unknown.update(flatten({prefix + name: value}))
        elif not dataclasses.is_dataclass(types[name]):
            values[name] = _checked(prefix + name, value, types[name])
        elif isinstance(value, dict):
            values[name] = _replace(getattr(part, name), value, unknown, f"{prefix}{name}.")
        else:
            raise UserError(f"{prefix}{name} is {repr(value)[:60]}: wanted settings by name")
    return dataclasses.replace(part, **values)


WANTED = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
WANTED |= {Path: "a path", type(None): "null", tuple: "a list"}


def _checked(name: str, value: Any, hint: Any) -> Any:
    """A value as a setting of that type holds it (JSON has no paths or tuples); UserError if none.

    A type that JSON does not have either passes as it is.
    """
    wanted = []
    for kind in typing.get_args(hint) if isinstance(hint, UnionType) else (hint,):
        origin = typing.get_origin(kind) or kind
        if origin is Literal:
            choices = typing.get_args(kind)
            if any(type(value) is type(choice) and value == choice for choice in choices):
                return value
            wanted += map(repr, choices)
        elif origin not in WANTED:
            return value
        elif origin is Path and isinstance(value, str) and "\0" not in value:
            return Path(value)
        elif origin is tuple and isinstance(value, list | tuple):
            return tuple(value)
        elif isinstance(value, (int, float) if origin is float else origin) and (
            origin is bool or not isinstance(value, bool)  # which is an int, too
        ):
            return value
        else:
            wanted.append(WANTED[origin])
    raise UserError(f"{name} is {repr(value)[:60]}: wanted {' or '.join(wanted)}")
