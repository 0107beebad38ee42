"""Seconds and memory of the output layer with its loss, forward and backward.

python -m benchmarks.loss [--smoke]

Four ways, none compiled: all logits at once; all logits, with their cross entropies a part at a
time; output layer and cross entropies a part at a time, as the rendered model has it (model.py
`Output`); and torch's `linear_cross_entropy`, where this release has it. Seconds are in float32 on
this machine, the ways in turns. Bytes are those of gpt2_124m at a micro-batch of 16 in bfloat16
autocast, counted on fake tensors: what is allocated at the same time beyond x, weight and targets,
gradients included.
"""

import importlib
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from .common import PACKAGE, benchmark, render, series

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
VOCABULARY = 50304


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside hold at the same time."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.alive = {tensor.untyped_storage()._cdata: 0 for tensor in given}  # views of them, too
        self.peak = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):
        """Run the operator, and note the storages of its results."""
        results = operator(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.alive.values()))
        return results


def at_once(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The plain formula."""
    logits = F.linear(x, weight).flatten(0, 1)
    return F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")


def cross_entropies_in_parts(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits in the dtype of the products, a part of them in float32."""

    def of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, reduction="sum")

    rows, logits = 2**28 // VOCABULARY, F.linear(x, weight).flatten(0, 1)
    again = partial(checkpoint, of, use_reentrant=False, preserve_rng_state=False)
    return torch.stack([*map(again, logits.split(rows), targets.flatten().split(rows))]).sum()


def by_torch(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What torch has for this."""
    options = torch.nn.LinearCrossEntropyOptions()
    flat = x.flatten(0, 1), weight, targets.flatten()
    return F.linear_cross_entropy(*flat, reduction="sum", options=options)


def ways(source: Path) -> dict[str, Loss]:
    """The contenders that are there."""
    sys.path.insert(0, str(source))
    found: dict[str, Loss] = {"at once": at_once}
    found["cross entropies in parts"] = cross_entropies_in_parts
    found["as rendered"] = importlib.import_module(f"{PACKAGE}.model").Output()
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found["linear_cross_entropy"] = by_torch
    return found


def inputs(rows: int, length: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """What goes into the output layer: x, weight, targets."""
    x = torch.randn(rows, length, width, requires_grad=True)
    weight = torch.randn(VOCABULARY, width, requires_grad=True)
    return x, weight, torch.randint(VOCABULARY, (rows, length))


def memory(loss: Loss) -> float:
    """GiB at the peak."""
    with FakeTensorMode():
        given = inputs(16, 1024, 768)
        with Peak(*given) as found:
            with torch.autocast("cpu", torch.bfloat16):
                total = loss(*given)
            total.backward()
    return found.peak / 2**30


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """Round after round, the ways in turns."""
    rounds, rows, length = (1, 1, 64) if smoke else (5, 2, 1024)
    contenders, given = ways(render(folder)), inputs(rows, length, 256)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name, loss in [*contenders.items()][:: 1 if round_ % 2 else -1]:
            started = time.perf_counter()
            loss(*given).backward()
            if round_:  # the first one warms up
                seconds[name].append(time.perf_counter() - started)
            for tensor in given[:2]:
                tensor.grad = None
    found = {name: series(values, "s") for name, values in seconds.items()}
    found |= {f"{name}, memory": series([memory(w)], "GiB") for name, w in contenders.items()}
    return {"settings": {"rounds": rounds, "tokens": rows * length}, "series": found}


if __name__ == "__main__":
    benchmark("loss", measure, ("torch",))
