"""Measure speed, memory and results on several numbers of processes: the scale stage.

For each number of processes N, the stage runs this module with the arguments FOLDER N, under
torchrun if N is above 1. Each process reads FOLDER/settings.json, and rank 0 writes FOLDER/N.json.
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

from ..adds_up import need_not_add_up
from ..config import Config, load, override
from ..device import pick_device
from ..distributed import Group, World, join, leave, parallel
from ..errors import RankError, command_for, run_main
from ..files import read_json, to_json, write_json
from ..run.hardware import in_units, usable_cores
from ..sampling import STEP, seed_random
from ..train import State, setup
from .chain import advise
from .fit import foretold
from .interleaved import Interval, median_interval
from .processes import free_host_memory, most_ranks, named, refusal, run_task
from .stage import Stage, StageConfig
from .timing import differences, in_rounds, peak_memory, record_steps

# Allowed relative differences between one process and several.
TOLERANCE = {"losses": 1e-4, "gradient_norms": 1e-3}
# The usable fraction of memory; the rest is for fragmentation and other programs.
ROOM = 0.95
# The required weak-scaling efficiency between GPUs of one machine.
MIN_WEAK_EFFICIENCY = 0.8
# Time limit in seconds for one number of processes.
TIMEOUT = 3600.0
# The number of steps whose losses are compared.
COMPARED = 12
# Steps are timed for about `SECONDS`: at least `MIN_TIMED` and usually at most `MAX_TIMED` steps.
SECONDS = 3.0
MIN_TIMED = 10
MAX_TIMED = 30
LESS_MEMORY = (
    "--train.activation-checkpointing, a smaller --train.micro-batch-size, or settings from `fit`"
)
EFFICIENCY_ADVICE = (
    "raise --train.micro-batch-size and the global batch for more work between synchronizations; "
    "check the GPUs' links (nvidia-smi topo -m), --train.loader-workers and the host's cores"
)
# The results of `examine` by number of processes, with those of `compare` unless float32 ran out of
# memory.
Records = dict[int, dict[str, Any]]


def measure(config: StageConfig) -> int:
    """Run the stage; return 1 if a check failed, else 0."""
    stage = Stage("scale", config)
    device = pick_device(config.device)
    cores = usable_cores()
    sizes, reason = world_sizes(config, device)
    most = sizes[-1]
    # A process has the same number of threads, regardless of the number of processes, so that the
    # speeds are comparable. On a CPU this is one thread, since a core may be all that a rank has.
    threads = 1 if device.type == "cpu" else max(1, cores // most)
    records: Records = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_json(Path(folder) / "settings.json", to_json(config))
            for ranks in sizes:
                records[ranks] = run_ranks(Path(folder), ranks, threads)
    except RankError as error:
        if not is_out_of_memory(error):
            raise
        # `records` has the results of all sizes before the one that failed.
        failed_size = sizes[len(records)]
        failed = f"{named(failed_size, 'process')} ran out of memory"
        # Do not let the stage fail, since it has found what it looks for: how many ranks this model
        # needs. None means that the check neither passed nor failed.
        stage.check("memory", None, measured=failed, wanted="measured", advice=f"try {LESS_MEMORY}")
        if parallel.SHARDED:
            fit = command_for("fit", config.directory)
            advise(stage, f"`{fit} --ranks N` shows whether the model fits on N GPUs")
        else:
            advise(stage, f"a model that does not fit on a device needs FSDP: {change_to('FSDP')}")
        return stage.close()
    if most > 1:
        print("     note: scaling across machines, with a slower network, is not measured")
    judge_losses(stage, records, reason)
    # If ranks compete for cores, their losses can be compared (above), but not their speed (below).
    if not reason and device.type == "cpu" and most > cores:
        reason = f"{most} ranks compete for {named(cores, 'core')}"
    for scaling in ("strong", "weak"):
        judge_efficiency(stage, scaling, records, reason, device.type)
    judge_memory(stage, records, device)
    batch = config.train.global_batch_size
    advise(
        stage,
        f"keep the learning rate, since the global batch is {batch} on any number of ranks",
    )
    stage.figures["ranks"] = records
    return stage.close()


def world_sizes(config: StageConfig, device: torch.device) -> tuple[list[int], str]:
    """Return 1, 2, 4 ... up to the maximum number of processes and, if it is 1, the reason."""
    most, reason = most_ranks(config, device)
    sizes = [1]
    ranks = 2
    while ranks < most:
        # The parallel settings may not allow every number.
        if not refusal(config, ranks):
            sizes.append(ranks)
        ranks = 2 * ranks
    if most > 1:
        sizes.append(most)
    return sizes, reason


def run_ranks(folder: Path, ranks: int, threads: int) -> dict[str, Any]:
    """Start this many processes; return their measurements."""
    print(f"     {named(ranks, 'process')}, {named(threads, 'thread')} each …", flush=True)
    # `run_task` returns the content of the result file, whose name is this number.
    name = str(ranks)
    file = folder / f"{name}.json"
    try:
        record = run_task(
            "scale", folder, name, ranks=ranks, seconds=TIMEOUT, OMP_NUM_THREADS=str(threads)
        )
    except RankError as error:
        # The file already exists if only the steps in float32 ran out of memory: see `main`.
        if not is_out_of_memory(error) or not file.exists():
            raise
        record = read_json(file)
    strong = record["strong"]["samples_per_second"]
    weak = record["weak"]["samples_per_second"]
    print(f"     {strong:,.0f} samples/s, {weak:,.0f} with a batch for each rank", flush=True)
    return record


def is_out_of_memory(error: RankError) -> bool:
    """Return whether a process failed because a device had too little memory."""
    return "out of memory" in str(error).lower()


def judge_losses(stage: Stage, records: Records, reason: str) -> None:
    """Check that the first steps give the same losses and gradients on any number of ranks.

    `reason` is "" or the reason why that cannot be checked.
    """
    one = records[1]
    # Dropout and batch statistics are off, so the limits allow only for another order of summation.
    text = "losses differ by up to {losses:.1e}, gradient norms by up to {gradient_norms:.1e}"
    wanted = text.format(**TOLERANCE)
    if not all("losses" in record for record in records.values()):
        reason = "not measured: float32, in which losses are compared, ran out of memory"
    elif one["random"]:
        reason = "not applicable: the model draws random numbers in evaluation mode too"
    if need_not_add_up():
        reason = "not applicable: model.py declares ADDS_UP = False"
    if reason:
        stage.check("same_losses", None, measured=reason, wanted=wanted)
        return
    # Two losses that are both NaN count as equal below, so require a finite loss first.
    if not np.isfinite(np.array(one["losses"], dtype=float)).any():
        measured = "no loss is finite, not even in one process"
        advice = "lower --optim.learning-rate, and look at the data"
        stage.check("same_losses", False, measured=measured, wanted=wanted, advice=advice)
        return
    largest = dict.fromkeys(TOLERANCE, 0.0)
    for record in records.values():
        for name in TOLERANCE:
            difference = float(differences(one[name], record[name]).max())
            largest[name] = max(largest[name], difference)
    measured = f"{len(one['losses'])} steps on 1 to {max(records)} ranks: {text.format(**largest)}"
    advice = "look for code that depends on the rank or on how a batch is split: compute_loss "
    advice += "with a mean instead of a sum, statistics of a batch, files that differ by rank"
    passed = all(largest[name] <= limit for name, limit in TOLERANCE.items())
    stage.check("same_losses", passed, measured=measured, wanted=wanted, advice=advice)


def judge_efficiency(
    stage: Stage, scaling: str, records: Records, reason: str, device: str
) -> None:
    """Check the efficiency relative to one process; without GPUs only record it.

    `scaling` is "strong" (the same global batch) or "weak" (a global batch per rank). `reason` is
    "" or the reason why the efficiency cannot be measured.
    """
    most = max(records)
    # JSON stores an Interval (here of the seconds per step) as a list.
    one = Interval(*records[1][scaling]["interval"])
    efficiencies: dict[int, float] = {}
    shown: list[str] = []
    for ranks in sorted(records)[1:]:
        step = Interval(*records[ranks][scaling]["interval"])
        # Ideally, n ranks take 1/n of the time for the same batch, and the same time for n batches.
        ideal_speedup = ranks if scaling == "strong" else 1
        efficiency = one.value / (ideal_speedup * step.value)
        low = one.low / (ideal_speedup * step.high)
        high = one.high / (ideal_speedup * step.low)
        efficiencies[ranks] = efficiency
        shown.append(f"{ranks} ranks {efficiency:.0%} ({low:.0%} to {high:.0%})")
    name = f"{scaling}_efficiency"
    stage.figures[name] = {str(ranks): value for ranks, value in efficiencies.items()}
    # Without a limit, every efficiency passes.
    limit = 0.0
    if device == "cuda":
        # If the strong efficiency is below 1/n, a step on n ranks takes longer than on one.
        limit = 1 / most if scaling == "strong" else MIN_WEAK_EFFICIENCY
    wanted = "measured"
    if limit and most > 1:
        wanted = f"{most} ranks above {limit:.0%}"
    if reason:
        stage.check(name, None, measured=reason, wanted=wanted)
        return
    # Here `most` is above 1, since there is a reason if only one process was measured.
    passed = efficiencies[most] > limit
    measured = ", ".join(shown)
    stage.check(name, passed, measured=measured, wanted=wanted, advice=EFFICIENCY_ADVICE)


def judge_memory(stage: Stage, records: Records, device: torch.device) -> None:
    """Check that a rank's peak fits into its memory, and advise DDP or FSDP."""
    peaks = {ranks: record["memory"]["measured"] for ranks, record in records.items()}
    on_gpu = device.type == "cuda"
    if on_gpu:
        capacity = torch.cuda.get_device_properties(device).total_memory
        # Each rank has a device of its own, and the capacity is that of one device.
        totals = peaks
    else:
        capacity = free_host_memory()
        totals = {ranks: ranks * peak for ranks, peak in peaks.items()}
    texts = [f"{named(ranks, 'rank')} {in_units(peak)}" for ranks, peak in peaks.items()]
    measured = f"peak per rank: {', '.join(texts)}, of {in_units(capacity)}"
    if on_gpu:
        # `fit` cannot simulate all models.
        with contextlib.suppress(Exception):
            counted = [in_units(foretold(stage.config, ranks)) for ranks in peaks]
            measured += f"; `fit` predicts {', '.join(counted)}"
    else:
        measured += " shared by all ranks"
    passed = max(totals.values()) <= ROOM * capacity
    wanted = f"at most {ROOM:.0%} of the memory"
    stage.check("memory", passed, measured=measured, wanted=wanted, advice=f"try {LESS_MEMORY}")
    # If this project uses DDP, the peaks above are those of DDP.
    fits_ddp = passed
    if parallel.SHARDED:
        # The single process holds the whole state, as each rank would with DDP. On a CPU all ranks
        # share one memory.
        ranks_per_memory = 1 if on_gpu else max(records)
        fits_ddp = ranks_per_memory * peaks[1] <= ROOM * capacity
    current = "FSDP" if parallel.SHARDED else "DDP"
    advised = "DDP" if fits_ddp else "FSDP"
    end = ", which this project uses" if advised == current else f": {change_to(advised)}"
    advise(
        stage, f"one process with the whole state needs {in_units(peaks[1])}: use {advised}{end}"
    )


def change_to(name: str) -> str:
    """Return the command that changes this project to DDP or FSDP."""
    answer = json.dumps({"parallelism": name.lower()})
    return f"cruft update --variables-to-update '{answer}'"


def main() -> int:
    """Measure on the ranks of this process group, and write the result."""
    folder = Path(sys.argv[1])
    config = load(folder / "settings.json", StageConfig)
    world = join(config.parallel, config.device)
    file = folder / f"{world.size}.json"
    record = examine(config, world)
    if world.rank == 0:
        write_json(file, record)
    # The steps of `compare` may run out of memory. Then the file keeps the results of `examine`.
    record |= compare(config, world)
    if world.rank == 0:
        write_json(file, record)
    leave(world)
    return 0


def examine(config: Config, world: World) -> dict[str, Any]:
    """Measure speed and memory on this number of ranks."""
    state = setup(config, world)
    group = Group(world)
    # The first two steps warm up; the third one shows how long a step takes.
    step_seconds = record_steps(state, 3).seconds[-1]
    # Rank 0 decides, since all ranks must take the same number of steps.
    steps = int(np.clip(SECONDS / group.broadcast(step_seconds), MIN_TIMED, MAX_TIMED))
    # A round is one step for each loader worker. `in_rounds` needs at least two rounds.
    steps = max(steps, 2 * config.train.loader_workers)
    strong = time_steps(state, steps)
    # A single process has the same batch for weak scaling.
    weak = strong
    # Read the peak now: the larger batch, which follows, may need more memory.
    peak = max(group.gather(peak_memory(world.device)))
    # Free this model before the next one is built.
    del state
    gc.collect()
    if world.size > 1:
        larger = {"train.global_batch_size": config.train.global_batch_size * world.size}
        state = setup(override(config, larger), world)
        record_steps(state, 2)
        weak = time_steps(state, steps)
        del state
        gc.collect()
    return {"strong": strong, "weak": weak, "memory": {"measured": peak}}


def time_steps(state: State, steps: int) -> dict[str, Any]:
    """Time steps of a state that is warmed up, then close its loader."""
    seconds = record_steps(state, steps).seconds
    interval = median_interval(in_rounds(seconds, state.config.train.loader_workers))
    state.loader.close()
    rate = state.config.train.global_batch_size / interval.value
    return {"interval": interval, "samples_per_second": rate}


def has_drawn(state: State) -> bool:
    """Return whether the last step drew random numbers from torch, as dropout does."""
    device = state.world.device
    seed = state.config.train.seed
    # `torch.get_rng_state` is for the CPU's generator, `torch.cuda.get_rng_state` for a GPU's.
    modules: list[Any] = [torch]
    if device.type != "cpu":
        modules.append(torch.get_device_module(device))
    after = [module.get_rng_state() for module in modules]
    # Seed again as `train_step` did for the last step, to get the states before that step. If they
    # differ from the states after it, the step has drawn numbers.
    last_step = state.step - 1
    seed_random(seed, STEP, last_step, state.world.rank, device=device)
    before = [module.get_rng_state() for module in modules]
    for state_before, state_after in zip(before, after, strict=True):
        if not torch.equal(state_before, state_after):
            return True
    return False


def compare(config: Config, world: World) -> dict[str, Any]:
    """Return losses and gradient norms of the first steps, and whether they draw random numbers.

    The steps run in evaluation mode, since dropout and batch statistics depend on how the batch is
    divided among ranks, and in float32, so that rounding differs little.
    """
    state = setup(override(config, {"train.precision": "fp32"}), world)
    # TF32 would round more, depending on how the batch is divided.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    state.module.eval()
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(COMPARED):
        losses.append(float(record_steps(state, 1).losses[0]))
        norms.append(float(state.grad_norm))
    # Restore torch's default. For matrix products, "highest" is the default already.
    torch.backends.cudnn.allow_tf32 = True
    state.loader.close()
    return {"losses": losses, "gradient_norms": norms, "random": has_drawn(state)}


if __name__ == "__main__":
    sys.exit(run_main(main))
