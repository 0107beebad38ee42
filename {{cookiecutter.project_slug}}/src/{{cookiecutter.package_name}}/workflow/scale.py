"""The fourth stage: what more processes bring, what they cost, and whether they do the same.

Each number of processes is started anew and measures itself (`scale_worker`); here it is judged.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..config import Config, to_json
from ..device import pick_device
from ..distributed import parallel
from ..errors import RankError, UserError
from ..files import write_json
from ..run.hardware import in_units
from . import processes
from .gates import PACKAGE, Stage, machine
from .measuring import difference
from .sizing import advice_on_batch, change_to, choose, explain

TOLERANCE = {"losses": 1e-4, "gradient_norms": 1e-3}  # relative
FACTOR = 1.5  # between predicted and measured memory
LEAST_WEAK = 0.8  # efficiency, between GPUs of one machine
MOST = 1.25  # efficiency; caches give some tenths more than 1, and other load on the machine any
PATIENCE = 3600.0  # seconds
Records = dict[int, dict[str, Any]]


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("scale", config)
    device = pick_device(config.device)
    sizes, reason = world_sizes(config, device)
    cores = machine(config.device)["cores"]
    threads = 1 if device.type == "cpu" else max(1, cores // sizes[-1])
    stage.figures["threads"] = threads
    records: Records = {}
    with tempfile.TemporaryDirectory() as place:
        write_json(Path(place) / "settings.json", to_json(config))
        for ranks in sizes:
            print(f"     {named(ranks, 'process')}, {named(threads, 'thread')} each …", flush=True)
            try:
                records[ranks] = run_ranks(Path(place), ranks, threads)
            except RankError as error:
                if "out of memory" not in str(error).lower():
                    raise
                return give_up(stage, ranks)
            print(f"     {summary(ranks, records[ranks])}", flush=True)
    if len(sizes) > 1:
        print("     communication and waiting: what the same processes save by exchanging nothing")
        print(f"     {CANNOT_TELL[device.type]}", flush=True)
    judge_losses(stage, records, reason)
    for kind in ("strong", "weak"):
        judge_efficiency(stage, kind, records, reason, device.type, cores)
    judge_memory(stage, records)
    wanted = max(2, config.workflow.ranks, sizes[-1])
    choice = choose(records[1]["memory"], records[sizes[-1]]["memory"], wanted, device.type)
    stage.advise(explain(choice))
    stage.advise(advice_on_batch(config.train.global_batch_size, wanted, records[1]))
    stage.figures |= figures_of(records) | {"choice": choice}
    return stage.close()


CANNOT_TELL = {
    "cpu": "these processes share the memory bandwidth and the caches of one machine and talk "
    "through its memory: how it goes between machines, or on GPUs, this cannot tell",
    "cuda": "GPUs of one machine: between machines the network is slower, which this cannot tell",
}


def world_sizes(config: Config, device: torch.device) -> tuple[list[int], str]:
    """1, 2, 4 … and the most processes to start; why only 1, if so. UserError if they cannot be."""
    given, batch = config.workflow.ranks, config.train.global_batch_size
    here = torch.cuda.device_count() if device.type == "cuda" else given
    most = given or min(batch, {"cuda": here, "cpu": 2}.get(device.type, 1))
    if given == 1:
        return [1], "one process was asked for"
    if batch == 1:
        return [1], "--train.global-batch-size 1 is nothing to share out"
    if most == 1:
        return [1], "there is one device here; --device cpu shows all but its speed"
    if device.type not in CANNOT_TELL or config.device == f"cuda:{device.index}":
        return [1], f"--device {config.device} is one device; give cpu, or cuda for all GPUs"
    if most > here > 0:
        raise UserError(f"--workflow.ranks {most}: there are {here} GPUs here")
    if most > batch:
        raise UserError(
            f"--workflow.ranks {most} is more than --train.global-batch-size {batch}, which is "
            "shared out: lower it, or raise the batch"
        )
    if reason := refusal(config, most):
        return [1], reason
    between = (2**k for k in range(1, most.bit_length()) if 2**k < most)
    return [1, *(ranks for ranks in between if not refusal(config, ranks)), most], ""


def refusal(config: Config, ranks: int) -> str:
    """Why so many processes cannot share the work, if they cannot."""
    try:
        parallel.check_ranks(config.parallel, ranks)
    except UserError as error:
        return str(error)
    return ""


def give_up(stage: Stage, ranks: int) -> int:
    """Nothing can be compared: so many ranks ran out of memory."""
    reason = f"{named(ranks, 'process')} ran out of memory, and all is compared with one"
    for name in ("same_losses", "strong_efficiency", "weak_efficiency", "memory"):
        stage.check(name, None, measured=reason, wanted="measured")
    stage.advise(
        "to measure a smaller relative: fewer layers, a smaller --train.micro-batch-size or "
        "--train.activation-checkpointing. A model that no device can hold needs FSDP: "
        + change_to("FSDP")
    )
    return stage.close()


def run_ranks(folder: Path, ranks: int, threads: int) -> dict[str, Any]:
    """What so many processes measured: one of them plain, several under torchrun."""
    words, module = str(folder), f"{PACKAGE}.workflow.scale_worker"
    with processes.started(
        ranks if ranks > 1 else 0, words, module=module, threads=threads
    ) as process:
        processes.finish(process, f"measuring on {named(ranks, 'process')}", PATIENCE)
    return json.loads((folder / f"{ranks}.json").read_text("utf-8"))


def judge_losses(stage: Stage, records: Records, reason: str) -> None:
    """The first steps on any number of ranks give the losses and gradients of one."""
    nature = records[1]["nature"]
    wanted = "the order of sums apart, the same: within {losses:.0e} and {gradient_norms:.0e}"
    wanted = wanted.format(**TOLERANCE)
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
            for n in records
            for a, b in zip(records[1][key], records[n][key], strict=True)
        )
        for key in TOLERANCE
    }
    count = len(records[1]["losses"])
    how = "; without dropout, which draws by rank" if nature["random"] else ""
    stage.check(
        "same_losses",
        all(apart[key] <= limit for key, limit in TOLERANCE.items()),
        measured=f"{count} losses on 1 to {max(records)} ranks differ by at most "
        f"{apart['losses']:.1e} (relative), gradient norms by {apart['gradient_norms']:.1e}{how}",
        wanted=wanted,
        advice="look for what depends on the rank, or on how a batch is divided: a mean where "
        "compute_loss must return a sum, statistics of a batch, files read by rank",
    )


def efficiencies(kind: str, records: Records) -> dict[int, tuple[float, float, float]]:
    """By the number of ranks: samples/s of a rank over those of one alone, with its interval."""
    value, low, high = records[1][kind]["interval"]
    found = {}
    for ranks, record in records.items():
        if ranks > 1:
            share = ranks if kind == "strong" else 1
            theirs = [share * seconds for seconds in record[kind]["interval"]]
            found[ranks] = (value / theirs[0], low / theirs[2], high / theirs[1])
    return found


def judge_efficiency(
    stage: Stage, kind: str, records: Records, reason: str, device: str, cores: int
) -> None:
    """On GPUs there is a limit; what shares a CPU is only recorded."""
    most, found = max(records), efficiencies(kind, records)
    if not reason and device == "cpu" and most > cores:
        reason = f"{most} ranks take turns on {named(cores, 'core')}"
    limit = {"weak": LEAST_WEAK, "strong": 1 / most}[kind] if device == "cuda" else 0.0
    wanted = f"{most} ranks above {limit:.0%}" if limit else "measured"
    if reason:
        stage.check(f"{kind}_efficiency", None, measured=reason, wanted=wanted)
        return
    shown = ", ".join(f"{n} ranks {v:.0%} ({a:.0%} to {b:.0%})" for n, (v, a, b) in found.items())
    if any(low > MOST for _, low, _ in found.values()):
        reason = f"{shown}: more than ranks can bring, so one alone had less of the machine"
        advice = "measure again when nothing else runs on this machine"
        stage.check(f"{kind}_efficiency", None, measured=reason, wanted=wanted, advice=advice)
        return
    batch = "the same batch" if kind == "strong" else "a batch for each rank"
    communication = records[most][kind]["communication"]
    stage.check(
        f"{kind}_efficiency",
        found[most][0] > limit,
        measured=f"{shown}, {batch}",
        wanted=wanted,
        advice="a rank computes too little between two synchronisations: raise "
        "--train.micro-batch-size and --train.global-batch-size; see the links of the GPUs "
        "(nvidia-smi topo -m)"
        if communication is None or communication > (1 - found[most][0]) / 2
        else "the ranks are slow though they need not wait for each other: look at what they share "
        "(reading data, see --train.loader-workers; the host's cores)",
    )
    if not limit and most * found[most][0] <= 1:
        stage.advise(f"{most} ranks do not do more than one here: {kind} scaling brings nothing")


def judge_memory(stage: Stage, records: Records) -> None:
    """What a rank takes is what was to be expected."""
    wanted = f"within a factor of {FACTOR:g}"
    known = {n: r["memory"] for n, r in records.items()}
    if reason := next(filter(None, map(unpredictable, known.values())), ""):
        stage.check("memory", None, measured=reason, wanted=wanted)
        return
    shown = (
        f"{named(n, 'rank')} predicted {in_units(m['predicted'])}, measured "
        f"{in_units(m['measured'])}"
        for n, m in known.items()
    )
    ratios = [m["measured"] / max(1, m["predicted"]) for m in known.values()]
    stage.check(
        "memory",
        all(1 / FACTOR <= ratio <= FACTOR for ratio in ratios),
        measured="; ".join(shown),
        wanted=wanted,
        advice="something is allocated that is neither weights, gradients, optimizer state nor "
        "kept for backward, or kept and never used: see the operators of `profile`, with memory",
    )


def unpredictable(memory: dict[str, Any]) -> str:
    """Why predicted and measured memory cannot be compared, if they cannot."""
    if memory["measured"] is None:
        return "this device does not tell what was allocated"
    if memory["activations"] is None:
        return "activations are measured on a whole model of its own, for which a rank has no room"
    if memory["recomputed"]:
        return "with --train.activation-checkpointing what is kept cannot be seen from outside"
    return "the optimizer's state could only be guessed" if memory["guessed"] else ""


def figures_of(records: Records) -> dict[str, Any]:
    """What the report reads."""
    parts = ("parameters", "gradients", "optimizer", "activations", "gathered")
    memory = {
        str(n): {k: m[k] for k in (*parts, "predicted", "measured") if m[k] is not None}
        for n, m in ((n, record["memory"]) for n, record in records.items())
    }
    return {
        "ranks": list(records),
        **{kind: {str(n): r[kind] for n, r in records.items()} for kind in ("strong", "weak")},
        **{
            f"{kind}_efficiency": {str(n): v[0] for n, v in efficiencies(kind, records).items()}
            for kind in ("strong", "weak")
        },
        "memory": memory,
        "losses": {str(n): record["losses"] for n, record in records.items()},
        "gradient_norms": {str(n): record["gradient_norms"] for n, record in records.items()},
        "noise_scale": records[1]["noise_scale"],
    }


def summary(ranks: int, record: dict[str, Any]) -> str:
    """What so many processes did, in words."""
    text = []
    for kind, batch in (("strong", "the same batch"), ("weak", f"{ranks} times the batch")):
        found = record[kind]
        line = f"{found['samples_per_second']:,.0f} samples/s"
        if ranks == 1:
            return line
        share = found["communication"]
        told = f"not measured ({found['problem']})" if share is None else f"{share:.0%} of a step"
        text.append(f"{line} with {batch} (communication and waiting {told})")
    return "; ".join(text)


def named(count: int, what: str) -> str:
    """As in 1 process, 2 processes."""
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}" + ("" if count == 1 else plural)
