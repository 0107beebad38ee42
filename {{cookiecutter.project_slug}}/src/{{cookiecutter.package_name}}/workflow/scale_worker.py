"""One rank of the scale stage: `python -m … FOLDER`, as one plain process or under torchrun.

Reads the settings from FOLDER/settings.json and what one process found from FOLDER/1.json; leaves
what it measures on N ranks in FOLDER/N.json.
"""

import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ..config import Config, from_json, override
from ..distributed import Group, World, parallel
from ..errors import RankError, exit_code
from ..files import write_json
from ..train import State, setup, train_step
from .allocations import memory_of, peak_of_steps
from .measuring import Steps, has_drawn, median_interval, record_steps, spread
from .noise import go_to_the_run, gradient_norms, noise_scale

COMPARED = 12  # steps whose losses are compared
WINDOW, WINDOWS = 6, 6  # steps in a row, and how often; the first of a window is not counted
NOISE_SECONDS = 60.0  # for gradients of small batches, where steps are slow
SECONDS = 3.0  # for the timed steps, where steps are slow


def main() -> int:
    """Measure on however many ranks there are."""
    folder = Path(sys.argv[1])
    config = from_json(Config(), folder / "settings.json", leave_out=("fresh", "init_from"))
    world = parallel.setup(config.parallel, config.device)
    one = folder / "1.json"
    record = examine(config, world, json.loads(one.read_text("utf-8")) if one.exists() else None)
    if world.rank == 0:
        write_json(folder / f"{world.size}.json", record)
    parallel.teardown(world)
    return 0


def examine(config: Config, world: World, one: dict[str, Any] | None) -> dict[str, Any]:
    """All that is measured on this number of ranks; `one` is what one process has found."""
    nature = one["nature"] if one else nature_of(config, world)
    record = {"nature": nature, **compare(config, world, nature)}
    record |= same_batch(config, world, one and one["windows"])
    larger = {"train.global_batch_size": config.train.global_batch_size * world.size}
    if world.size > 1:
        record["weak"] = larger_batch(override(config, larger), world, record["windows"])
    else:
        record["weak"] = record["strong"]
    return record


def same_batch(config: Config, world: World, windows: int | None) -> dict[str, Any]:
    """Speed and memory at the batch that was set; without `windows`, as many as there is time for.

    Memory is that of the second step and the third: in the first the optimizer has no state yet.
    """
    with peak_of_steps(config, world.device) as peak:
        state = setup(config, world)
        record_steps(state, 1)
        peak.begin()
        record_steps(state, 2)
    alone, problem = on_its_own(config, world) if world.distributed else (state, "")
    memory = memory_of(state, alone, peak)
    if windows is None:
        each = float(record_steps(state, 3).seconds[-1])
        windows = max(2, min(WINDOWS, int(SECONDS / (WINDOW * each))))
    strong = pace(state, alone, windows) | {"problem": problem}
    return {"strong": strong, "memory": memory, "windows": windows}


def larger_batch(config: Config, world: World, windows: int) -> dict[str, Any]:
    """Speed at a batch that grows with the ranks."""
    gc.collect()
    state = setup(config, world)
    record_steps(state, 2)
    alone, problem = on_its_own(config, world)
    return pace(state, alone, windows) | {"problem": problem}


def pace(state: State, alone: State | None, windows: int) -> dict[str, Any]:
    """Seconds of a step, over so many windows of steps, and the share that is communication.

    That is what steps take longer than those of `alone`, window by window: the same work of the
    same processes, which then exchange nothing. So it is what is not hidden behind computing, with
    the waiting for each other; under FSDP with what sharding costs or saves besides.
    """
    together: list[Steps] = []
    spent = []
    for _ in range(windows):
        together.append(record_steps(state, WINDOW).after(1))
        if alone and alone is not state:
            apart = statistics.median(record_steps(alone, WINDOW).seconds[1:])
            spent.append(1 - apart / statistics.median(together[-1].seconds))
    for loader in (state.loader, *([alone.loader] if alone else [])):
        loader.close()
    seconds = sum(together[1:], together[0]).seconds
    communication = max(0.0, statistics.median(spent)) if spent else None
    return {
        "step_seconds": spread(seconds),
        "interval": median_interval(seconds),
        "samples_per_second": state.config.train.global_batch_size / statistics.median(seconds),
        "communication": 0.0 if alone is state else communication,
    }


def nature_of(config: Config, world: World) -> dict[str, Any]:
    """What a step of this model does that depends on how the batch is divided among ranks.

    "statistics" names a module or buffer that takes statistics of a batch; "random" says whether
    random numbers are drawn in training, "always_random" whether in evaluation too; then the
    optimizer's class, whose name says how its learning rate goes with the batch.
    """
    state = setup(config, world)
    saved = state.model.state_dict()
    before = {name: b.clone() for name, b in state.model.named_buffers() if name in saved}
    random = draws(state)
    found = [name for name, m in state.model.named_modules() if isinstance(m, _BatchNorm)]
    after = dict(state.model.named_buffers())
    found += [name for name, buffer in before.items() if not torch.equal(buffer, after[name])]
    state.module.eval()
    always = random and draws(state)
    state.loader.close()
    return {
        "statistics": found[0] if found else None,
        "random": random,
        "always_random": always,
        "optimizer": type(state.optimizer).__name__,
    }


def draws(state: State) -> bool:
    """Whether a step draws random numbers."""
    train_step(state, state.loader.next())
    return has_drawn(state)


def compare(config: Config, world: World, nature: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradient norms of the first steps, in float32, without what is random.

    On one process also the gradient noise scale at the end of these steps.
    """
    state = setup(override(config, {"train.precision": "fp32"}), world)
    torch.set_float32_matmul_precision("highest")  # until the next setup; without TF32, whose
    torch.backends.cudnn.allow_tf32 = False  # rounding depends on how the batch is divided
    if nature["random"]:
        state.module.eval()
    losses, norms = [], []
    for _ in range(COMPARED):
        found = record_steps(state, 1)
        losses.append(float(found.losses[0]))
        norms.append(float(state.grad_norm))
    noise = None
    if world.size == 1 and not nature["statistics"]:
        state.module.train()
        go_to_the_run(state)
        batches = max(4, min(16, int(NOISE_SECONDS / found.seconds[0])))
        noise = noise_scale(*gradient_norms(state, batches)) | {"step": state.step}
    torch.backends.cudnn.allow_tf32 = True
    state.loader.close()
    return {"losses": losses, "gradient_norms": norms, "noise_scale": noise}


def on_its_own(config: Config, world: World) -> tuple[State | None, str]:
    """This rank's share of the work with no other rank to talk to; None, and why, if not all can.

    The whole model has to fit on each rank then.
    """
    held: list[State] = []

    def build() -> None:
        held.append(setup(config, World(world.rank, world.size, world.device)))
        record_steps(held[0], 2)

    try:
        Group(world).agree(build)
    except RankError as error:
        return None, str(error).splitlines()[0]
    return held[0], ""


if __name__ == "__main__":
    sys.exit(exit_code(main))
