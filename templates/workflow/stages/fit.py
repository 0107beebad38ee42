"""Memory that a rank needs on a GPU, and its highest possible speed, computed without a GPU.

The project's own setup and step run as one rank of many on fake tensors, which have shapes but no
data. A dispatch mode sees every operator, and every tensor from its creation until it is freed.
The speed is a roofline bound (Williams et al., 2009): an operator takes as long as its FLOPs at the
GPU's peak, or as the bytes that it reads and writes at the GPU's bandwidth. For compiled code only
the matrix products count.
"""

import argparse
import contextlib
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from .. import train as loop
from ..checkpoint.tensors import create_optimizer_state
from ..config import Config, override
from ..distributed import World, parallel
from ..errors import UserError
from ..run.hardware import PEAK_BF16_TFLOPS, in_units
from .meter import Meter
from .processes import named, refusal
from .stage import PACKAGE

GPUS_PER_MACHINE = 8
# The rest of a GPU's memory is left for what is not counted.
USABLE_MEMORY = 0.9


@dataclass(frozen=True)
class Gpu:
    """Memory and bandwidth of a GPU."""

    gigabytes: float
    terabytes_per_second: float


# From the same data sheets as PEAK_BF16_TFLOPS.
GPUS = {
    "B200": Gpu(180, 8.0),
    "GH200": Gpu(96, 4.0),
    "H200": Gpu(141, 4.8),
    "H100 PCIe": Gpu(80, 2.0),
    "H100 NVL": Gpu(94, 3.9),
    "H100": Gpu(80, 3.35),
    "L40S": Gpu(48, 0.86),
    "L40": Gpu(48, 0.86),
    "L4": Gpu(24, 0.3),
    "A100": Gpu(80, 2.0),
    "A10G": Gpu(24, 0.6),
    "A10": Gpu(24, 0.6),
    "A6000": Gpu(48, 0.77),
    "RTX 4090": Gpu(24, 1.0),
    "MI300X": Gpu(192, 5.3),
}

# The functions that run on a CPU, before `one_rank` replaces them in torch.nn.functional.
CPU_ATTENTION = F.scaled_dot_product_attention
CPU_DROPOUT = torch.native_dropout


def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Compute attention by the flash kernel, where the shapes allow that."""
    if query.ndim != 4 or query.shape[-1] != value.shape[-1]:
        return CPU_ATTENTION(query, key, value, *rest, **options)
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]


def rms_norm(
    input: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Normalise by a layer norm, which keeps as much for backward as a GPU's one RMSNorm kernel."""
    return F.layer_norm(input, shape, weight)


def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **options: Any
) -> Tensor:
    """Drop by the kernel that keeps a mask of bool for backward."""
    if not p or not training:
        return input
    dropped, _ = CPU_DROPOUT(input, p, True)
    return dropped


def in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function as CUDA's autocast runs it: in float32, unlike a CPU's autocast."""

    def cast_and_call(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            x = x.float()
        return function(x, *rest, **options)

    return cast_and_call


# Functions of torch.nn.functional that keep other tensors on a GPU than on a CPU.
ON_GPU: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": attention,
    "rms_norm": rms_norm,
    "dropout": dropout,
    "group_norm": in_float32(F.group_norm),
    "layer_norm": in_float32(F.layer_norm),
    "softmax": in_float32(F.softmax),
}


@dataclass(frozen=True)
class FitConfig(Config):
    """A training run, and its GPUs."""

    ranks: int = 0
    """Processes, each with a GPU (0: 8, or 1 if the project runs in one process)."""
    device: str = "auto"
    """Kind of GPU (auto: H100)."""
    device_memory: float = 0.0
    """Memory of each GPU in GB (0: the usual one of its kind)."""


def build_at_once(make: Callable[[], nn.Module], world: World) -> nn.Module:
    """Build the model on this rank, whatever its rank: fake weights take no memory."""
    return make()


def accept_step(sums: Tensor, norm: Tensor, ranks: int, clip: float) -> tuple[float, Tensor, bool]:
    """Judge a step as good: fake tensors have no values to look at."""
    return 1.0, norm, False


def stay(module: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
    """Leave a module on its device."""
    return module


def do_nothing(*arguments: Any) -> None:
    """Stand in for what ranks agree on: there is only one."""


def patch_loop(stack: contextlib.ExitStack, config: FitConfig, meter: Meter) -> None:
    """Replace, until the stack closes, what of the loop cannot run on fake tensors."""
    data = loop.build_datasets(config)
    resize = torch.UntypedStorage.resize_

    def prepared_datasets(config: Config) -> Any:
        return data

    def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        meter.hold(storage)
        return result

    def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        stack.enter_context(patch.object(owner, name, replacement))

    # The datasets are built above, before tensors are fake: their values are needed.
    replace(loop, "build_datasets", prepared_datasets)
    replace(loop, "judge_step", accept_step)
    # The loop's names for traces tell the meter in which phase it is.
    replace(loop, "annotated", meter.annotated)
    replace(parallel, "build", build_at_once)
    replace(parallel, "require_same", do_nothing)
    replace(parallel, "agree_on_buffers", do_nothing)
    # FSDP frees gathered weights by this method, without an operator that the meter could see.
    replace(torch.UntypedStorage, "resize_", resize_and_count)
    replace(nn.Module, "to", stay)
    for name, replacement in ON_GPU.items():
        replace(F, name, replacement)


def join_fake_ranks(stack: contextlib.ExitStack, config: FitConfig, world: World) -> None:
    """Start a process group of FSDP whose collectives return at once, until the stack closes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.ranks)
    stack.callback(dist.destroy_process_group)
    # Only the parallel.py of FSDP has this function. The mesh is built here, before tensors are
    # fake, since it reads the values of a tensor of ranks.
    mesh = vars(parallel)["build_mesh"](config.parallel, world)

    def prepared_mesh(*arguments: Any) -> Any:
        return mesh

    stack.enter_context(patch.object(parallel, "build_mesh", prepared_mesh))


@contextlib.contextmanager
def one_rank(config: FitConfig, meter: Meter) -> Iterator[loop.State]:
    """Yield the state of a rank. In the block tensors are fake, and ranks agree on nothing."""
    sharded = parallel.SHARDED and config.ranks > 1
    size = config.ranks if sharded else 1
    world = World(0, size, torch.device("cpu"), distributed=sharded)
    with contextlib.ExitStack() as stack:
        patch_loop(stack, config, meter)
        if sharded:
            join_fake_ranks(stack, config, world)
        stack.enter_context(fake_tensor.FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        state = loop.setup(config, world)
        create_optimizer_state(state.optimizer)
        if config.ranks > world.size:
            # Under DDP gradients are never freed: they are views of its buckets.
            stack.enter_context(patch.object(state.optimizer, "zero_grad"))
            for group in state.optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad = torch.zeros_like(weight)
        yield state


def like_a_gpu(config: FitConfig, ranks: int) -> FitConfig:
    """Return the settings with which a CPU follows the step of a GPU."""
    changes = {"ranks": ranks, "compile.mode": "none", "device": "cpu"}
    if config.train.precision == "auto":
        changes["train.precision"] = "bf16"
    return override(config, changes)


def foretold(config: Config, ranks: int) -> int:
    """Return the peak bytes of a rank's tensors, with the micro-batches of these settings."""
    # A stage's settings have more fields, which `fit` does not know.
    training_settings = {field.name: getattr(config, field.name) for field in fields(Config)}
    fit_config = like_a_gpu(FitConfig(**training_settings), ranks)
    samples = math.ceil(config.train.global_batch_size / ranks)
    meter = Meter(flops=1.0, bandwidth=1.0)
    for _ in measure(fit_config, meter, [min(config.train.micro_batch_size, samples)]):
        pass
    return meter.peak


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 ... and `most`."""
    sizes = []
    size = 1
    while size < most:
        sizes.append(size)
        size = 2 * size
    return [*sizes, most]


def read_batch(state: loop.State) -> Any:
    """Read the first micro-batch; return it as fake tensors."""
    # The real batch must be freed at once, else the meter would count it too.
    with _disable_current_modes():
        batch = state.loader.source[0, state.plan[0]]
    return tree_map_only(Tensor, torch.clone, batch)


def measure(
    config: FitConfig, meter: Meter, sizes: Sequence[int] = ()
) -> Iterator[tuple[int, loop.State]]:
    """Count a step for each micro-batch size; yield the size and the state after the step.

    Without `sizes`: 1, 2, 4 ... samples, up to all samples of a rank in one micro-batch.
    """
    samples = math.ceil(config.train.global_batch_size / config.ranks)
    sizes = sizes or powers_of_two(samples)
    # Only FSDP has this setting.
    meter.reduces_each_micro_batch = getattr(config.parallel, "reduce_each", False)
    with one_rank(config, meter) as state:
        if any(isinstance(module, _BatchNorm) for module in state.model.modules()):
            # Batch statistics need two samples. With one sample a rank there is no choice.
            sizes = [size for size in sizes if size > 1 or samples == 1]
        for size in sizes:
            # The second micro-batch adds to the gradients of the first. All later ones are like
            # the second, so they are counted without running them.
            micro_batches = min(2, math.ceil(samples / size))
            state.plan = [loop.Share(slice(0, size), 1.0)] * micro_batches
            batch = read_batch(state)
            meter.begin(repeats=samples / size / micro_batches)
            loop.train_step(state, [batch] * micro_batches)
            yield size, state


def describe_memory(meter: Meter, state: loop.State) -> str:
    """Say what takes the memory at the peak, and how much a rank sends."""
    weights = sum(parallel.local_part(weight).nbytes for weight in state.model.parameters())
    optimizer = 0
    for values in state.optimizer.state.values():
        for value in values.values():
            if torch.is_tensor(value):
                optimizer += parallel.local_part(value).nbytes
    rest = meter.peak - weights - optimizer
    text = f"weights {in_units(weights)}, optimizer {in_units(optimizer)}, "
    text += f"all else {in_units(rest)}; reached in {meter.peak_phase}"
    return f"{text}\neach rank sends {in_units(sent_by(meter, state))} in a step"


def sent_by(meter: Meter, state: loop.State) -> float:
    """Return the bytes that a rank sends in a step."""
    if state.world.size > 1:
        sent = meter.cost["sent"]
    else:
        # DDP is not run here: it all-reduces the gradients, which sends them twice.
        sent = 2 * sum(p.nbytes for p in state.model.parameters() if p.requires_grad)
    # In a ring a rank sends all chunks but one.
    ranks = cast(FitConfig, state.config).ranks
    return sent * (1 - 1 / ranks)


@dataclass(frozen=True)
class Row:
    """A line of the table: a micro-batch size, with or without recomputation, and its step."""

    size: int
    recompute: bool
    peak: int
    fits: bool
    eager: float
    """Samples a second of eager code, at most."""
    compiled: float
    """Samples a second of compiled code, at most."""
    memory: str
    """What takes the memory, as `describe_memory` says."""


def preference(row: Row) -> tuple[bool, float, float, int, bool]:
    """Return a key by which the best row is the largest: it fits, and it is the fastest."""
    return row.fits, row.eager, row.compiled, row.size, row.recompute


@dataclass(frozen=True)
class Target:
    """The GPU to fit into, in bytes and in units of a second."""

    name: str
    memory: float
    flops: float
    bandwidth: float


def target_of(config: FitConfig) -> Target:
    """Return the GPU that `--device` names; UserError if it is unknown."""
    names = {"auto": "H100", "cuda": "H100", "cpu": "H100"}
    for gpu in GPUS:
        names[gpu.lower()] = gpu
    name = names.get(config.device.lower())
    if not name:
        raise UserError(f"--device {config.device}: choose from {', '.join(GPUS)}")
    return Target(
        name=name,
        memory=1e9 * (config.device_memory or GPUS[name].gigabytes),
        flops=1e12 * PEAK_BF16_TFLOPS[name],
        bandwidth=1e12 * GPUS[name].terabytes_per_second,
    )


def choose_ranks(config: FitConfig) -> int:
    """Return the number of ranks; UserError if they cannot share a global batch."""
    batch = config.train.global_batch_size
    ranks = config.ranks
    if not ranks:
        ranks = 1 if refusal(config, GPUS_PER_MACHINE) else min(GPUS_PER_MACHINE, batch)
    whole_machines = ranks <= GPUS_PER_MACHINE or ranks % GPUS_PER_MACHINE == 0
    if not 1 <= ranks <= batch or not whole_machines:
        limits = f"1 to {batch} (a global batch), beyond {GPUS_PER_MACHINE} in eights"
        raise UserError(f"--ranks {ranks}: {limits}")
    parallel.check_ranks(config.parallel, ranks)
    return ranks


def print_rows(config: FitConfig, target: Target) -> list[Row]:
    """Count a step for each micro-batch size, and print a row of the table for each."""
    batch = config.train.global_batch_size
    rows: list[Row] = []
    flops_per_sample = 0.0
    for recompute in (False, True):
        meter = Meter(target.flops, target.bandwidth)
        changed = override(config, {"train.activation_checkpointing": recompute})
        for size, state in measure(changed, meter):
            # MFU leaves out the FLOPs of recomputation, so those of the first row serve for all.
            flops_per_sample = flops_per_sample or meter.cost["flops"] / batch
            row = Row(
                size=size,
                recompute=recompute,
                peak=meter.peak,
                fits=meter.peak <= USABLE_MEMORY * target.memory,
                eager=batch / meter.cost["eager"],
                compiled=batch / meter.cost["compiled"],
                memory=describe_memory(meter, state),
            )
            rows.append(row)
            eager_mfu = flops_per_sample * row.eager / target.flops
            compiled_mfu = flops_per_sample * row.compiled / target.flops
            eager = f"{row.eager:12,.1f} {eager_mfu:4.0%}"
            compiled = f"{row.compiled:12,.1f} {compiled_mfu:4.0%}"
            answer = "yes" if recompute else "no"
            verdict = "fits    " if row.fits else "too much"
            memory = f"{in_units(row.peak):>7} {verdict}"
            print(f"{size:11}  {answer:9}  {memory} {eager} {compiled}", flush=True)
    return rows


def training_command(row: Row, ranks: int, arguments: list[str]) -> str:
    """Return the command that trains with what fits; `arguments` are those of `fit`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ranks", "--device", "--device-memory", dest="of_fit")
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
    """Print what fits, and the command to type; return 1 if nothing fits."""
    target = target_of(config)
    ranks = choose_ranks(config)
    memory = f"{in_units(target.memory)} each"
    batch = config.train.global_batch_size
    print(f"{named(ranks, 'rank')}, {target.name} with {memory}, batches of {batch}")
    print("micro-batch  recompute  memory              samples/s, MFU (roofline): eager, compiled")
    try:
        rows = print_rows(like_a_gpu(config, ranks), target)
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
        # The host would have to wait for a GPU there, in every step.
        raise UserError("a step reads the value of a tensor: `pytest -k reads_no_value`") from None
    best = max(rows, key=preference)
    print(f"the peak with micro-batches of {best.size}: {best.memory}")
    print("not counted: fragments, CUDA's context, buffers of cuBLAS, cuDNN, NCCL, FlexAttention;")
    print("what an optimizer sends under DDP, as Muon does")
    if not best.fits:
        print("nothing fits: take more ranks and FSDP (parallelism=fsdp), or a smaller model")
        return 1
    print(f"to train: {training_command(best, ranks, arguments)}")
    return 0
