"""Count the memory, FLOPs, time and communication that a rank's step would need on a GPU.

The step runs on fake tensors (fake_tensors.py).
"""

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

# Kernels do not reach the numbers in data sheets. On an H200, large matrix products reach this
# fraction of the peak FLOP/s, and large copies this fraction of the peak bandwidth.
PEAK_SHARE = 0.7
BANDWIDTH_SHARE = 0.85
# The shortest time between the launches of two eager kernels.
KERNEL_SECONDS = 2.5e-6
# These factors were fitted to steps of a GPT-2-sized model on one H200, with this template's loop,
# nanoGPT and the Trainer of transformers (27 November 2026; docs/evidence/gpus.md in the template).
# Eager elementwise kernels take as long as if they moved 1.55 times their bytes, since many read
# strided memory or change the dtype. Compiled operators take as long as if they moved 0.6 times
# their bytes, since fused kernels keep intermediate values in registers.
EAGER_BYTES = 1.55
FUSED_BYTES = 0.6
# Operators without a kernel: they only allocate memory or reinterpret it. Views are not listed,
# since an operator's `is_view` marks them.
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
    """A storage that is not freed yet, and the bytes counted for it."""

    reference: weakref.ref[torch.UntypedStorage]
    size: int


class Meter(TorchDispatchMode):
    """Counts the bytes of all live tensors, and the costs of a step's operators.

    `cost` has these sums over a whole step:
    - "flops", without the optimizer, and "sent" (bytes).
    - "products": seconds of operators with FLOPs (matrix products and attention).
    - "memory" and "kernels": seconds of all other operators if they run eagerly. If launching an
      operator takes longer than reading and writing its bytes, its seconds are in "kernels".
    - "fused": seconds of these other operators if they are compiled.
    - "eager" = "products" + "memory" + "kernels", and "compiled" = "products" + "fused".

    `flops` (per second) and `bandwidth` (bytes per second) are a GPU's peaks by its data sheet.
    """

    def __init__(self, flops: float, bandwidth: float) -> None:
        super().__init__()
        self.flops = flops
        self.bandwidth = bandwidth
        # The storages that are not freed yet, by their id.
        self.live: dict[int, LiveStorage] = {}
        self.live_bytes = 0
        # The current phase of the step: forward, backward or optimizer.
        self.phase = ""
        # Whether FSDP reduces gradients after each micro-batch; fit.py sets it.
        self.reduces_each_micro_batch = False
        self.begin(1)

    def begin(self, repeats: float) -> None:
        """Reset the peak and the costs, to count a step.

        The simulation runs only one or two micro-batches of a step. The whole step has `repeats`
        times as many, so the costs of a micro-batch are multiplied by `repeats`.
        """
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
        # This operator reads a tensor's device. It is called very often and costs nothing.
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        # Let DTensor handle the operator. It calls operators on the local shards, which come here
        # again and are counted.
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = distinct_tensors((args, kwargs, result))
        for tensor in tensors:
            self.hold(tensor.untyped_storage())
        # Collectives have the namespace c10d or _c10d_functional.
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
        seconds_of_bytes = read_and_written / (BANDWIDTH_SHARE * self.bandwidth)
        seconds_of_flops = flops / (PEAK_SHARE * self.flops)
        # `self.flops` is for 16-bit numbers. Products of float32 run in TF32 at half this rate.
        if all(tensor.dtype.itemsize > 2 for tensor in tensors):
            seconds_of_flops = 2 * seconds_of_flops
        in_optimizer = self.phase == "optimizer"
        # The optimizer runs once per step, whatever the number of micro-batches.
        repeats = 1 if in_optimizer else self.repeats
        if not in_optimizer:
            self.cost["flops"] += repeats * flops
        if flops:
            seconds = repeats * max(seconds_of_flops, seconds_of_bytes, KERNEL_SECONDS)
            self.cost["products"] += seconds
            self.cost["eager"] += seconds
            self.cost["compiled"] += seconds
            return
        if in_optimizer:
            # EAGER_BYTES does not apply to the optimizer, whose few kernels work on all weights at
            # once. The optimizer is never compiled, so in `fused` it takes its eager time, too.
            eager = seconds_of_bytes
            fused = max(seconds_of_bytes, KERNEL_SECONDS)
        else:
            eager = EAGER_BYTES * seconds_of_bytes
            fused = FUSED_BYTES * seconds_of_bytes
        limit = "memory" if eager > KERNEL_SECONDS else "kernels"
        # An eager operator takes at least the time between two launches.
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
        # FSDP reduces gradients once per step, unless it is set to do so after each micro-batch.
        if "reduce_scatter" in name and not self.reduces_each_micro_batch:
            repeats = 1
        # In a ring, each rank sends the larger of input and output once, except one chunk, which
        # `sent_by` in fit.py subtracts. An all-reduce sends the data twice: to reduce it, and to
        # distribute the result.
        sent = max((tensor.nbytes for tensor in tensors), default=0)
        if "allreduce" in name or "all_reduce" in name:
            sent = 2 * sent
        self.cost["sent"] += repeats * sent

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with its current size until it is freed."""
        key = id(storage)
        if key not in self.live:
            # Called when the storage is freed.
            def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
                self.live_bytes -= self.live.pop(key).size

            self.live[key] = LiveStorage(reference=weakref.ref(storage, forget), size=0)
        # A storage may have been resized since it was last counted.
        counted = self.live[key]
        self.live_bytes += storage.nbytes() - counted.size
        counted.size = storage.nbytes()
        if self.live_bytes > self.peak:
            self.peak = self.live_bytes
            self.peak_phase = self.phase

    @contextlib.contextmanager
    def annotated(self, phase: str) -> Iterator[None]:
        """Set the phase of the step; replaces `annotated` of device.py, which labels traces."""
        self.phase = phase
        yield
        # Work outside of the phases is done once per step, so count it like the optimizer's.
        self.phase = "optimizer"


def distinct_tensors(tree: Any) -> list[Tensor]:
    """Return the distinct tensors in a nested structure, since a GPU reads each only once."""
    tensors: dict[int, Tensor] = {}
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            tensors[id(leaf)] = leaf
    return list(tensors.values())
