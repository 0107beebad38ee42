"""Memory of a rank, as predicted part by part and as measured; and DDP or FSDP, which follows."""

import gc
import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
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


def set_up_and_measure(config: Config, world: World) -> tuple[State, int | None]:
    """Set up and take three steps: the state, and the peak bytes of this rank's last two steps.

    In the first step the optimizer has no state yet. On CUDA the caching allocator counts. On a CPU
    the profiler sees each tensor come and go (not numpy, Python or gloo); the data, which is read
    once more to count its tensors, is left out. None on a device that cannot tell.
    """
    gc.collect()  # what was set up before
    device, tracing = world.device, {"activities": [ProfilerActivity.CPU], "profile_memory": True}
    if device.type == "cpu":
        with profile(**tracing) as of_data:
            data = build_datasets(config)
        with profile(**tracing) as of_steps:
            state = setup(config, world)
            record_steps(state, 1)
            with record_function(MARK):
                record_steps(state, 2)
        peak = max(allocated(of_steps)) - allocated(of_data)[-1]
        del data  # only now: its tensors must not be counted as released
        return state, peak
    counted = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if counted else 0
    state = setup(config, world)
    record_steps(state, 1)
    if counted:
        torch.cuda.reset_peak_memory_stats(device)
    record_steps(state, 2)
    return state, torch.cuda.max_memory_allocated(device) - before if counted else None


def allocated(finished: profile) -> list[int]:
    """Bytes held after each allocation and release since the profile began; from MARK on, if any.

    The events' own running total cannot be used: it goes on from the profile before.
    """
    profiler: Any = finished.profiler
    events = profiler.kineto_results.events()
    begin = next((event.start_ns() for event in events if event.name() == MARK), 0)
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    )
    totals = itertools.accumulate(size for _, size in changes)
    return [total for (at, _), total in zip(changes, totals, strict=True) if at >= begin] or [0]


def memory_of(state: State, measured: int | None, one: dict[str, Any] | None) -> dict[str, Any]:
    """Bytes of this rank part by part, and what a forecast for other numbers of ranks needs.

    "gathered" are parameters of other ranks that are here for a while: "whole", what FSDP has at
    once (two blocks and all that is in no block), if the model is sharded. Activations are measured
    on `one` process, where the model is whole; elsewhere they follow from the micro-batch's size.
    """
    needed = expected_memory(state.model, state.optimizer, 0)
    size_of = {p: p.numel() * state.compute_dtype.itemsize for p in state.model.parameters()}
    in_blocks = sorted(sum(size_of[p] for p in one.parameters()) for one in blocks(state.model))
    traffic = sum(size_of.values())
    whole = traffic - sum(in_blocks[:-2])
    sharded = any(parallel.local_part(p).numel() < p.numel() for p in size_of)
    places = state.plan[0].places
    samples = places.stop - places.start
    if one:
        activations = one["activations"] * samples // one["samples"]
    else:
        activations = kept_for_backward(state)
    parts = {name: getattr(needed, name) for name in ("parameters", "gradients", "optimizer")}
    parts |= {"activations": activations, "gathered": whole if sharded else 0}
    unpredictable = ""
    if measured is None:
        unpredictable = "this device does not tell what was allocated"
    elif state.config.train.activation_checkpointing:
        unpredictable = "with --train.activation-checkpointing what is kept cannot be seen"
    elif needed.guessed:
        unpredictable = "the optimizer's state could only be guessed"
    return {
        **parts,
        "predicted": sum(parts.values()),
        "measured": measured,
        "unpredictable": unpredictable,
        "whole": whole,
        "traffic": traffic,
        "micro_batches": len(state.plan),
        "samples": samples,
    }


def kept_for_backward(state: State) -> int:
    """Bytes that the forward of a micro-batch keeps for backward, without the weights.

    With the two gradients that backward starts from, of an operator's output and input, each taken
    to be as large as the largest tensor that is kept.
    """
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)  # alive, so that no two of them have the same address
        return tensor

    batch = move(state.loader.source[state.step, state.plan[0]], state.world.device)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        parallel.autocast(state.world, state.compute_dtype),
    ):
        compute_loss(state.module, batch)
    weights = storages([*state.model.parameters(), *state.model.buffers()])
    sizes = [size for address, size in storages(kept).items() if address not in weights]
    return sum(sizes) + 2 * max(sizes, default=0)


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Size by address of the memory behind some tensors, each piece once."""
    behind = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in behind}


def ddp_or_fsdp(
    config: Config, one: dict[str, Any], most: dict[str, Any], ranks: int, device: torch.device
) -> str:
    """DDP if a rank can hold everything, else FSDP; with the numbers, and how to change to it.

    `one` is the memory of one process, `most` the memory of a rank of the most processes. A rank
    sends 2 (n - 1) / n of the gradients in DDP's all-reduce; under FSDP (n - 1) / n of the
    parameters in each of two gatherings of every micro-batch, and of the gradients once.
    """
    state = one["parameters"] + one["gradients"] + one["optimizer"]
    not_shared = most["activations"] + one["whole"]
    needed = {"DDP": state + most["activations"], "FSDP": state // ranks + not_shared}
    gathered = 2 * most["micro_batches"] * most["traffic"]
    sent = {"DDP": 2 * one["gradients"], "FSDP": gathered + one["gradients"]}
    if device.type == "cuda":
        capacity = torch.cuda.get_device_properties(device).total_memory
    else:
        capacity = (free_host_memory() or 0) // ranks  # they share one memory
    room = ROOM * capacity or math.inf  # where it is unknown
    name = "DDP" if needed["DDP"] <= room else "FSDP"
    text = f"{name} for {ranks} ranks: a rank takes {in_units(needed['DDP'])} under DDP and "
    text += f"{in_units(needed['FSDP'])} under FSDP"
    text += f", of {in_units(capacity)}" if capacity else ""
    a, b = (in_units((ranks - 1) / ranks * sent[kind]) for kind in ("DDP", "FSDP"))
    text += f"; it sends {a} and {b} a step"
    if needed["FSDP"] > room:
        text += "; neither fits: take a smaller --train.micro-batch-size"
        text += ", --train.activation-checkpointing"
        if room > not_shared:
            text += f", or FSDP on {math.ceil(state / (room - not_shared))} ranks"
    rendered = "FSDP" if hasattr(config.parallel, "replicate") else "DDP"
    return f"{text}; as rendered" if name == rendered else f"{text}. For it: {change_to(name)}"


def change_to(name: str) -> str:
    """What to type to render this project for DDP, or FSDP."""
    answer = json.dumps({"parallelism": name.lower()})
    return f"cruft update --variables-to-update '{answer}'"
