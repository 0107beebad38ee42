"""Estimate the memory that a rank needs on a GPU, and its speed, without a GPU.

The project's own setup and step run as one rank of many on fake tensors (fake_tensors.py). A
dispatch mode sees every operator, and every tensor from its creation until it is freed (meter.py).
The speed comes from a roofline model (Williams et al., 2009): an operator takes the time for its
FLOPs or for the bytes that it reads and writes, whichever is longer, at rates that real kernels
reach. Communication overlaps with computation, so it counts only if it takes longer than all
computation.
"""

import argparse
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch._subclasses import fake_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..config import Config, override
from ..distributed import parallel
from ..errors import UserError
from ..run.hardware import PEAK_BF16_TFLOPS, in_units
from ..sampling import MicroBatch
from ..train import State, train_step
from .fake_tensors import one_rank, read_batch
from .meter import Meter
from .processes import named, refusal
from .stage import PACKAGE

GPUS_PER_MACHINE = 8
# The fraction of a GPU's memory that counted tensors may use; `fit` does not count everything.
USABLE_MEMORY = 0.9
# Bandwidth to other machines: one 400 Gb/s port per GPU, as is usual for H100 machines.
NETWORK_GIGABYTES_PER_SECOND = 50.0


@dataclass(frozen=True)
class Gpu:
    """Memory and bandwidth of a GPU."""

    gigabytes: float
    terabytes_per_second: float
    link_gigabytes_per_second: float
    """Bandwidth to other GPUs of the machine in one direction: NVLink, Infinity Fabric or PCIe."""


# From the same data sheets as PEAK_BF16_TFLOPS.
GPUS = {
    "B200": Gpu(180, 8.0, 900),
    "GH200": Gpu(96, 4.0, 450),
    "H200": Gpu(141, 4.8, 450),
    "H100 PCIe": Gpu(80, 2.0, 64),
    "H100 NVL": Gpu(94, 3.9, 300),
    "H100": Gpu(80, 3.35, 450),
    "L40S": Gpu(48, 0.86, 32),
    "L40": Gpu(48, 0.86, 32),
    "L4": Gpu(24, 0.3, 32),
    "A100": Gpu(80, 2.0, 300),
    "A10G": Gpu(24, 0.6, 32),
    "A10": Gpu(24, 0.6, 32),
    "A6000": Gpu(48, 0.77, 32),
    "RTX 4090": Gpu(24, 1.0, 32),
    "MI300X": Gpu(192, 5.3, 448),
}


@dataclass(frozen=True)
class FitConfig(Config):
    """Settings of a training run, and its GPUs."""

    ranks: int = 0
    """Number of ranks, each with one GPU (0: 8, or 1 with parallelism=single)."""
    device: str = "auto"
    """GPU model (auto: H100)."""
    device_memory: float = 0.0
    """Memory of each GPU in GB (0: the usual size of this GPU model)."""


def like_a_gpu(config: FitConfig, ranks: int) -> FitConfig:
    """Return settings with which a CPU simulates the step of a GPU."""
    changes: dict[str, Any] = {"ranks": ranks, "compile.mode": "none", "device": "cpu"}
    # With --parallel.replicate 0 (HSDP), each machine has a copy of the model. This process cannot
    # count the machines, so derive their number from the number of ranks.
    if getattr(config.parallel, "replicate", 1) == 0:
        changes["parallel.replicate"] = max(1, ranks // GPUS_PER_MACHINE)
    # On a CPU, "auto" would choose float32.
    if config.train.precision == "auto":
        changes["train.precision"] = "bf16"
    return override(config, changes)


def foretold(config: Config, ranks: int) -> int:
    """Predict the peak bytes of a rank's tensors with the micro-batch size of these settings."""
    # `config` may be a StageConfig, which has fields that FitConfig does not have.
    training_settings = {field.name: getattr(config, field.name) for field in fields(Config)}
    fit_config = like_a_gpu(FitConfig(**training_settings), ranks)
    samples_per_rank = math.ceil(config.train.global_batch_size / ranks)
    micro_batch_size = min(config.train.micro_batch_size, samples_per_rank)
    # The peak does not depend on these rates.
    meter = Meter(flops=1.0, bandwidth=1.0)
    # `measure` is a generator, which runs the step when the loop asks for its result.
    for _ in measure(fit_config, meter, [micro_batch_size]):
        pass
    return meter.peak


def powers_of_two(most: int) -> list[int]:
    """Return the powers of two below `most`, followed by `most`: for 6, these are 1, 2, 4 and 6."""
    sizes = []
    size = 1
    while size < most:
        sizes.append(size)
        size = 2 * size
    return [*sizes, most]


def measure(
    config: FitConfig, meter: Meter, sizes: Sequence[int] = ()
) -> Iterator[tuple[int, State]]:
    """Run a step for each micro-batch size; yield the size and the state after the step.

    When a size is yielded, `meter` has the costs of its step. The default `sizes` are 1, 2, 4 ...
    up to all samples of a rank in one micro-batch.
    """
    samples_per_rank = math.ceil(config.train.global_batch_size / config.ranks)
    if not sizes:
        sizes = powers_of_two(samples_per_rank)
    meter.reduces_each_micro_batch = parallel.reduces_each_micro_batch(config.parallel)
    with one_rank(config, config.ranks, meter) as state:
        if parallel.SHARDED:
            # When an operator is first used, DTensor also runs it on full-size tensors to find the
            # shape of its result. To leave this out of the counts, take a step before counting.
            state.plan = [MicroBatch(slice(0, sizes[-1]), 1.0)]
            meter.begin(repeats=1.0)
            train_step(state, [read_batch(state)])
        batch_norm = any(isinstance(module, _BatchNorm) for module in state.model.modules())
        for size in sizes:
            # Batch normalization may fail on a single sample. So skip size 1, unless it is the only
            # size.
            if batch_norm and size == 1 and len(sizes) > 1:
                continue
            # 10 samples in micro-batches of 4 are 2.5 micro-batches: the last one is smaller.
            micro_batches = samples_per_rank / size
            # Run at most two micro-batches: the second adds its gradients to those of the first,
            # and later ones would do the same. `repeats` scales the counts to all micro-batches.
            count = min(2, math.ceil(micro_batches))
            state.plan = [MicroBatch(slice(0, size), 1.0)] * count
            batch = read_batch(state)
            meter.begin(repeats=micro_batches / count)
            train_step(state, [batch] * count)
            yield size, state


def describe_memory(meter: Meter, state: State) -> str:
    """Describe what a rank's memory holds at the peak, and how much the rank sends."""
    weights = sum(parallel.local_part(weight).nbytes for weight in state.model.parameters())
    optimizer = 0
    for values in state.optimizer.state.values():
        for value in values.values():
            if torch.is_tensor(value):
                optimizer += parallel.local_part(value).nbytes
    rest = meter.peak - weights - optimizer
    text = f"weights {in_units(weights)}, optimizer {in_units(optimizer)}, "
    text += f"everything else {in_units(rest)}; reached in {meter.peak_phase}"
    return f"{text}\neach rank sends {in_units(sent_by(meter, state))} per step"


def sent_by(meter: Meter, state: State) -> float:
    """Return the bytes that a rank sends in a step."""
    if state.world.size > 1:
        sent = meter.cost["sent"]
    else:
        # DDP itself is not run here. It would all-reduce the gradients, which sends them twice.
        sent = 2 * sum(p.nbytes for p in state.model.parameters() if p.requires_grad)
    # In a ring of n ranks, the data is divided into n chunks, and a rank sends all except one.
    ranks = cast(FitConfig, state.config).ranks
    return sent * (1 - 1 / ranks)


@dataclass(frozen=True)
class Pace:
    """The expected speed of a step, eager or compiled."""

    samples_per_second: float
    bound: str
    """What limits the speed: products, memory, kernels (launches) or link."""


def pace_of(seconds: dict[str, float], link: float, batch: int) -> Pace:
    """Return the speed of a step of `batch` samples.

    `seconds` are the seconds of its computation, such as {"products": 0.2, "memory": 0.1}. The keys
    name what limits the speed. `link` is the seconds of its communication.
    """
    computing = sum(seconds.values())
    if link > computing:
        return Pace(batch / link, "link")
    return Pace(batch / computing, max(seconds, key=seconds.__getitem__))


@dataclass(frozen=True)
class Row:
    """A row of the table: a micro-batch size, with or without recomputation."""

    size: int
    recompute: bool
    peak: int
    fits: bool
    eager: Pace
    compiled: Pace
    memory: str
    """The text of `describe_memory`."""


def preference(row: Row) -> tuple[bool, float, float, int, bool]:
    """Return a sort key that is largest for the best row: the fastest one that fits."""
    eager = row.eager.samples_per_second
    # If two rows are otherwise equal, the one without recomputation is better.
    return row.fits, eager, row.compiled.samples_per_second, row.size, not row.recompute


@dataclass(frozen=True)
class Target:
    """The GPU to fit into: memory in bytes, FLOP/s, and bandwidths in bytes/s."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float


def target_of(config: FitConfig, ranks: int = 1) -> Target:
    """Return the GPU that `--device` names; UserError if it is unknown.

    If there are more `ranks` than GPUs in a machine, the link is at most as fast as the network.
    """
    # `train` accepts these devices, but they do not name a GPU model. So take the default.
    names = {"auto": "H100", "cuda": "H100", "cpu": "H100"}
    for gpu in GPUS:
        names[gpu.lower()] = gpu
    name = names.get(config.device.lower())
    if not name:
        raise UserError(f"--device {config.device}: choose from {', '.join(GPUS)}")
    link = GPUS[name].link_gigabytes_per_second
    if ranks > GPUS_PER_MACHINE:
        link = min(link, NETWORK_GIGABYTES_PER_SECOND)
    return Target(
        name=name,
        memory=1e9 * (config.device_memory or GPUS[name].gigabytes),
        flops=1e12 * PEAK_BF16_TFLOPS[name],
        bandwidth=1e12 * GPUS[name].terabytes_per_second,
        link=1e9 * link,
    )


def choose_ranks(config: FitConfig) -> int:
    """Return the number of ranks; UserError if it does not fit the batch, machines or settings."""
    batch = config.train.global_batch_size
    ranks = config.ranks
    if ranks == 0:
        # By default, use one machine, or one rank if the settings allow only that.
        ranks = min(GPUS_PER_MACHINE, batch)
        if refusal(config, ranks) and not refusal(config, 1):
            ranks = 1
    whole_machines = ranks <= GPUS_PER_MACHINE or ranks % GPUS_PER_MACHINE == 0
    if not 1 <= ranks <= batch or not whole_machines:
        limits = f"1 to {batch} (the global batch size)"
        multiple = f"a multiple of {GPUS_PER_MACHINE} above {GPUS_PER_MACHINE}"
        raise UserError(f"--ranks {ranks}: choose {limits}, and {multiple}")
    parallel.check_ranks(config.parallel, ranks)
    return ranks


def row_of(meter: Meter, state: State, target: Target, size: int) -> Row:
    """Return the row for the step that the meter has counted."""
    settings = state.config.train
    # Seconds of the step's computation, by what limits them.
    products = meter.cost["products"]
    eager = {
        "products": products,
        "memory": meter.cost["memory"],
        "kernels": meter.cost["kernels"],
    }
    compiled = {"products": products, "memory": meter.cost["fused"]}
    link_seconds = sent_by(meter, state) / target.link
    return Row(
        size=size,
        recompute=settings.activation_checkpointing,
        peak=meter.peak,
        fits=meter.peak <= USABLE_MEMORY * target.memory,
        eager=pace_of(eager, link_seconds, settings.global_batch_size),
        compiled=pace_of(compiled, link_seconds, settings.global_batch_size),
        memory=describe_memory(meter, state),
    )


def print_rows(config: FitConfig, target: Target) -> list[Row]:
    """Count a step for each micro-batch size, and print a row of the table for each."""
    rows: list[Row] = []
    for recompute in (False, True):
        meter = Meter(target.flops, target.bandwidth)
        changed = override(config, {"train.activation_checkpointing": recompute})
        for size, state in measure(changed, meter):
            row = row_of(meter, state, target, size)
            rows.append(row)
            print_row(row)
    return rows


def print_row(row: Row) -> None:
    """Print a row of the table."""
    recompute = "yes" if row.recompute else "no"
    verdict = "fits    " if row.fits else "too much"
    memory = f"{in_units(row.peak):>7} {verdict}"
    eager = f"{row.eager.samples_per_second:10,.1f} {row.eager.bound:8}"
    compiled = f"{row.compiled.samples_per_second:10,.1f} {row.compiled.bound}"
    print(f"{row.size:11}  {recompute:9}  {memory} {eager} {compiled}", flush=True)


def training_command(row: Row, ranks: int, arguments: list[str]) -> str:
    """Return the command that trains with the best row; `arguments` are those of `fit`."""
    # The parser removes options that only `fit` uses, and options that are set below. Users may
    # also write an option with underscores after the leading dashes, such as --device_memory.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--ranks", "--device", "--device-memory", "--train.micro-batch-size"):
        spelling = option.replace("-", "_").replace("__", "--", 1)
        parser.add_argument(option, spelling)
    for option in ("--train.activation-checkpointing", "--train.no-activation-checkpointing"):
        spelling = option.replace("-", "_").replace("__", "--", 1)
        parser.add_argument(option, spelling, action="store_true")
    _, words = parser.parse_known_args(arguments)
    words.append(f"--train.micro-batch-size={row.size}")
    negation = "" if row.recompute else "no-"
    words.append(f"--train.{negation}activation-checkpointing")
    start = f"python -m {PACKAGE}"
    if ranks > 1:
        start = f"./launch.sh -n {min(ranks, GPUS_PER_MACHINE)}"
    if ranks > GPUS_PER_MACHINE:
        nodes = ranks // GPUS_PER_MACHINE
        start = f"NNODES={nodes} RDZV_ENDPOINT=FIRST-MACHINE:29500 {start}"
    return f"{start} train {shlex.join(words)}"


def fit(config: FitConfig, arguments: list[str]) -> int:
    """Print the table and the command to train; return 1 if nothing fits."""
    ranks = choose_ranks(config)
    target = target_of(config, ranks)
    memory = f"{in_units(target.memory)} each"
    batch = config.train.global_batch_size
    print(f"{named(ranks, 'rank')}, {target.name} with {memory}, batches of {batch}")
    print("                                            expected samples/s, limited by")
    print("micro-batch  recompute  memory                eager               compiled")
    try:
        rows = print_rows(like_a_gpu(config, ranks), target)
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
        # A step that reads a value, such as loss.item(), cannot run on fake tensors. In training,
        # the host would wait for the GPU there in every step.
        raise UserError(
            "a step reads the value of a tensor, which has no value here: run "
            "`pytest -k reads_no_value` to find the line"
        ) from None
    best = max(rows, key=preference)
    if not best.fits:
        # No row fits, so describe the one that needs the least memory.
        best = min(rows, key=lambda row: row.peak)
    print(f"peak with micro-batches of {best.size}: {best.memory}")
    print("not counted: fragmentation, CUDA's context, buffers of cuBLAS, cuDNN, NCCL and")
    print("FlexAttention, and communication of an optimizer under DDP (Muon)")
    if not best.fits:
        ways = "use more ranks with FSDP (parallelism=fsdp), or a smaller model"
        if parallel.SHARDED:
            ways = "use more ranks (--ranks), or a smaller model"
        print(f"nothing fits: {ways}")
        return 1
    print(f"to train: {training_command(best, ranks, arguments)}")
    return 0
