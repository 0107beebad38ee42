"""Memory of a rank, predicted part by part and measured; DDP or FSDP, which follows from it."""

import gc
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..config import Config
from ..data import build_datasets
from ..device import move
from ..distributed import World, parallel
from ..model import blocks, compute_loss
from ..run.hardware import free_host_memory, in_units
from ..train import State, setup
from .timing import record_steps

ROOM = 0.85  # of a device's memory; the rest is for fragments and what others allocate


def watch(device: torch.device, action: Callable[[], Any]) -> tuple[Any, int, int]:
    """Call `action`: its result, the bytes that it leaves on the device, and its peak.

    On CUDA the caching allocator counts. On a CPU the profiler sees each tensor come and go, not
    what numpy, Python or gloo hold.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = action()
        left, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return result, left - before, peak - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as finished:
        result = action()
    profiler: Any = finished.profiler
    changes = sorted(  # the events' own running total goes on from the profile before
        (event.start_ns(), event.nbytes())
        for event in profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    )
    totals = [0, *itertools.accumulate(size for _, size in changes)]
    return result, totals[-1], max(totals)


def measure_memory(config: Config, world: World, one: Any) -> tuple[State, dict[str, Any]]:
    """Set up and take three steps: the state, and this rank's bytes, predicted and measured.

    Activations are all that forward and backward of a micro-batch take beyond the gradients. On
    several ranks they follow from those of `one` process, by the number of samples. "gathered" are
    other ranks' parameters under FSDP: of two blocks, and of what is in no block ("whole").
    """
    device = world.device
    gc.collect()  # what was set up before
    data, of_data, _ = watch(device, lambda: build_datasets(config))  # does not count
    state, of_setup, _ = watch(device, lambda: setup(config, world))
    _, of_first_step, _ = watch(device, lambda: record_steps(state, 1))  # the optimizer's state
    _, _, peak = watch(device, lambda: record_steps(state, 2))
    del data  # only now, or its release would be counted
    states = state.optimizer.state.values()
    parts: dict[str, Any] = {
        "parameters": [*state.model.parameters(), *state.model.buffers()],
        "gradients": [p for p in state.model.parameters() if p.requires_grad],
        "optimizer": [v for each in states for v in each.values() if getattr(v, "ndim", 0)],
    }
    parts = {n: sum(t.nbytes for t in parallel.local(of)) for n, of in parts.items()}
    samples = state.plan[0].places.stop - state.plan[0].places.start
    activations = one and one["activations"] * samples // one["samples"]
    if activations is None:
        _, _, most = watch(device, lambda: compute_gradients(state))
        activations = max(0, most - parts["gradients"])
        state.optimizer.zero_grad()
    size_of = {p: p.numel() * state.compute_dtype.itemsize for p in state.model.parameters()}
    in_blocks = sorted(sum(size_of[p] for p in each.parameters()) for each in blocks(state.model))
    whole = sum(size_of.values()) - sum(in_blocks[:-2])
    sharded = any(parallel.local_part(p).numel() < p.numel() for p in size_of)
    parts |= {"activations": activations, "gathered": whole if sharded else 0}
    predicted, measured = sum(parts.values()), of_setup - of_data + of_first_step + peak
    unpredictable = "" if device.type in ("cpu", "cuda") else "this device does not tell its use"
    totals = {"predicted": predicted, "measured": measured, "unpredictable": unpredictable}
    return state, {**parts, **totals, "whole": whole, "samples": samples}


def compute_gradients(state: State) -> None:
    """Forward and backward of one micro-batch."""
    batch = move(state.loader.source[state.step, state.plan[0]], state.world.device)
    with parallel.autocast(state.world, state.compute_dtype):
        loss = compute_loss(state.module, batch)
    loss.total.backward()


def ddp_or_fsdp(config: Config, one: Any, most: Any, ranks: int, device: torch.device) -> str:
    """DDP if a rank can hold everything, else FSDP; with the numbers, and how to change to it.

    `one` is the memory of one process, `most` the memory of a rank of the most processes.
    """
    state = one["parameters"] + one["gradients"] + one["optimizer"]
    sharded = state // ranks + one["whole"]
    needed = {"DDP": state + most["activations"], "FSDP": sharded + most["activations"]}
    capacity = free_host_memory() // ranks  # they share one memory
    if device.type == "cuda":
        capacity = torch.cuda.get_device_properties(device).total_memory
    name = "DDP" if needed["DDP"] <= ROOM * capacity else "FSDP"
    text = f"{name} for {ranks} ranks: a rank takes {in_units(needed['DDP'])} under DDP and "
    text += f"{in_units(needed['FSDP'])} under FSDP, of {in_units(capacity)}"
    if needed["FSDP"] > ROOM * capacity:
        text += "; neither fits: try --train.activation-checkpointing or smaller micro-batches"
    rendered = "FSDP" if hasattr(config.parallel, "replicate") else "DDP"
    return f"{text}; as rendered" if name == rendered else f"{text}. For it: {change_to(name)}"


def change_to(name: str) -> str:
    """What to type to render this project for DDP, or FSDP."""
    answer = json.dumps({"parallelism": name.lower()})
    return f"cruft update --variables-to-update '{answer}'"
