"""Memory of a rank: what is to be expected part by part, and what torch's allocators see."""

import contextlib
import gc
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..config import Config
from ..data import build_datasets
from ..device import move
from ..distributed import parallel
from ..model import blocks, compute_loss
from ..run.hardware import expected_memory, free_host_memory
from ..train import State

STEPS = "steps begin here"


@dataclass
class Peak:
    """`bytes` is known after the block, None on a device that cannot tell."""

    device: torch.device
    bytes: int | None = None

    def begin(self) -> None:
        """All is set up: what comes now counts."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with record_function(STEPS):
                pass


@contextlib.contextmanager
def peak_of_steps(config: Config, device: torch.device) -> Iterator[Peak]:
    """Watch what is allocated from here on: to set up, then `begin`, then to take steps.

    On CUDA it is what the caching allocator counts. On a CPU every allocation and release of this
    thread's tensors is traced, so memory of numpy, Python and gloo is left out, and so is that of
    the data, which is read once more for that.
    """
    gc.collect()  # of what was set up before
    peak = Peak(device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
    elif device.type == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as of_data:
            data = build_datasets(config)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as of_steps:
            yield peak
        peak.bytes = max(allocated(of_steps)) - allocated(of_data)[-1]
        del data
    else:
        yield peak


def allocated(finished: profile) -> list[int]:
    """Bytes that were allocated and not released since the profile began, after each change.

    Only those after `STEPS`, if it was marked.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        finished.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    begin = next((e["ts"] for e in events if e["name"] == STEPS), 0)
    # Not their running total: that goes on from the profile before.
    changes = sorted(
        (e["ts"], e["args"]["Bytes"])
        for e in events
        if e["name"] == "[memory]" and e["args"]["Device Type"] == 0
    )
    totals = itertools.accumulate(size for _, size in changes)
    return [total for (at, _), total in zip(changes, totals, strict=True) if at >= begin] or [0]


def memory_of(state: State, alone: State | None, peak: Peak) -> dict[str, Any]:
    """Bytes of this rank: what was to be expected, and what was seen.

    "gathered" are parameters of other ranks that are there for a while, "whole" what that would be
    if the model were sharded (and as much of it at once as FSDP has: the blocks before and at work,
    and all that is in no block).
    """
    needed = expected_memory(state.model, state.optimizer, 0)
    parameters = list(state.model.parameters())
    sharded = any(parallel.local_part(p).numel() < p.numel() for p in parameters)
    in_blocks = [list(block.parameters()) for block in blocks(state.model)]
    inner = {id(p) for block in in_blocks for p in block}
    outer = [p for p in parameters if id(p) not in inner]
    size = state.compute_dtype.itemsize
    largest = sorted(sum(p.numel() for p in block) for block in in_blocks)[-2:]
    whole = size * (sum(p.numel() for p in outer) + sum(largest))
    sizes = {
        "parameters": needed.parameters,
        "gradients": needed.gradients,
        "optimizer": needed.optimizer,
        "activations": kept_for_backward(alone) if alone else None,
        "gathered": whole if sharded else 0,
    }
    known = sizes["activations"] is not None
    device = state.world.device
    capacity = free_host_memory()
    if device.type == "cuda":
        capacity = torch.cuda.get_device_properties(device).total_memory
    return {
        **sizes,
        "predicted": sum(sizes.values()) if known else None,
        "measured": peak.bytes,
        "whole": whole,
        "sharded": sharded,
        "distributed": state.world.distributed,
        "traffic": size * sum(p.numel() for p in parameters),
        "micro_batches": len(state.plan),
        "recomputed": state.config.train.activation_checkpointing,
        "guessed": needed.guessed,
        "capacity": capacity,
    }


def kept_for_backward(state: State) -> int:
    """Bytes that the forward of a micro-batch keeps for backward, weights not counted.

    With the gradients that backward has at hand at first: of an operator's input and output, each
    taken to be as large as the largest of what is kept.
    """
    held = storages([*state.model.parameters(), *state.model.buffers()])
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.update(storages([tensor]))
        return tensor

    batch = move(state.loader.source[state.step, 0], state.world.device)
    # They stay alive as long as the loss does, so no two of them have the same address.
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        parallel.autocast(state.world, state.compute_dtype),
    ):
        loss = compute_loss(state.module, batch)
    del loss
    sizes = [size for place, size in kept.items() if place not in held]
    return sum(sizes) + 2 * max(sizes, default=0)


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Size by address of the memory behind some tensors, each piece once."""
    behind = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in behind}
