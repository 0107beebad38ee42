"""The fourth stage: what more processes bring, what they cost, and whether they do the same.

Each number of processes is started anew and measures itself: `python -m` this module FOLDER reads
FOLDER/settings.json and what one process found, FOLDER/1.json, and writes FOLDER/<ranks>.json.
"""

import gc
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ..config import Config, load, override
from ..device import pick_device
from ..distributed import World, join, leave
from ..errors import RankError, exit_code
from ..files import to_json, write_json
from ..run.hardware import in_units, usable_cores
from ..train import State, setup, train_step
from . import memory_forecast as forecast
from .interleaved import median_interval
from .processes import most_ranks, named, refusal, run_task
from .stage import Stage, StageConfig
from .timing import difference, has_drawn, record_steps

TOLERANCE = {"losses": 1e-4, "gradient_norms": 1e-3}  # relative
FACTOR = 1.5  # between predicted and measured memory
LEAST_WEAK = 0.8  # efficiency, between GPUs of one machine
MOST = 1.25  # efficiency; caches give some tenths above 1, other load on the machine any
TIMEOUT = 3600.0  # seconds for one number of processes
COMPARED = 12  # steps whose losses are compared
TIMED, SECONDS = 30, 3.0  # timed steps, and seconds for them where steps are slow
KINDS = ("strong", "weak")  # scaling: with the same global batch, with one that grows
ELSEWHERE = {
    "cpu": "across machines or on GPUs: here the processes share memory and caches",
    "cuda": "across machines, whose network is slower",
}
Records = dict[int, dict[str, Any]]  # by the number of processes


def measure(config: StageConfig) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage, device = Stage("scale", config), pick_device(config.device)
    sizes, reason = world_sizes(config, device)
    most, cores = sizes[-1], usable_cores()
    threads = 1 if device.type == "cpu" else max(1, cores // most)
    records: Records = {}
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "settings.json", to_json(config))
        options = {"threads": threads, "seconds": TIMEOUT}
        for ranks in sizes:
            print(f"     {named(ranks, 'process')}, {named(threads, 'thread')} each …", flush=True)
            try:
                records[ranks] = run_task("scale", Path(folder), str(ranks), ranks=ranks, **options)
            except RankError as error:
                if "out of memory" not in str(error).lower():
                    raise
                return give_up(stage, ranks)
            text = f"{records[ranks]['strong']['samples_per_second']:,.0f} samples/s"
            if ranks > 1:
                grown = records[ranks]["weak"]["samples_per_second"]
                text += f" with the same batch, {grown:,.0f} with a batch for each rank"
            print(f"     {text}", flush=True)
    if most > 1:
        print(f"     this does not predict scaling {ELSEWHERE[device.type]}", flush=True)
    judge_losses(stage, records, reason)
    for kind in KINDS:
        judge_efficiency(stage, kind, records, reason, device.type, cores)
    judge_memory(stage, records)
    one, last, ranks = records[1], records[most], max(2, config.workflow.ranks, most)
    stage.advise(forecast.ddp_or_fsdp(config, one["memory"], last["memory"], ranks, device))
    batch = config.train.global_batch_size
    stage.advise(f"learning rate: leave it, the global batch is {batch} on any number of ranks")
    stage.figures["ranks"] = records
    return stage.close()


def world_sizes(config: StageConfig, device: torch.device) -> tuple[list[int], str]:
    """1, 2, 4 … and the most processes to start; why only 1, if so."""
    most, reason = most_ranks(config, device)
    powers = [2**k for k in range(1, most.bit_length()) if 2**k < most]
    between = [ranks for ranks in powers if not refusal(config, ranks)]
    return sorted({1, *between, most}), reason


def give_up(stage: Stage, ranks: int) -> int:
    """Nothing can be compared: so many processes ran out of memory."""
    reason = f"{named(ranks, 'process')} ran out of memory, and all is compared with one"
    for name in ("same_losses", "strong_efficiency", "weak_efficiency", "memory"):
        stage.check(name, None, measured=reason, wanted="measured")
    stage.advise(
        "measure a smaller relative: fewer layers, a smaller --train.micro-batch-size or "
        "--train.activation-checkpointing. A model that no device can hold needs FSDP: "
        + forecast.change_to("FSDP")
    )
    return stage.close()


def judge_losses(stage: Stage, records: Records, reason: str) -> None:
    """The first steps on any number of ranks give the losses and gradients of one."""
    nature, one = records[1]["nature"], records[1]
    limits = "losses within {losses:.0e}, gradient norms within {gradient_norms:.0e}"
    wanted = f"the same up to the order of sums: {limits.format(**TOLERANCE)}"
    if nature["statistics"]:
        reason = f"not applicable: {nature['statistics']} takes statistics of what each rank sees"
    elif nature["always_random"]:
        reason = "not applicable: the model draws random numbers, by rank, in evaluation too"
    if reason:
        stage.check("same_losses", None, measured=reason, wanted=wanted)
        return
    apart = {
        key: max(
            difference(a, b)
            for record in records.values()
            for a, b in zip(one[key], record[key], strict=True)
        )
        for key in TOLERANCE
    }
    dropout = "; without dropout, which draws by rank" if nature["random"] else ""
    stage.check(
        "same_losses",
        all(apart[key] <= limit for key, limit in TOLERANCE.items()),
        measured=f"{len(one['losses'])} losses on 1 to {max(records)} ranks differ by at most "
        f"{apart['losses']:.1e} (relative), gradient norms by {apart['gradient_norms']:.1e}"
        f"{dropout}",
        wanted=wanted,
        advice="look for what depends on the rank, or on how a batch is divided: a mean where "
        "compute_loss must return a sum, statistics of a batch, files read by rank",
    )


def efficiencies(kind: str, records: Records) -> dict[int, tuple[float, float, float]]:
    """Samples/s of a rank over one process's, with its interval, by the number of ranks."""
    value, low, high = records[1][kind]["interval"]
    result = {}
    for ranks in sorted(records.keys() - {1}):
        share = ranks if kind == "strong" else 1
        middle, shortest, longest = (share * t for t in records[ranks][kind]["interval"])
        result[ranks] = (value / middle, low / longest, high / shortest)
    return result


def judge_efficiency(
    stage: Stage, kind: str, records: Records, reason: str, device: str, cores: int
) -> None:
    """On GPUs there is a limit; for processes that share a CPU it is only recorded."""
    most, found = max(records), efficiencies(kind, records)
    name = f"{kind}_efficiency"
    stage.figures[name] = {str(ranks): value for ranks, (value, *_) in found.items()}
    if not reason and device == "cpu" and most > cores:
        reason = f"{most} ranks take turns on {named(cores, 'core')}"
    limit = {"weak": LEAST_WEAK, "strong": 1 / most}[kind] if device == "cuda" else 0.0
    shown = ", ".join(f"{n} ranks {v:.0%} ({a:.0%} to {b:.0%})" for n, (v, a, b) in found.items())
    passed, measured, advice = None, reason, ""
    if not reason and any(low > MOST for _, low, _ in found.values()):
        measured = f"{shown}: more than ranks can bring, so one alone had less of the machine"
        advice = "measure again when nothing else runs on this machine"
    elif not reason:
        batch = "the same batch" if kind == "strong" else "a batch for each rank"
        passed, measured = found[most][0] > limit, f"{shown}, {batch}"
        advice = (
            "if a rank computes too little between two synchronisations, raise "
            "--train.micro-batch-size and --train.global-batch-size; see the links of the GPUs "
            "(nvidia-smi topo -m), and what the ranks share: reading data (--train.loader-workers) "
            "and the host's cores"
        )
    wanted = f"{most} ranks above {limit:.0%}" if limit else "measured"
    stage.check(name, passed, measured=measured, wanted=wanted, advice=advice)
    if passed and most * found[most][0] <= 1:
        stage.advise(f"{most} ranks do not do more than one here: {kind} scaling brings nothing")


def judge_memory(stage: Stage, records: Records) -> None:
    """A rank takes what was forecast."""
    wanted = f"within a factor of {FACTOR:g}"
    memory = {ranks: record["memory"] for ranks, record in records.items()}
    if reason := memory[1]["unpredictable"]:
        stage.check("memory", None, measured=reason, wanted=wanted)
        return
    ratios = [m["measured"] / max(1, m["predicted"]) for m in memory.values()]
    stage.check(
        "memory",
        all(1 / FACTOR <= ratio <= FACTOR for ratio in ratios),
        measured="; ".join(
            f"{named(ranks, 'rank')} predicted {in_units(m['predicted'])}, "
            f"measured {in_units(m['measured'])}"
            for ranks, m in memory.items()
        ),
        wanted=wanted,
        advice="something is allocated that is neither weights, gradients, optimizer state nor "
        "kept for backward: see the operators of `profile`, with memory",
    )


def main() -> int:
    """Measure on as many ranks as this process was started with."""
    folder = Path(sys.argv[1])
    config = load(folder / "settings.json", StageConfig)
    world = join(config.parallel, config.device)
    one = None if world.size == 1 else json.loads((folder / "1.json").read_text("utf-8"))
    record = examine(config, world, one)
    if world.rank == 0:
        write_json(folder / f"{world.size}.json", record)
    leave(world)
    return 0


def examine(config: Config, world: World, one: dict[str, Any] | None) -> dict[str, Any]:
    """All that is measured on this number of ranks; `one` is what one process measured before."""
    record = {"nature": one["nature"] if one else nature_of(config, world)}
    record |= compare(config, world, record["nature"])
    state, peak = forecast.set_up_and_measure(config, world)
    record["memory"] = forecast.memory_of(state, peak, one and one["memory"])
    if one:
        steps = one["steps"]  # on all ranks equally many
    else:
        steps = max(10, min(TIMED, int(SECONDS / record_steps(state, 3).seconds[-1])))
    record["steps"] = steps
    record["strong"] = record["weak"] = time_steps(state, steps)
    if one:
        del state
        gc.collect()
        larger = {"train.global_batch_size": config.train.global_batch_size * world.size}
        state = setup(override(config, larger), world)
        record_steps(state, 2)
        record["weak"] = time_steps(state, steps)
    return record


def time_steps(state: State, steps: int) -> dict[str, Any]:
    """The pace of a state that has taken its first steps."""
    seconds = record_steps(state, steps).seconds
    state.loader.close()
    return {
        "interval": median_interval(seconds),
        "samples_per_second": state.config.train.global_batch_size / median(seconds),
    }


def nature_of(config: Config, world: World) -> dict[str, Any]:
    """What a step of this model does that depends on how the batch is divided among ranks.

    "statistics" names a module or buffer that takes statistics of a batch; "random" says whether
    random numbers are drawn in training, "always_random" whether in evaluation too.
    """
    state = setup(config, world)
    saved = state.model.state_dict()
    before = {name: b.clone() for name, b in state.model.named_buffers() if name in saved}
    train_step(state, state.loader.next())
    random, after = has_drawn(state), dict(state.model.named_buffers())
    statistics_of = [name for name, m in state.model.named_modules() if isinstance(m, _BatchNorm)]
    statistics_of += [name for name, b in before.items() if not torch.equal(b, after[name])]
    state.module.eval()
    train_step(state, state.loader.next())
    state.loader.close()
    return {
        "statistics": next(iter(statistics_of), None),
        "random": random,
        "always_random": random and has_drawn(state),
    }


def compare(config: Config, world: World, nature: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradient norms of the first steps, in float32, without what is random."""
    state = setup(override(config, {"train.precision": "fp32"}), world)
    torch.set_float32_matmul_precision("highest")  # until the next setup; without TF32, whose
    torch.backends.cudnn.allow_tf32 = False  # rounding depends on how the batch is divided
    state.module.train(not nature["random"])
    losses, norms = [], []
    for _ in range(COMPARED):
        losses.append(float(record_steps(state, 1).losses[0]))
        norms.append(float(state.grad_norm))
    torch.backends.cudnn.allow_tf32 = True
    state.loader.close()
    return {"losses": losses, "gradient_norms": norms}


if __name__ == "__main__":
    sys.exit(exit_code(main))
