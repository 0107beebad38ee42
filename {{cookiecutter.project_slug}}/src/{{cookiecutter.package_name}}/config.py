"""Define all settings as one typed tree of frozen dataclasses, and load them from files.

Each module declares its own settings, and this one combines them. Settings are changed by dotted
names ("train.steps") and saved as JSON (config.json).
"""

import contextlib
import difflib
import logging
import math
import tomllib
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from . import data as data_module
from .checkpoint.checkpointer import CheckpointConfig
from .checkpoint.paths import storage_path
from .checkpoint.storage import on_disk
from .compile import CompileConfig
from .data import DataConfig
from .distributed.parallel import ParallelConfig
from .errors import UserError
from .files import expand_home, flatten, read_json, to_json
from .model import PRESETS, ModelConfig
from .optim import BATCH_SIZE, VALIDATION_SAMPLES, OptimConfig
from .run.directory import OF_ONE_RUN
from .run.tracker import TrackerConfig

log = logging.getLogger(__name__)
C = TypeVar("C")
# Maps a setting A to a setting B that overrides A, and to the value of B that means "not given".
# For example, train.epochs overrides train.steps, unless train.epochs is 0.0.
FOLLOWS_FROM = {"train.steps": ("train.epochs", 0.0), "name": ("run_dir", None)}
# Maps the type of a setting to the types of values that it accepts from JSON, TOML or a preset. A
# type that is not listed, such as int, accepts only values of the same type.
ACCEPTED: dict[Any, Any] = {float: (int, float), Path: (str, Path), tuple: (list, tuple)}


@dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    steps: int = 300
    """Total optimizer steps; raise it to train a finished run further."""
    epochs: float = 0.0
    """Passes over the training data, from which `steps` follows (0: use `steps`)."""
    global_batch_size: int = BATCH_SIZE
    """Samples per optimizer step over all ranks; fixed for the run, like the order of samples."""
    micro_batch_size: int = BATCH_SIZE
    """Samples per forward on each rank; if its share is larger, gradients are accumulated."""
    log_every: int = 10
    """Steps between log lines, which are also the lines of metrics.jsonl."""
    validate_every: int = 100
    """Steps between validations (0: only after the last step)."""
    validate_samples: int = VALIDATION_SAMPLES
    """Validation samples, the same ones each time (0: all)."""
    validate_batch_size: int = 0
    """Samples per forward on each rank in a validation (0: as in training)."""
    overfit: int = 0
    """Train only on this many batches, to test whether a new model can fit them (0: all data)."""
    seed: int = 0
    """Seed of the weights, the order of samples and dropout; fixed for the run."""
    deterministic: bool = False
    """Deterministic kernels: bit-exact resume on CUDA, slower steps."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of forward and backward; weights and optimizer stay float32 (auto: bf16 on GPUs that
    support it; fp32: matrix products in TF32 on GPUs that have it)."""
    activation_checkpointing: bool = False
    """Recompute each block in backward: less memory, about a third more compute."""
    loader_workers: int = 0
    """DataLoader workers per rank, for training data (0: read in the loop, best for data in
    memory)."""
    on_bad_step: Literal["skip", "stop"] = "skip"
    """On a non-finite loss or gradient: skip the step, or stop and name the samples (slower)."""
    max_bad_steps: int = 20
    """Stop the run after this many skipped steps in a row (0: never); checked at each log line."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0
            if name in ("steps", "global_batch_size", "micro_batch_size", "log_every"):
                least = 1
            # The comparison with inf also refuses inf and nan.
            if isinstance(value, int | float) and not least <= value < math.inf:
                raise UserError(f"--train.{name.replace('_', '-')} must be at least {least}")

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of matrix products on `device`."""
        if self.precision == "bf16":
            return torch.bfloat16
        if self.precision == "fp32" or device.type != "cuda":
            return torch.float32
        # GPUs without bf16 units emulate it, which is slower than float32.
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        return torch.float32


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps to trace. A window is `warmup` steps, then `active` steps."""

    every: int = 0
    """Steps from one traced window in training to the next (0: never)."""
    wait: int = 2
    """Steps before the window in the stage `profile`, neither recorded nor slowed down."""
    warmup: int = 2
    """Warm-up steps, not recorded (the profiler starts slowly)."""
    active: int = 3
    """Steps to trace; many steps make large files."""

    def __post_init__(self) -> None:
        if self.active < 1 or min(self.wait, self.warmup, self.every) < 0:
            raise UserError("profile: active must be >= 1, the others >= 0")


@dataclass(frozen=True)
class RunLocation:
    """The run, by name or directory."""

    name: str = "default"
    """Name of the run; the same name resumes it."""
    run_dir: Path | None = None
    """Run directory, if it is not runs/NAME."""

    @property
    def directory(self) -> Path:
        """The run directory; raises UserError if the name contains a path."""
        is_plain = self.name == Path(self.name).name and self.name.isprintable()
        # "", ".." and "~" also equal their Path.name. But "" would be the folder runs itself, ".."
        # its parent, and a folder named "~" is dangerous to remove.
        if not is_plain or self.name in ("", "..", "~"):
            raise UserError(f"--name {self.name!r} is not a plain name; give a path with --run-dir")
        directory = self.run_dir or Path("runs") / self.name
        # Raises UserError for a URL that this project cannot open.
        storage_path(directory)
        return directory


@dataclass(frozen=True)
class Config(RunLocation):
    """One training run."""

    fresh: bool = False
    """Move an old run of this name aside and start over."""
    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu, cuda, cuda:1 or mps."""
    init_from: Path | None = None
    """Weights to start from, at step 0: a run, a checkpoint, or a file or folder of weights."""
    init_strict: bool = False
    """Fail on missing or unexpected tensors in --init-from."""
    init_new: tuple[str, ...] = ()
    """Tensors or modules not to load from --init-from, such as a head of another size."""
    reset_optimizer: bool = False
    """Resume with another optimizer: drop saved state that does not match it."""
    track: bool = True
    """Log to the experiment tracker."""
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


def preset(name: str = "", kind: type[C] = Config, saved: dict[str, Any] | None = None) -> C:
    """Return the settings of a preset, applied over those `saved` with a run.

    Raises UserError for an unknown preset.
    """
    if name and name not in PRESETS and name != "default":
        raise UserError(f"--preset {name}: unknown preset; choose from {', '.join(PRESETS)}")
    # If model.py has a preset named "default", it applies to every run.
    start = override(kind(), PRESETS.get("default", {}))
    if saved:
        start = override(start, of_this_release(saved), lenient=True)
    return override(start, PRESETS.get(name, {}))


def of_this_release(saved: dict[str, Any]) -> dict[str, Any]:
    """Complete the settings of a run that an earlier release of the template saved.

    The keys of `saved` are dotted names. If they lack `optim.name`, the run is older than Muon, so
    it trains with AdamW.
    """
    # Only projects with Muon have this setting.
    if "optim.name" not in saved and hasattr(OptimConfig(), "name"):
        return {**saved, "optim.name": "adamw"}
    return saved


def load(path: Path, kind: type[C] = Config, start: C | None = None) -> C:
    """Load settings of type `kind` from a TOML file, or from a run: its folder or config.json.

    A TOML file changes the settings of `start`. A config.json sets everything, so `start` is
    ignored. The settings that belong to one run (its name, its store) are not taken from its file.
    """
    if path.is_dir():
        path = path / "config.json"
    is_toml = path.suffix == ".toml"
    changes = read_toml(path) if is_toml else read_json(path)
    # The command `train`, whose settings are of type Config itself, also accepts a TOML file for
    # the workflow's stages. It ignores the settings of the stages.
    if is_toml and kind is Config:
        changes = {n: value for n, value in changes.items() if not n.startswith("workflow.")}
    try:
        if is_toml:
            return override(start or preset("", kind), changes)
        # Start from the defaults without a preset, since presets may have changed after the run. A
        # setting that the file lacks is newer than the run, and keeps its default.
        changes = {n: value for n, value in changes.items() if n not in OF_ONE_RUN}
        changes = of_this_release(dict(flatten(changes)))
        loaded = override(kind(), changes, lenient=True)
        # If the run saves to an object store, remove the store: only that run may write to it.
        return on_disk(loaded)
    # A deeply nested file causes a RecursionError.
    except (UserError, RecursionError) as error:
        raise UserError(f"{path}: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings in a TOML file by dotted names; UserError if it cannot be read."""
    # A file may also spell a setting as the command line does: log-every.
    return {n.replace("-", "_"): value for n, value in flatten(read_json(path, tomllib.loads))}


def spec_to_json(spec: Any) -> dict[str, Any]:
    """Return the contents of spec.json; {} if reading them back would not give an equal spec."""
    # A user's own class may raise anything.
    with contextlib.suppress(Exception):
        values = to_json(spec)
        if spec_from_json(values) == spec:
            return values
    return {}


def spec_from_json(values: dict[str, Any]) -> Any:
    """Return the spec of the data from JSON; may raise anything if `values` do not fit Spec."""
    types = get_type_hints(data_module.Spec)
    fields = {name: _checked(name, value, types[name]) for name, value in values.items()}
    return data_module.Spec(**fields)


def override(config: C, changes: dict[str, Any], lenient: bool = False) -> C:
    """Change settings by dotted names ({"train.steps": 20}) or nested dictionaries, not by both.

    Raises UserError for unknown names. If `lenient`, unknown names are only logged, since other
    projects and releases have other settings.
    """
    named = {name for name, _ in flatten(changes)}
    changes = {**changes, **outweighing(named)}
    unknown: dict[str, Any] = {}
    config = _replace(config, changes, unknown)
    if unknown and lenient:
        log.info("ignored settings that this project does not have: %s", ", ".join(unknown))
    elif unknown:
        name = min(unknown)
        # If a known name counts as unknown, `_replace` has refused its value, which is "auto".
        known = [known_name for known_name, _ in flatten(to_json(config))]
        if name in known:
            raise UserError(f"{name} is {unknown[name]!r}, which only earlier releases accept")
        near = difflib.get_close_matches(name, known, 1)
        advice = f": did you mean {near[0]}?" if near else ""
        raise UserError(f"{name} is not a setting of this project{advice}")
    return config


def outweighing(named: set[str]) -> dict[str, Any]:
    """Return changes that turn off settings which would override the `named` ones.

    For example, {"train.steps"} gives {"train.epochs": 0.0}, and {"train.steps", "train.epochs"}
    gives {}.
    """
    changes: dict[str, Any] = {}
    for name, (overriding, not_given) in FOLLOWS_FROM.items():
        if name in named and overriding not in named:
            changes[overriding] = not_given
    return changes


def with_steps(config: Config, samples: int) -> Config:
    """Replace --train.epochs with --train.steps, for a training set of this many samples."""
    steps = math.ceil(config.train.epochs * samples / config.train.global_batch_size)
    return override(config, {"train.steps": steps, "train.epochs": 0.0})


def _replace(part: Any, changes: dict[str, Any], unknown: dict[str, Any], prefix: str = "") -> Any:
    """Return a changed copy of one dataclass of settings; collect unknown names in `unknown`.

    `prefix` is the dotted name of this dataclass, such as "train.".
    """
    # Group the changes by field: {"train.steps": 20, "train.seed": 1, "device": "cpu"} becomes
    # {"train": {"steps": 20, "seed": 1}, "device": "cpu"}. All changes of a dataclass are made
    # together, since it may check its settings against each other.
    by_field: dict[str, Any] = {}
    for name, value in changes.items():
        field_name, dot, rest = name.partition(".")
        section = by_field.get(field_name, {})
        if dot and isinstance(section, dict):
            by_field[field_name] = {**section, rest: value}
        else:
            by_field[field_name] = value
    types = get_type_hints(type(part))
    values: dict[str, Any] = {}
    for name, value in by_field.items():
        full_name = prefix + name
        # In earlier releases checkpoint.every could be "auto". Such a value counts as an unknown
        # setting, so that an old run still resumes.
        is_auto = full_name == "checkpoint.every" and value == "auto"
        if name not in types or is_auto:
            unknown.update(flatten({full_name: value}))
        elif not is_dataclass(types[name]):
            values[name] = _checked(full_name, value, types[name])
        elif isinstance(value, dict):
            values[name] = _replace(getattr(part, name), value, unknown, f"{full_name}.")
        else:
            raise UserError(f"{full_name} is {repr(value)[:60]}: expected settings by name")
    return replace(part, **values)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """Convert a value from JSON or TOML to the type of a setting; UserError if it does not fit."""
    if _is_too_large(name, value):
        raise UserError(f"{name} is {repr(value)[:60]}: it must be less than 2^63")
    # `int | None` and Optional[int] have different origins.
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        if _fits(value, kind):
            origin: Any = get_origin(kind) or kind
            if origin in (Path, tuple):
                # JSON and TOML have strings and lists in place of paths and tuples. `expand_home`
                # changes only a "~" at the start of a path.
                return expand_home(origin(value))
            return value
    expected = hint.__name__ if isinstance(hint, type) else str(hint).removeprefix("typing.")
    raise UserError(f"{name} is {repr(value)[:60]}: expected {expected}")


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value from JSON or TOML can be a setting of this type."""
    origin: Any = get_origin(kind) or kind
    if origin is Literal:
        # Compare the type too, since True equals 1 in Python.
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    # isinstance(True, int) is true, but a setting that is a number does not accept a bool.
    has_bool = isinstance(value, bool)
    wants_bool = origin is bool
    if has_bool or wants_bool:
        return has_bool and wants_bool
    return isinstance(value, ACCEPTED.get(origin, origin))


def _is_too_large(name: str, value: Any) -> bool:
    """Return whether a number is too large for a signed 64-bit integer."""
    # Only the seed may be larger, since it is hashed.
    if name == "train.seed" or not isinstance(value, int | float):
        return False
    # inf is not too large here; the setting itself may refuse it.
    return 2**63 <= abs(value) < math.inf
