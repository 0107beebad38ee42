"""Count what one rank's step takes on a GPU, from operators on tensors without data."""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Kernels do not reach the numbers of a data sheet. These are the rates of large matrix products and
# of large copies on an H200, and the shortest time between the starts of two eager kernels.
PEAK_SHARE = 0.7
BANDWIDTH_SHARE = 0.85
KERNEL_SECONDS = 2.5e-6
# Two factors were fitted to steps of GPT-2's size on one H200, of this template's loop, nanoGPT's
# and the Trainer of transformers (27 November 2026; docs/evidence/gpus.md in the template). An
# eager elementwise kernel takes as long as 1.55 times its bytes, since many read strided memory or
# change the dtype. Compiled, these operators move 0.6 times their bytes, since fused ones keep
# intermediate values in registers.
EAGER_BYTES = 1.55
FUSED_BYTES = 0.6
# Operators without a kernel, beside views: they allocate memory or name it anew.
FREE = {
    torch.ops.aten._unsafe_view,
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


@dataclass
class LiveStorage:
    """A storage that is not freed yet, and the bytes that were counted for it."""

    reference: weakref.ref[torch.UntypedStorage]
    size: int


class Meter(TorchDispatchMode):
    """Counts the bytes of all live tensors, and what the operators of a step cost.

    `cost` has, for a whole step: "flops", "sent" (bytes), and seconds. "products" are those of
    matrix products and attention. All other operators take "fused" seconds when they are compiled.
    Eager they take "memory" seconds, or "kernels" where starting a kernel takes longer than its
    bytes. "eager" and "compiled" are the sums. `flops` and `bandwidth` are a GPU's speed in a
    second, by its data sheet.
    """

    def __init__(self, flops: float, bandwidth: float) -> None:
        super().__init__()
        self.flops = flops
        self.bandwidth = bandwidth
        self.live: dict[int, LiveStorage] = {}
        self.live_bytes = 0
        self.phase = ""
        self.reduces_each_micro_batch = False
        self.begin(1)

    def begin(self, repeats: float) -> None:
        """Start a new count, of a step that has `repeats` times the micro-batches that are run."""
        self.peak = self.live_bytes
        self.peak_phase = ""
        self.repeats = repeats
        self.cost: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count its tensors and its cost."""
        # This operator is called very often and costs nothing.
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        # A sharded tensor then calls the operator on its local shard, which comes here again.
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = distinct_tensors((args, kwargs, result))
        for tensor in tensors:
            self.hold(tensor.untyped_storage())
        if "c10d" in func.namespace:
            self.count_collective(str(func), tensors)
        elif not func.is_view and func._overloadpacket not in FREE:
            flops = 0
            if func._overloadpacket in flop_registry:
                flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
            self.count_operator(flops, tensors)
        return result

    def count_operator(self, flops: int, tensors: list[Tensor]) -> None:
        """Count an operator that reads or writes these tensors."""
        if not tensors:
            return
        read_and_written = sum(tensor.nbytes for tensor in tensors)
        by_bytes = read_and_written / (BANDWIDTH_SHARE * self.bandwidth)
        by_flops = flops / (PEAK_SHARE * self.flops)
        # The peak is that of 16-bit numbers. TF32, for products of float32, has half of it.
        if all(tensor.dtype.itemsize > 2 for tensor in tensors):
            by_flops = 2 * by_flops
        # The optimizer runs once in a step, however many micro-batches there are.
        repeats = 1 if self.phase == "optimizer" else self.repeats
        if self.phase != "optimizer":
            self.cost["flops"] += repeats * flops
        if flops:
            seconds = repeats * max(by_flops, by_bytes, KERNEL_SECONDS)
            self.cost["products"] += seconds
            self.cost["eager"] += seconds
            self.cost["compiled"] += seconds
            return
        eager = by_bytes
        fused = max(by_bytes, KERNEL_SECONDS)
        # The optimizer is never compiled, and its few kernels work on all weights at once.
        if self.phase != "optimizer":
            eager = EAGER_BYTES * by_bytes
            fused = FUSED_BYTES * by_bytes
        limit = "memory" if eager > KERNEL_SECONDS else "kernels"
        eager = max(eager, KERNEL_SECONDS)
        self.cost[limit] += repeats * eager
        self.cost["eager"] += repeats * eager
        self.cost["fused"] += repeats * fused
        self.cost["compiled"] += repeats * fused

    def count_collective(self, name: str, tensors: list[Tensor]) -> None:
        """Count the bytes that a rank sends in a collective."""
        repeats = self.repeats
        if self.phase == "optimizer":
            repeats = 1
        # FSDP reduces the gradients once in a step, unless it does so after each micro-batch.
        if "reduce_scatter" in name and not self.reduces_each_micro_batch:
            repeats = 1
        # In a ring the larger side is sent once. An all-reduce sends everything twice: to reduce
        # it, and to give all ranks the result.
        sent = max((tensor.nbytes for tensor in tensors), default=0)
        if "allreduce" in name or "all_reduce" in name:
            sent = 2 * sent
        self.cost["sent"] += repeats * sent

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, by its present size, until it is freed."""
        key = id(storage)
        if key not in self.live:

            def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
                self.live_bytes -= self.live.pop(key).size

            self.live[key] = LiveStorage(reference=weakref.ref(storage, forget), size=0)
        # A storage may also have been resized since it was counted.
        counted = self.live[key]
        self.live_bytes += storage.nbytes() - counted.size
        counted.size = storage.nbytes()
        if self.live_bytes > self.peak:
            self.peak = self.live_bytes
            self.peak_phase = self.phase

    @contextlib.contextmanager
    def annotated(self, phase: str) -> Iterator[None]:
        """Name the phase of the step, in place of the annotation in traces."""
        self.phase = phase
        yield
        # What is in no phase is done once in a step, as the optimizer's step is.
        self.phase = "optimizer"


def distinct_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a nested structure, each once: a GPU reads it once."""
    tensors: dict[int, Tensor] = {}
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            tensors[id(leaf)] = leaf
    return list(tensors.values())
