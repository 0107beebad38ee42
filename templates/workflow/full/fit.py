"""How much memory a rank needs on a GPU, and how fast it can be at most: before there is a GPU.

The project's own setup and step run as one rank of many, on fake tensors: they have shapes, and no
data. A mode sees each operator, and each tensor from its birth to its end. The bound is a roofline
(Williams et al., 2009): an operator takes as long as its FLOPs at the peak of the GPU, or as the
bytes that it reads and writes at its bandwidth. What is compiled is bound by its products alone.
"""

import argparse
import contextlib
import shlex
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import fake_tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .. import train as loop
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
EACH = 8  # GPUs of a machine
READS = "the step reads the value of a tensor, for which it would wait on a GPU"
ROOM = 0.9  # of the memory: the rest is for fragments, CUDA's context, cuBLAS and NCCL
FLASH = torch.ops.aten._scaled_dot_product_flash_attention
# Where a GPU has one kernel and a CPU has several: what keeps as much for backward as that kernel.
FUSED = (
    (F, "scaled_dot_product_attention", lambda q, k, v, *rest, **named: FLASH(q, k, v)[0]),
    (F, "rms_norm", lambda x, shape, weight=None, eps=None: F.layer_norm(x, shape, weight)),
)


@dataclass(frozen=True)
class FitConfig(Config):
    """A training run, and what it is to run on."""

    ranks: int = 0
    """Processes, each with a GPU (0: 8, or 1 where the project is made for one)."""
    device: str = "H100"
    """Kind of GPU."""
    device_memory: float = 0.0
    """Memory of each GPU in GB (0: the usual one of its kind)."""


class Meter(TorchDispatchMode):
    """Counts the bytes of the tensors alive and, by the part of the step, what operators cost."""

    def __init__(self, flops: float, bandwidth: float) -> None:
        super().__init__()
        self.speed = flops, bandwidth  # in a second
        self.alive: dict[int, tuple[Any, int]] = {}  # a storage and its bytes, by identity
        self.now, self.part = 0, ""
        self.begin(1)

    def begin(self, times: float) -> None:
        """Count a step, as of one with so many times the micro-batches; what is alive stays so."""
        self.peak, self.when, self.cost, self.times = self.now, "", Counter[Any](), times

    def __torch_dispatch__(self, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if call is torch.ops.prim.device.default:  # asked for all the time
            return call(*given)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it then calls operators on its local part
        result = call(*given, **(named or {}))
        leaves = tree_leaves((given, named, result))
        sizes = {id(it): it.nbytes for it in leaves if isinstance(it, torch.Tensor)}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self.hold(leaf.untyped_storage())
        if call.namespace == "c10d":  # gradients are reduced once, whatever the micro-batches
            part = self.part if "gather" in call._opname else "optimizer"
            self.cost["sent", part] += max(sizes.values(), default=0)
        elif not call.is_view:
            count = flop_registry.get(call._overloadpacket)
            flops = count(*given, **(named or {}), out_val=result) if count else 0
            seconds = max(flops / self.speed[0], sum(sizes.values()) / self.speed[1])
            self.cost["eager", self.part] += seconds
            if self.part != "optimizer":
                self.cost["flops", self.part] += flops
            if flops or self.part == "optimizer":
                self.cost["compiled", self.part] += seconds
        return result

    def hold(self, storage: Any) -> None:
        """Count a storage until its end, by the size that it has now."""
        key = id(storage)
        watch, before = self.alive.get(key) or (weakref.ref(storage, partial(self._free, key)), 0)
        self.alive[key] = watch, storage.nbytes()
        self.now += storage.nbytes() - before
        if self.now > self.peak:
            self.peak, self.when = self.now, self.part

    def _free(self, key: int, watch: object) -> None:
        self.now -= self.alive.pop(key)[1]

    @contextlib.contextmanager
    def annotated(self, part: str) -> Iterator[None]:
        """A part of the step, by its name in traces."""
        self.part = part
        yield
        self.part = "optimizer"

    def total(self, kind: str) -> float:
        """The cost of the step: "flops", "eager" and "compiled" seconds at least, bytes "sent"."""
        costs = ((part, value) for (name, part), value in self.cost.items() if name == kind)
        return sum(value * (1 if part == "optimizer" else self.times) for part, value in costs)


@contextlib.contextmanager
def one_rank(config: FitConfig, meter: Meter) -> Iterator[loop.State]:
    """The state of a rank. In the block all tensors are fake, and the ranks agree at once."""
    sharded = parallel.SHARDED and config.ranks > 1
    several = {"size": config.ranks, "distributed": True} if sharded else {"size": 1}
    world = World(rank=0, device=torch.device("cpu"), **several)
    data, resize = loop.build_datasets(config), torch.UntypedStorage.resize_
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (loop, "build_datasets", lambda config: data),
            (loop, "judge_step", lambda sums, norm, ranks, clip: (1.0, norm, False)),
            (loop, "annotated", meter.annotated),
            (parallel, "require_same", lambda *values: None),
            (parallel, "agree_on_buffers", lambda *values: None),
            # By this, which is no operator, FSDP frees what it has gathered.
            (torch.UntypedStorage, "resize_", lambda it, n: (resize(it, n), meter.hold(it))[0]),
            (torch.nn.Module, "to", lambda module, *to: module),
            *FUSED,
        ):
            stack.enter_context(patch.object(owner, name, value))
        if sharded:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.ranks)
            stack.callback(dist.destroy_process_group)
            mesh = parallel.build_mesh(config.parallel, world)
            stack.enter_context(patch.object(parallel, "build_mesh", lambda *given: mesh))
        stack.enter_context(fake_tensor.FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        state = loop.setup(config, world)
        if config.ranks > world.size:  # DDP keeps the gradients, in its buckets
            stack.enter_context(patch.object(state.optimizer, "zero_grad"))
        yield state


def measure(config: FitConfig, meter: Meter) -> Iterator[tuple[int, loop.State]]:
    """Count a step with micro-batches of 1, 2, 4 ... samples, up to a rank's share of a batch."""
    share = -(-config.train.global_batch_size // config.ranks)
    sizes = sorted({share, *(2**power for power in range(share.bit_length()))})
    with one_rank(config, meter) as state:
        for number, size in enumerate([sizes[0], *sizes]):  # the first makes the optimizer's state
            count = -(-share // size)
            state.plan = [loop.Share(slice(0, size), 1.0)] * min(2, count)  # the others are alike
            with fake_tensor.unset_fake_temporarily():
                batch = state.loader.source[0, state.plan[0]]
            meter.begin(count / len(state.plan))
            try:
                loop.train_step(state, [batch] * len(state.plan))
            except fake_tensor.DataDependentOutputException:
                raise UserError(f"{READS}: `pytest -k reads_no_value` names the line") from None
            if number:
                yield size, state


def parts_of(meter: Meter, state: loop.State) -> str:
    """What takes the memory at the peak."""
    weights = sum(parallel.local_part(p).nbytes for p in state.model.parameters())
    kept = [v for each in state.optimizer.state.values() for v in each.values()]
    moments = sum(parallel.local_part(v).nbytes for v in kept if torch.is_tensor(v))
    sent = meter.total("sent") or 2.0 * weights * (state.config.ranks > 1)  # by DDP: not followed
    text = f"weights {in_units(weights)}, optimizer {in_units(moments)}, gradients and activations "
    text += f"{in_units(meter.peak - weights - moments)}, in {meter.when}"
    return f"{text}; each step a rank sends {in_units(sent)}"


def fit(config: FitConfig, arguments: list[str]) -> int:
    """Print what fits, and the command to type; 1 if nothing does."""
    name = {each.lower(): each for each in GPUS}.get(config.device.lower())
    if not name:
        raise UserError(f"--device {config.device}: choose from {', '.join(GPUS)}")
    memory = 1e9 * (config.device_memory or GPUS[name][0])
    flops, bandwidth = 1e12 * PEAK_BF16_TFLOPS[name], 1e12 * GPUS[name][1]
    ranks = config.ranks or (1 if refusal(config, EACH) else EACH)
    batch = config.train.global_batch_size
    if not 1 <= ranks <= batch:
        raise UserError(f"--ranks {ranks}: 1 to {batch}, as a global batch has so many samples")
    parallel.check_ranks(config.parallel, ranks)
    settings = {"train.precision": "bf16"} if config.train.precision == "auto" else {}
    config = override(config, settings | {"ranks": ranks, "compile.mode": "none", "device": "cpu"})
    print(f"{named(ranks, 'rank')}, {name} with {in_units(memory)} each, batches of {batch}")
    print("micro-batch  recompute  memory              samples/s and MFU at most: eager, compiled")
    fitting: list[tuple[list[float], int, bool, str]] = []
    of_sample = 0.0
    for recompute in (False, True):
        meter = Meter(flops, bandwidth)
        change = {"train.activation_checkpointing": recompute}
        for size, state in measure(override(config, change), meter):
            of_sample = of_sample or meter.total("flops") / batch  # without what is recomputed
            pace = [batch / meter.total(kind) for kind in ("eager", "compiled")]
            bounds = [f"{rate:10,.4g} {of_sample * rate / flops:4.0%}" for rate in pace]
            fits = meter.peak <= ROOM * memory
            text = f"{size:11}  {'yes' if recompute else 'no':9}  {in_units(meter.peak):>7} "
            print(text + ("fits    " if fits else "too much"), *bounds, flush=True)
            if fits:
                fitting.append((pace, size, recompute, parts_of(meter, state)))
    if not fitting:
        other = "more ranks" if parallel.SHARDED else "FSDP (parallelism=fsdp)"
        print(f"nothing fits into {ROOM:.0%} of the memory: {other}, or a smaller model or sample")
        return 1
    _, size, recompute, parts = max(fitting)
    print(f"the peak with micro-batches of {size}: {parts}")
    print("not counted: fragmentation, CUDA's context, cuBLAS's and NCCL's buffers, slower kernels")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--ranks", "--device", "--device-memory"):
        parser.add_argument(option)
    words = [*parser.parse_known_args(arguments)[1], f"--train.micro-batch-size={size}"]
    words += ["--train.activation-checkpointing"] * recompute
    start = f"./launch.sh -n {min(ranks, EACH)}" if ranks > 1 else f"python -m {PACKAGE}"
    if ranks > EACH:
        start = f"NNODES={-(-ranks // EACH)} RDZV_ENDPOINT=FIRST-MACHINE:29500 {start}"
    print(f"to train: {start} train {shlex.join(words)}")
    return 0
