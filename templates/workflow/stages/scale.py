"""The scale stage: what more processes bring, what they cost, and whether they do the same.

Each number of processes is started anew and measures itself: `python -m` this module FOLDER reads
FOLDER/settings.json and writes FOLDER/RANKS.json.
"""

import contextlib
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import Config, load, override
from ..device import pick_device
from ..distributed import Group, World, join, leave
from ..errors import RankError, exit_code
from ..files import to_json, write_json
from ..run.hardware import in_units, usable_cores
from ..sampling import STEP, seed_random
from ..train import State, setup
from .chain import advise
from .fit import foretold
from .interleaved import median_interval
from .processes import free_host_memory, most_ranks, named, refusal, run_task
from .stage import Stage, StageConfig
from .timing import differences, peak_memory, record_steps

TOLERANCE = {"losses": 1e-4, "gradient_norms": 1e-3}  # relative
ROOM = 0.95  # of the memory: the rest is for fragments and what others allocate
LEAST_WEAK = 0.8  # efficiency, between GPUs of one machine
TIMEOUT = 3600.0  # seconds for one number of processes
COMPARED = 12  # steps whose losses are compared
TIMED, SECONDS = 30, 3.0  # timed steps, and seconds for them where steps are slow
LESS_MEMORY = (
    "--train.activation-checkpointing, a smaller --train.micro-batch-size, what `fit` says"
)
WHAT_RANKS_SHARE = (
    "for more work between synchronisations raise --train.micro-batch-size and the global batch; "
    "check the GPUs' links (nvidia-smi topo -m), --train.loader-workers and the host's cores"
)
Records = dict[int, dict[str, Any]]  # by the number of processes


def measure(config: StageConfig) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage, device, cores = Stage("scale", config), pick_device(config.device), usable_cores()
    sizes, reason = world_sizes(config, device)
    most = sizes[-1]
    threads = 1 if device.type == "cpu" else max(1, cores // most)
    records: Records = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_json(Path(folder) / "settings.json", to_json(config))
            for ranks in sizes:
                records[ranks] = run_ranks(Path(folder), ranks, threads)
    except RankError as error:
        if "out of memory" not in str(error).lower():
            raise
        failed = f"{named(sizes[len(records)], 'process')} ran out of memory"
        stage.check("memory", None, measured=failed, wanted="measured", advice=f"try {LESS_MEMORY}")
        advise(stage, f"a model that no device can hold needs FSDP: {change_to('FSDP')}")
        return stage.close()
    if most > 1:
        print("     this does not predict scaling across machines, whose network is slower")
    judge_losses(stage, records, reason)
    if not reason and device.type == "cpu" and most > cores:
        reason = f"{most} ranks take turns on {named(cores, 'core')}"
    for kind in ("strong", "weak"):
        judge_efficiency(stage, kind, records, reason, device.type)
    judge_memory(stage, records, device)
    batch = config.train.global_batch_size
    advise(stage, f"learning rate: leave it, the global batch is {batch} on any number of ranks")
    stage.figures["ranks"] = records
    return stage.close()


def world_sizes(config: StageConfig, device: torch.device) -> tuple[list[int], str]:
    """1, 2, 4 … and the most processes to start; why only 1, if so."""
    most, reason = most_ranks(config, device)
    powers = [2**k for k in range(1, most.bit_length()) if 2**k < most]
    between = [ranks for ranks in powers if not refusal(config, ranks)]
    return sorted({1, *between, most}), reason


def run_ranks(folder: Path, ranks: int, threads: int) -> dict[str, Any]:
    """What so many processes measure."""
    print(f"     {named(ranks, 'process')}, {named(threads, 'thread')} each …", flush=True)
    options = {"ranks": ranks, "OMP_NUM_THREADS": str(threads), "seconds": TIMEOUT}
    record = run_task("scale", folder, str(ranks), **options)
    strong, weak = (record[kind]["samples_per_second"] for kind in ("strong", "weak"))
    print(f"     {strong:,.0f} samples/s, {weak:,.0f} with a batch for each rank", flush=True)
    return record


def judge_losses(stage: Stage, records: Records, reason: str) -> None:
    """The first steps on any number of ranks give the losses and gradients of one."""
    one = records[1]
    # Relative; without dropout and batch statistics, so up to the order of sums.
    text = "losses differ by up to {losses:.1e}, gradient norms by up to {gradient_norms:.1e}"
    wanted = text.format(**TOLERANCE)
    if one["random"]:
        reason = "not applicable: the model draws random numbers, by rank, in evaluation too"
    if reason:
        stage.check("same_losses", None, measured=reason, wanted=wanted)
        return
    apart = {k: max(differences(one[k], r[k]).max() for r in records.values()) for k in TOLERANCE}
    measured = f"{len(one['losses'])} steps on 1 to {max(records)} ranks: {text.format(**apart)}"
    advice = "look for what depends on the rank, or on how a batch is divided: a mean where "
    advice += "compute_loss must return a sum, statistics of a batch, files read by rank"
    passed = all(apart[key] <= limit for key, limit in TOLERANCE.items())
    stage.check("same_losses", passed, measured=measured, wanted=wanted, advice=advice)


def judge_efficiency(stage: Stage, kind: str, records: Records, reason: str, device: str) -> None:
    """Samples/s of a rank over one process's; on GPUs there is a limit, else it is recorded."""
    most, name, (one, low, high) = max(records), f"{kind}_efficiency", records[1][kind]["interval"]
    by_ranks, shown = {}, []
    for n in sorted(records)[1:]:
        share = n if kind == "strong" else 1
        middle, fast, slow = (share * seconds for seconds in records[n][kind]["interval"])
        by_ranks[n] = one / middle
        shown.append(f"{n} ranks {one / middle:.0%} ({low / slow:.0%} to {high / fast:.0%})")
    stage.figures[name] = {str(n): value for n, value in by_ranks.items()}
    limit = {"weak": LEAST_WEAK, "strong": 1 / most}[kind] if device == "cuda" else 0.0
    passed, advice = (None, "") if reason else (by_ranks[most] > limit, WHAT_RANKS_SHARE)
    measured = reason or ", ".join(shown)
    wanted = f"{most} ranks above {limit:.0%}" if limit else "measured"
    stage.check(name, passed, measured=measured, wanted=wanted, advice=advice)


def judge_memory(stage: Stage, records: Records, device: torch.device) -> None:
    """A rank's peak fits into its memory; DDP if one process can hold everything, else FSDP."""
    peaks = {ranks: record["memory"]["measured"] for ranks, record in records.items()}
    capacity, shared = free_host_memory(), " that all ranks share"
    if device.type == "cuda":
        capacity, shared = torch.cuda.get_device_properties(device).total_memory, ""
    parts = [f"{named(ranks, 'rank')} {in_units(peak)}" for ranks, peak in peaks.items()]
    measured = f"a rank's peak: {', '.join(parts)}, of {in_units(capacity)}{shared}"
    if device.type == "cuda":
        with contextlib.suppress(Exception):  # a model that `fit` cannot follow
            counted = [in_units(foretold(stage.config, ranks)) for ranks in peaks]
            measured += f"; `fit` counts {', '.join(counted)}"
    passed = max(peak * (n if shared else 1) for n, peak in peaks.items()) <= ROOM * capacity
    wanted, advice = f"at most {ROOM:.0%} of the memory", f"try {LESS_MEMORY}"
    stage.check("memory", passed, measured=measured, wanted=wanted, advice=advice)
    rendered = "FSDP" if hasattr(stage.config.parallel, "replicate") else "DDP"
    if rendered == "FSDP":  # one process holds all of the state, as each rank does under DDP
        passed = peaks[1] * (max(peaks) if shared else 1) <= ROOM * capacity
    name = "DDP" if passed else "FSDP"
    end = "; as rendered" if name == rendered else f". For it: {change_to(name)}"
    advise(stage, f"{name}: one process, with the whole state, takes {in_units(peaks[1])}{end}")


def change_to(name: str) -> str:
    """What to type to render this project for DDP, or FSDP."""
    answer = json.dumps({"parallelism": name.lower()})
    return f"cruft update --variables-to-update '{answer}'"


def main() -> int:
    """Measure on as many ranks as this process was started with."""
    folder = Path(sys.argv[1])
    config = load(folder / "settings.json", StageConfig)
    world = join(config.parallel, config.device)
    record = examine(config, world)
    if world.rank == 0:
        write_json(folder / f"{world.size}.json", record)
    leave(world)
    return 0


def examine(config: Config, world: World) -> dict[str, Any]:
    """All that is measured on this number of ranks."""
    state, group = setup(config, world), Group(world)
    usual = record_steps(state, 3).seconds[-1]
    # Ranks must take equally many steps.
    steps = int(np.clip(SECONDS / group.broadcast(usual), 10, TIMED))
    strong = weak = time_steps(state, steps)
    # Before the larger batch and float32, which take more.
    peak = max(group.gather(peak_memory(world.device)))
    del state
    gc.collect()
    if world.size > 1:
        larger = {"train.global_batch_size": config.train.global_batch_size * world.size}
        state = setup(override(config, larger), world)
        record_steps(state, 2)
        weak = time_steps(state, steps)
        del state
        gc.collect()
    record = {"strong": strong, "weak": weak, "memory": {"measured": peak}}
    return record | compare(config, world)


def time_steps(state: State, steps: int) -> dict[str, Any]:
    """The pace of a state that has taken its first steps."""
    interval = median_interval(record_steps(state, steps).seconds)
    state.loader.close()
    rate = state.config.train.global_batch_size / interval.value
    return {"interval": interval, "samples_per_second": rate}


def has_drawn(state: State) -> bool:
    """Whether the last step drew random numbers from torch, as dropout does."""
    device, seed = state.world.device, state.config.train.seed
    generators = [torch] if device.type == "cpu" else [torch, getattr(torch, device.type)]
    after = [generator.get_rng_state() for generator in generators]
    seed_random(seed, STEP, state.step - 1, state.world.rank, device=device)  # as the step began
    before = [generator.get_rng_state() for generator in generators]
    return not all(map(torch.equal, after, before))


def compare(config: Config, world: World) -> dict[str, Any]:
    """Losses and gradient norms of the first steps, and whether they draw random numbers.

    In float32 and in evaluation mode: dropout and batch statistics depend on how the batch is
    divided among ranks.
    """
    state = setup(override(config, {"train.precision": "fp32"}), world)
    torch.set_float32_matmul_precision("highest")  # until the next setup; without TF32, whose
    torch.backends.cudnn.allow_tf32 = False  # rounding depends on how the batch is divided
    state.module.eval()
    losses, norms = [], []
    for _ in range(COMPARED):
        losses.append(float(record_steps(state, 1).losses[0]))
        norms.append(float(state.grad_norm))
    torch.backends.cudnn.allow_tf32 = True
    state.loader.close()
    return {"losses": losses, "gradient_norms": norms, "random": has_drawn(state)}


if __name__ == "__main__":
    sys.exit(exit_code(main))
