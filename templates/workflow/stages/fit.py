"""How much memory a rank needs on a GPU, and how fast it can be at most: before there is a GPU.

The project's own setup and step run as one rank of many, on fake tensors: they have shapes, and no
data. A mode sees each operator, and each tensor from its birth to its end. The bound is a roofline
(Williams et al., 2009): an operator takes as long as its FLOPs at the peak of the GPU, or as the
bytes that it reads and writes at its bandwidth. Compiled code costs its matrix products only.
"""

import argparse
import contextlib
import re
import shlex
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from .. import train as loop
from ..checkpoint.tensors import create_optimizer_state
from ..config import Config, override
from ..distributed import World, parallel
from ..errors import UserError
from ..run.hardware import PEAK_BF16_TFLOPS, in_units
from .processes import named, refusal
from .stage import PACKAGE

# Memory in GB and bandwidth in TB/s, from the same data sheets as PEAK_BF16_TFLOPS.
# fmt: off
GPUS = {
    "B200": (180, 8.0), "GH200": (96, 4.0), "H200": (141, 4.8), "H100 PCIe": (80, 2.0),
    "H100 NVL": (94, 3.9), "H100": (80, 3.35), "L40S": (48, 0.86), "L40": (48, 0.86),
    "L4": (24, 0.3), "A100": (80, 2.0), "A10G": (24, 0.6), "A10": (24, 0.6), "A6000": (48, 0.77),
    "RTX 4090": (24, 1.0), "MI300X": (192, 5.3),
}
# fmt: on
EACH, ROOM = 8, 0.9  # GPUs of a machine; of the memory: the rest is for what is not counted


def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Attention by the flash kernel, where its form allows that."""
    if query.ndim != 4 or query.shape[-1] != value.shape[-1]:
        return ATTENTION(query, key, value, *rest, **named)
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]


def in_float(function: Any) -> Any:
    """A function that works in float32 under CUDA's autocast, but not under a CPU's."""
    low = torch.is_autocast_enabled
    return lambda x, *rest, **named: function(x.float() if low("cpu") else x, *rest, **named)


ATTENTION, DROP = F.scaled_dot_product_attention, torch.native_dropout
# What a GPU does otherwise than a CPU: one kernel in place of several, masks of bool, other dtypes.
# RMSNorm is replaced by a norm that keeps as much for backward as its one kernel.
ON_GPU: dict[str, Any] = {
    "scaled_dot_product_attention": attention,
    "rms_norm": lambda input, shape, weight=None, eps=None: F.layer_norm(input, shape, weight),
    "dropout": lambda input, p=0.5, training=True, *_, **__: (
        DROP(input, p, True)[0] if p and training else input
    ),
    **{name: in_float(getattr(F, name)) for name in ("group_norm", "layer_norm", "softmax")},
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


class Meter(TorchDispatchMode):
    """Counts the bytes of the tensors alive and, by the part of the step, what operators cost."""

    def __init__(self, flops: float, bandwidth: float) -> None:
        super().__init__()
        self.speed = flops, bandwidth  # in a second
        self.alive: dict[int, tuple[Any, int]] = {}  # a storage and its bytes, by identity
        self.now, self.part, self.each = 0, "", False
        self.begin(1)

    def begin(self, times: float) -> None:
        """Start a new count, of a step with so many `times` the micro-batches that are taken."""
        self.peak, self.when, self.times = self.now, "", times
        # Costs of the whole step: "flops", "sent" bytes, and seconds, "eager" and "compiled".
        self.cost: Any = defaultdict(float)

    def __torch_dispatch__(self, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if call is torch.ops.prim.device.default:  # asked for all the time
            return given[0].fake_device
        if DTensor in types:
            return NotImplemented  # it then calls operators on its local part
        result = call(*given, **(named or {}))
        leaves = tree_leaves((given, named, result))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values()
        for tensor in tensors:
            self.hold(tensor.untyped_storage())
        times = 1 if self.part == "optimizer" else self.times
        if "c10d" in call.namespace:
            # By rings: the larger side once, all that is reduced for all ranks twice. FSDP reduces
            # gradients once in a step, or after each micro-batch.
            times = 1 if "reduce_scatter" in str(call) and not self.each else times
            sent = max((tensor.nbytes for tensor in tensors), default=0)
            self.cost["sent"] += times * sent * (2 if re.search("all_?reduce", str(call)) else 1)
        elif not call.is_view:
            count = flop_registry.get(call._overloadpacket)
            flops = count(*given, **(named or {}), out_val=result) if count else 0
            seconds = max(flops / self.speed[0], sum(t.nbytes for t in tensors) / self.speed[1])
            self.cost["eager"] += times * seconds
            if self.part != "optimizer":
                self.cost["flops"] += times * flops
            if flops or self.part == "optimizer":
                self.cost["compiled"] += times * seconds
        return result

    def hold(self, storage: Any) -> None:
        """Count a storage until its end, by the size that it has now."""
        key = id(storage)
        watch, before = self.alive.get(key) or (weakref.ref(storage, partial(self.free, key)), 0)
        self.alive[key] = watch, storage.nbytes()
        self.now += storage.nbytes() - before
        if self.now > self.peak:
            self.peak, self.when = self.now, self.part

    def free(self, key: int, watch: object) -> None:
        """The end of a storage."""
        self.now -= self.alive.pop(key)[1]

    @contextlib.contextmanager
    def annotated(self, part: str) -> Iterator[None]:
        """A part of the step, by its name in traces."""
        self.part = part
        yield
        self.part = "optimizer"


@contextlib.contextmanager
def one_rank(config: FitConfig, meter: Meter) -> Iterator[loop.State]:
    """The state of a rank. In the block tensors are fake, and ranks need not agree on anything."""
    sharded = parallel.SHARDED and config.ranks > 1
    world = World(0, config.ranks if sharded else 1, torch.device("cpu"), distributed=sharded)
    data, resize = loop.build_datasets(config), torch.UntypedStorage.resize_
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (loop, "build_datasets", lambda config: data),
            (parallel, "build", lambda make, world: make()),
            (loop, "judge_step", lambda sums, norm, ranks, clip: (1.0, norm, False)),
            (loop, "annotated", meter.annotated),
            (parallel, "require_same", lambda *values: None),
            (parallel, "agree_on_buffers", lambda *values: None),
            # FSDP frees gathered weights by this, and no operator is called.
            (torch.UntypedStorage, "resize_", lambda me, n: (resize(me, n), meter.hold(me))[0]),
            (torch.nn.Module, "to", lambda module, *to, **named: module),
            *((F, *each) for each in ON_GPU.items()),
        ):
            stack.enter_context(patch.object(owner, name, value))
        if sharded:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.ranks)
            stack.callback(dist.destroy_process_group)
            mesh = vars(parallel)["build_mesh"](config.parallel, world)
            stack.enter_context(patch.object(parallel, "build_mesh", lambda *given: mesh))
        stack.enter_context(fake_tensor.FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        state = loop.setup(config, world)
        create_optimizer_state(state.optimizer)
        if config.ranks > world.size:  # DDP keeps the gradients, in its buckets
            stack.enter_context(patch.object(state.optimizer, "zero_grad"))
            for weight in (p for g in state.optimizer.param_groups for p in g["params"]):
                weight.grad = torch.zeros_like(weight)
        yield state


def like_a_gpu(config: FitConfig, ranks: int) -> FitConfig:
    """The settings with which a CPU follows the step of a GPU."""
    settings = {"train.precision": "bf16"} if config.train.precision == "auto" else {}
    return override(config, settings | {"ranks": ranks, "compile.mode": "none", "device": "cpu"})


def foretold(config: Config, ranks: int) -> int:
    """Bytes that a rank's tensors take at most, with the micro-batches of these settings."""
    own = {each.name: getattr(config, each.name) for each in fields(Config)}
    meter = Meter(1.0, 1.0)
    size = min(config.train.micro_batch_size, -(-config.train.global_batch_size // ranks))
    list(measure(like_a_gpu(FitConfig(**own), ranks), meter, [size]))
    return meter.peak


def measure(
    config: FitConfig, meter: Meter, sizes: Sequence[int] = ()
) -> Iterator[tuple[int, loop.State]]:
    """Count a step with micro-batches of 1, 2, 4 ... samples, up to a rank's share of a batch."""
    share = -(-config.train.global_batch_size // config.ranks)
    sizes = sizes or sorted({share, *(2**power for power in range(share.bit_length()))})
    meter.each = getattr(config.parallel, "reduce_each", False)
    with one_rank(config, meter) as state:
        if any(isinstance(module, _BatchNorm) for module in state.model.modules()):
            sizes = [size for size in sizes if size > 1 or share == 1]  # one has no statistics
        for size in sizes:
            state.plan = [loop.Share(slice(0, size), 1.0)] * min(2, -(-share // size))
            with _disable_current_modes():
                batch = state.loader.source[0, state.plan[0]]
            batch = tree_map_only(Tensor, torch.clone, batch)  # a fake one
            meter.begin(share / size / len(state.plan))
            loop.train_step(state, [batch] * len(state.plan))
            yield size, state


def parts_of(meter: Meter, state: loop.State) -> str:
    """What takes the memory at the peak, and what a rank sends."""
    weights = sum(parallel.local_part(p).nbytes for p in state.model.parameters())
    kept = [v for each in state.optimizer.state.values() for v in each.values()]
    moments = sum(parallel.local_part(v).nbytes for v in kept if torch.is_tensor(v))
    text = f"weights {in_units(weights)}, optimizer {in_units(moments)}, all else "
    text += f"{in_units(meter.peak - weights - moments)}; reached in {meter.when}"
    return f"{text}\neach rank sends {in_units(sent_by(meter, state))} in a step"


def sent_by(meter: Meter, state: loop.State) -> float:
    """Bytes that a rank sends in a step: DDP's gradients, by their size, or what FSDP exchanges."""
    gradients = sum(p.nbytes for p in state.model.parameters() if p.requires_grad)
    both_ways = meter.cost["sent"] if state.world.size > 1 else 2 * gradients
    return both_ways * (1 - 1 / cast(FitConfig, state.config).ranks)


def fit(config: FitConfig, arguments: list[str]) -> int:
    """Print what fits, and the command to type; 1 if nothing does."""
    names = {"auto": "H100", "cuda": "H100", "cpu": "H100"} | {each.lower(): each for each in GPUS}
    name = names.get(config.device.lower())
    if not name:
        raise UserError(f"--device {config.device}: choose from {', '.join(GPUS)}")
    memory = 1e9 * (config.device_memory or GPUS[name][0])
    flops, bandwidth = 1e12 * PEAK_BF16_TFLOPS[name], 1e12 * GPUS[name][1]
    batch = config.train.global_batch_size
    ranks = config.ranks or (1 if refusal(config, EACH) else min(EACH, batch))
    if not 1 <= ranks <= batch or (ranks > EACH and ranks % EACH):
        raise UserError(f"--ranks {ranks}: 1 to {batch} (a global batch), beyond {EACH} in eights")
    parallel.check_ranks(config.parallel, ranks)
    config = like_a_gpu(config, ranks)
    print(f"{named(ranks, 'rank')}, {name} with {in_units(memory)} each, batches of {batch}")
    print("micro-batch  recompute  memory              samples/s, MFU (roofline): eager, compiled")
    rows, of_sample = list[tuple[bool, list[float], int, bool, str]](), 0.0
    try:
        for recompute in (False, True):
            meter = Meter(flops, bandwidth)
            change = {"train.activation_checkpointing": recompute}
            for size, state in measure(override(config, change), meter):
                of_sample = of_sample or meter.cost["flops"] / batch  # without what is recomputed
                pace = [batch / meter.cost[kind] for kind in ("eager", "compiled")]
                fits = meter.peak <= ROOM * memory
                rows.append((fits, pace, size, recompute, parts_of(meter, state)))
                bounds = [f"{rate:12,.1f} {of_sample * rate / flops:4.0%}" for rate in pace]
                text = f"{size:11}  {'yes' if recompute else 'no':9}  {in_units(meter.peak):>7} "
                print(text + ("fits    " if fits else "too much"), *bounds, flush=True)
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
        # A GPU would have to be waited for.
        raise UserError("a step reads the value of a tensor: `pytest -k reads_no_value`") from None
    fits, _, size, recompute, parts = max(rows)
    print(f"the peak with micro-batches of {size}: {parts}")
    print("not counted: fragments, CUDA's context, buffers of cuBLAS, cuDNN, NCCL, FlexAttention;")
    print("what an optimizer sends under DDP, as Muon does")
    if not fits:
        print("nothing fits: take more ranks and FSDP (parallelism=fsdp), or a smaller model")
        return 1
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ranks", "--device", "--device-memory", dest="of_fit")
    words = [*parser.parse_known_args(arguments)[1], f"--train.micro-batch-size={size}"]
    words += [f"--train.{'' if recompute else 'no-'}activation-checkpointing"]
    start = f"./launch.sh -n {min(ranks, EACH)}" if ranks > 1 else f"python -m {PACKAGE}"
    nodes = f"NNODES={ranks // EACH} RDZV_ENDPOINT=FIRST-MACHINE:29500 " if ranks > EACH else ""
    print(f"to train: {nodes}{start} train {shlex.join(words)}")
    return 0
