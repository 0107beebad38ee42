"""All settings in one typed tree. Each part is declared where it is used."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from .checkpoint.remote import located
from .checkpoint.writer import CheckpointConfig
from .compile import CompileConfig
from .data import DataConfig
from .distributed.parallel import ParallelConfig
from .errors import UserError
from .model import PRESETS, ModelConfig
from .optim import OptimConfig
from .profiler import ProfileConfig
from .run.tracker import TrackerConfig
from .settings import from_json, on_disk, override


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 300
    """Optimizer steps in all; raise it to train a finished run further."""
    global_batch_size: int = 32
    """Samples per optimizer step over all ranks. Fixes the order of samples: part of the run."""
    micro_batch_size: int = 32
    """The most samples that one rank puts through at once; accumulation follows from it."""
    log_every: int = 10
    validate_every: int = 100
    """Steps between validations (0: never)."""
    validate_samples: int = 0
    """Validate on this many samples, the same ones each time (0: all)."""
    seed: int = 0
    deterministic: bool = False
    """Only deterministic kernels: on CUDA a resume is then exact to the bit, and steps slower."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Of matrix products; weights and optimizer stay float32. auto: bf16 where CUDA has it."""
    activation_checkpointing: bool = False
    """Keep only each block's input for backward: less memory, a third more compute."""
    loader_workers: int = 0
    """Processes that read data ahead (0: read in the loop, best for data in memory)."""
    on_bad_step: Literal["skip", "stop"] = "skip"
    """A step with a non-finite loss or gradient is skipped, or else ends the run with the ids of
    its samples that are to blame; to "stop", the host waits for the device at each step."""
    max_bad_steps: int = 20
    """So many steps skipped in a row end the run (0: never)."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        for name in ("steps", "global_batch_size", "micro_batch_size", "log_every"):
            if getattr(self, name) < 1:
                raise UserError(f"--train.{name.replace('_', '-')} must be at least 1")
        for name in ("validate_every", "validate_samples", "loader_workers", "max_bad_steps"):
            if getattr(self, name) < 0:
                raise UserError(f"--train.{name.replace('_', '-')} must not be negative")
        if not 0 <= self.seed < 2**63:
            raise UserError("--train.seed must be in [0, 2^63)")

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of matrix products on `device`."""
        if self.precision == "auto":
            fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
            return torch.bfloat16 if fast else torch.float32
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.precision]


@dataclass(frozen=True)
class Place:
    """Which run."""

    name: str = "default"
    """Starting a run of the same name again resumes it."""
    run_dir: Path | None = None
    """Where the run lives (default: runs/NAME)."""

    @property
    def directory(self) -> Path:
        """The run directory; UserError for a name that leads elsewhere."""
        if self.name != Path(self.name).name:
            raise UserError(f"--name {self.name}: a plain name is wanted; for a place, --run-dir")
        return self.run_dir or Path("runs") / self.name


@dataclass(frozen=True)
class Config(Place):
    """One training run."""

    fresh: bool = False
    """Set the old run of this name aside and start over."""
    init_from: Path | None = None
    """Start at step 0 from the weights of this run, checkpoint, .pt or .safetensors file."""
    init_strict: bool = False
    """Refuse weights to start from that lack a tensor or have one too many."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1, mps."""
    track: bool = True
    """Hand the log to the tracker, too."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        """Check what only the whole can tell (UserError)."""
        if self.fresh and (url := self.checkpoint.url):
            raise UserError(f"--fresh leaves {url} as it is: give another --checkpoint.url")
        if self.fresh and self.init_from:
            if self.init_from.resolve().is_relative_to(self.directory.resolve()):
                raise UserError("--fresh would move what --init-from reads: take another --name")
            if not located(self.init_from).exists():
                raise UserError(f"--init-from {self.init_from}: there is nothing there")


def preset(name: str = "default") -> Config:
    """The settings of a preset; UserError lists the presets when there is none of that name."""
    if name not in PRESETS:
        raise UserError(f"--preset {name}: there is none of that name; try {', '.join(PRESETS)}")
    return override(override(Config(), PRESETS["default"]), PRESETS[name])


def load(path: Path) -> Config:
    """The settings of a saved config.json, without what belongs to that run alone."""
    of_that_run = ("name", "run_dir", "fresh", "init_from", "init_strict", "workflow")
    # A run of another answer has other settings there, which change nothing of what is computed.
    lenient = ("parallel", "checkpoint", "tracker")
    return on_disk(from_json(Config(), path, leave_out=of_that_run, lenient=lenient))
