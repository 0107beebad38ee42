"""Memory of a rank, as predicted part by part and as measured; and DDP or FSDP, which follows."""

import gc
import itertools
import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..config import Config
from ..data import build_datasets
from ..device import move
from ..distributed import World, parallel
from ..model import blocks, compute_loss
from ..run.hardware import expected_memory, free_host_memory, in_units
from ..train import State, setup
from .timing import record_steps

MARK = "the second step begins"
ROOM = 0.85  # of a device's memory; the rest is for fragments and what others allocate
ANSWERS = {"DDP": "ddp", "FSDP": "fsdp"}
PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered")


def set_up_and_measure(config: Config, world: World) -> tuple[State, int | None]:
    """Set up and take three steps: the state, and the peak bytes of this rank's last two steps.

    In the first step the optimizer has no state yet. On CUDA the caching allocator counts. On a CPU
    the profiler sees each tensor come and go (not numpy, Python or gloo); those of the data, which
    is read once more to count them, are left out. None on a device that cannot tell.
    """
    gc.collect()  # what was set up before
    if world.device.type == "cuda":
        before = torch.cuda.memory_allocated(world.device)
        state = setup(config, world)
        record_steps(state, 1)
        torch.cuda.reset_peak_memory_stats(world.device)
        record_steps(state, 2)
        return state, torch.cuda.max_memory_allocated(world.device) - before
    if world.device.type != "cpu":
        state = setup(config, world)
        record_steps(state, 3)
        return state, None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as of_data:
        data = build_datasets(config)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as of_steps:
        state = setup(config, world)
        record_steps(state, 1)
        with record_function(MARK):
            record_steps(state, 2)
    peak = max(allocated(of_steps)) - allocated(of_data)[-1]
    del data  # only now: its tensors must not be counted as released
    return state, peak


def allocated(finished: profile) -> list[int]:
    """Bytes held after each allocation and release since the profile began; from MARK on, if any.

    The trace's own running total cannot be used: it goes on from the profile before.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        finished.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    begin = next((event["ts"] for event in events if event["name"] == MARK), 0)
    changes = sorted(
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 0
    )
    totals = itertools.accumulate(size for _, size in changes)
    return [total for (at, _), total in zip(changes, totals, strict=True) if at >= begin] or [0]


def memory_of(state: State, alone: State | None, measured: int | None) -> dict[str, Any]:
    """Bytes of this rank part by part, and what a forecast for other numbers of ranks needs.

    "gathered" are parameters of other ranks that are here for a while: "whole", what FSDP has at
    once (two blocks and all that is in no block), if the model is sharded. Activations are measured
    on `alone`, the whole model on this rank, if there is room for it.
    """
    needed = expected_memory(state.model, state.optimizer, 0)
    parameters, inner = list(state.model.parameters()), [*blocks(state.model)]
    in_blocks = sorted(sum(p.numel() for p in block.parameters()) for block in inner)
    itemsize, total = state.compute_dtype.itemsize, sum(p.numel() for p in parameters)
    whole = itemsize * (total - sum(in_blocks[:-2]))
    sharded = any(parallel.local_part(p).numel() < p.numel() for p in parameters)
    sizes = {
        "parameters": needed.parameters,
        "gradients": needed.gradients,
        "optimizer": needed.optimizer,
        "activations": kept_for_backward(alone) if alone else None,
        "gathered": whole if sharded else 0,
    }
    device, capacity = state.world.device, free_host_memory()
    if device.type == "cuda":
        capacity = torch.cuda.get_device_properties(device).total_memory
    return {
        **sizes,
        "predicted": sum(sizes.values()) if alone else None,
        "measured": measured,
        "whole": whole,
        "sharded": sharded,
        "distributed": state.world.distributed,
        "traffic": itemsize * total,
        "micro_batches": len(state.plan),
        "recomputed": state.config.train.activation_checkpointing,
        "guessed": needed.guessed,
        "capacity": capacity,
    }


def kept_for_backward(state: State) -> int:
    """Bytes that the forward of a micro-batch keeps for backward, without the weights.

    With the two gradients that backward starts from, of an operator's output and input, each taken
    to be as large as the largest tensor that is kept.
    """
    weights = storages([*state.model.parameters(), *state.model.buffers()])
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
    sizes = [size for address, size in kept.items() if address not in weights]
    return sum(sizes) + 2 * max(sizes, default=0)


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Size by address of the memory behind some tensors, each piece once."""
    behind = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in behind}


def unpredictable(memory: dict[str, Any]) -> str:
    """Why predicted and measured memory cannot be compared; empty if they can."""
    if memory["measured"] is None:
        return "this device does not tell what was allocated"
    if memory["activations"] is None:
        return "activations are measured on a whole model, for which a rank has no room"
    if memory["recomputed"]:
        return "with --train.activation-checkpointing what is kept cannot be seen from outside"
    return "the optimizer's state could only be guessed" if memory["guessed"] else ""


def choose(one: dict[str, Any], most: dict[str, Any], ranks: int, device: str) -> dict[str, Any]:
    """DDP if a rank can hold everything, else FSDP: {"name", "rendered", "numbers"}.

    `one` is the memory of one process, `most` that of a rank of the most processes. A rank sends
    2 (n - 1) / n of the gradients in DDP's all-reduce; under FSDP (n - 1) / n of the parameters in
    each of two gatherings of every micro-batch, and of the gradients once.
    """
    state = one["parameters"] + one["gradients"] + one["optimizer"]
    activations = most["activations"] or one["activations"] or 0
    capacity = most["capacity"]
    if capacity and device == "cpu":
        capacity //= ranks  # they share one memory
    not_shared = activations + one["whole"]
    needed = {"DDP": state + activations, "FSDP": state // ranks + not_shared}
    fits = {name: not capacity or size <= ROOM * capacity for name, size in needed.items()}
    others = (ranks - 1) / ranks
    gathered = 2 * most["micro_batches"] * most["traffic"]
    sent = {"DDP": 2 * one["gradients"], "FSDP": gathered + one["gradients"]}
    left = ROOM * (capacity or 0) - not_shared
    rendered = "FSDP" if most["sharded"] else "DDP"
    return {
        "name": "DDP" if fits["DDP"] else "FSDP",
        "rendered": rendered if most["distributed"] else None,
        "numbers": {
            "ranks": ranks,
            "bytes_per_rank": needed,
            "capacity": capacity,
            "bytes_sent_per_step": {name: round(others * size) for name, size in sent.items()},
            "fits": fits,
            "enough_ranks": math.ceil(state / left) if not fits["FSDP"] and left > 0 else None,
        },
    }


def explain(choice: dict[str, Any]) -> str:
    """The choice in words, with its numbers and how to change the answer."""
    name, numbers = choice["name"], choice["numbers"]
    needed, sent = (
        {kind: in_units(size) for kind, size in numbers[key].items()}
        for key in ("bytes_per_rank", "bytes_sent_per_step")
    )
    capacity = f", of {in_units(numbers['capacity'])}" if numbers["capacity"] else ""
    text = (
        f"{name} for {numbers['ranks']} ranks: a rank takes {needed['DDP']} under DDP and "
        f"{needed['FSDP']} under FSDP{capacity}; it sends {sent['DDP']} and {sent['FSDP']} a step"
    )
    if not numbers["fits"]["FSDP"]:
        text += "; neither fits: take a smaller --train.micro-batch-size"
        text += ", --train.activation-checkpointing"
        if numbers["enough_ranks"]:
            text += f", or FSDP on {numbers['enough_ranks']} ranks"
    if choice["rendered"] == name:
        return f"{text}; as rendered"
    how = "To change to it" if choice["rendered"] else "If this project is not rendered so"
    return f"{text}. {how}: {change_to(name)}"


def change_to(name: str) -> str:
    """What to type to render this project for DDP, or FSDP."""
    answer = json.dumps({"parallelism": ANSWERS[name]})
    return f"cruft update --variables-to-update '{answer}'"
