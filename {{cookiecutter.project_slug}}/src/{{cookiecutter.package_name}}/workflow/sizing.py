"""What the measurements of `scale` speak for: DDP or FSDP, and how large a batch."""

import json
import math
from typing import Any

from ..run.hardware import in_units

ROOM = 0.85  # of a device's memory; the rest is for fragments and what others allocate
ANSWERS = {"DDP": "ddp", "FSDP": "fsdp"}


def choose(
    whole: dict[str, Any], at_most: dict[str, Any], ranks: int, device: str
) -> dict[str, Any]:
    """DDP if a rank can hold it all, else FSDP: {"name", "rendered", "numbers"}.

    `whole` is the memory of one process, `at_most` that of a rank of the most processes; bytes. A
    rank sends 2 (n - 1) / n of the gradients in DDP's all-reduce; under FSDP (n - 1) / n of the
    parameters in each of two gatherings of every micro-batch, and of the gradients once.
    """
    state = whole["parameters"] + whole["gradients"] + whole["optimizer"]
    activations = at_most["activations"] or whole["activations"] or 0
    capacity = at_most["capacity"]
    if capacity and device == "cpu":
        capacity //= ranks  # it is one memory that they share
    on_top = activations + whole["whole"]
    needed = {"DDP": state + activations, "FSDP": state // ranks + on_top}
    others = (ranks - 1) / ranks
    traffic = {
        "DDP": 2 * others * whole["gradients"],
        "FSDP": others * (2 * at_most["micro_batches"] * at_most["traffic"] + whole["gradients"]),
    }
    fits = {name: not capacity or size <= ROOM * capacity for name, size in needed.items()}
    enough = None
    if not fits["FSDP"] and (left := ROOM * capacity - on_top) > 0:
        enough = math.ceil(state / left)
    rendered = "FSDP" if at_most["sharded"] else "DDP"
    return {
        "name": "DDP" if fits["DDP"] else "FSDP",
        "rendered": rendered if at_most["distributed"] else None,
        "numbers": {
            "ranks": ranks,
            "bytes_per_rank": needed,
            "capacity": capacity,
            "bytes_sent_per_step": {name: round(size) for name, size in traffic.items()},
            "fits": fits,
            "enough_ranks": enough,
        },
    }


def explain(choice: dict[str, Any]) -> str:
    """The choice in words, with its numbers and how to change the answer."""
    name, numbers = choice["name"], choice["numbers"]
    needed, sent = numbers["bytes_per_rank"], numbers["bytes_sent_per_step"]
    capacity = numbers["capacity"]
    text = f"{name} for {numbers['ranks']} ranks: a rank takes {in_units(needed['DDP'])} under DDP "
    text += f"and {in_units(needed['FSDP'])} under FSDP"
    text += f", of {in_units(capacity)}" if capacity else ""
    text += f"; it sends {in_units(sent['DDP'])} and {in_units(sent['FSDP'])} a step"
    if not numbers["fits"]["FSDP"]:
        more = "neither fits: take a smaller --train.micro-batch-size"
        more += ", --train.activation-checkpointing"
        if numbers["enough_ranks"]:
            more += f", or FSDP on {numbers['enough_ranks']} ranks"
        text += f"; {more}"
    if choice["rendered"] == name:
        return f"{text}; as rendered"
    how = "To change to it" if choice["rendered"] else "Where this project is not rendered so"
    return f"{text}. {how}: {change_to(name)}"


def change_to(name: str) -> str:
    """What to type to render this project for DDP, or FSDP."""
    answer = json.dumps({"parallelism": ANSWERS[name]})
    return f"cruft update --variables-to-update '{answer}'"


def advice_on_batch(batch: int, ranks: int, one: dict[str, Any]) -> str:
    """What becomes of the learning rate with more ranks, and when a larger batch stops paying."""
    text = f"learning rate: leave it, the global batch is {batch} on any number of ranks"
    noise = one["noise_scale"]
    if not noise:
        return text
    value, step = noise["value"], noise["step"]
    rule = "linear" if one["nature"]["optimizer"] == "SGD" else "sqrt"
    if value is None:
        larger, scale = batch * ranks, f"above {noise['seen']}"
    else:
        larger, scale = min(batch * ranks, int(value)), f"about {value:.{0 if value >= 10 else 1}f}"
    text += f". The gradient noise scale at step {step} is {scale} samples: "
    if larger > batch:
        text += (
            "batches up to it make good use of more ranks, beyond it they bring little. To try: "
            f"--train.global-batch-size {larger} --optim.scaling {rule} "
            f"--optim.base-batch-size {batch}"
        )
    else:
        text += f"a larger batch than {batch} would bring little there"
    return text + ". It grows while the loss falls: measure again later in the run"
