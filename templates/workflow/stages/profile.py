"""The profile stage, plain or under torchrun: where a step's time goes, and what to try."""

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..config import Config, ProfileConfig
from ..distributed import Group, join, leave
from ..errors import RankError, command_for
from ..profiler import Profiler
from ..sampling import WAITING
from ..train import State, setup, train_step
from .chain import advise, read_stage
from .stage import Stage
from .timing import record_steps, spread

UNTRACED, SHOWN = 20, 10  # steps that are timed without a trace; operators
WORTH_A_WORD = 0.15  # the share of a step from which on a second cause is mentioned
CAUSES = {
    "input-bound": ("data", "copies"),
    "host-bound": ("host",),
    "kernel-bound": ("kernels",),
    "communication-bound": ("communication",),
}
PARTS = ("data", "host", "kernels", "communication", "copies")
HOST = PARTS.index("host")
# The times come from the trace that torch.profiler writes, JSON in Chrome's trace event format:
# complete events ("ph": "X") have a category, a name, a thread, a start and a duration in
# microseconds. Each moment of a step belongs to one part: of all events that cover it, the one that
# comes first in ON_GPU or ON_CPU decides; a moment without any is the host's. So the parts add up
# to the step, and communication is only what no kernel hides.
# Events, as torch 2.13 names them: category, name.
STEP = "user_annotation ProfilerStep#"  # a step, on the thread that trains
COMPILATION = "_compile.compile_inner (dynamo_timed)"  # the compiler compiled something
COMPILED = "## Call CompiledFxGraph"  # compiled code, an annotation
ELSEWHERE = re.compile(r"(kernel|gpu_memcpy|gpu_memset) |\w+ (gloo|mpi|ucc):")  # on any thread
# Parts, and the category and name of the events that belong to them.
ON_GPU = (
    # NCCL's collectives are kernels, too.
    ("kernels", "kernel (?!.*(?i:nccl|nvshmem|multimem))|gpu_memset |gpu_memcpy .*DtoD"),
    ("communication", "kernel "),
    ("copies", "gpu_memcpy "),
    ("data", f"user_annotation {WAITING}$"),  # the loader at work, or waiting for its workers
)
ON_CPU = (
    ("data", f"user_annotation {WAITING}$"),
    # Also inside an operator: sharded tensors wait in `_c10d_functional::wait_tensor`.
    ("communication", r"cpu_op _?c10d(_functional)?(_autograd)?::"),
    # Nodes of autograd run operators, and hooks that may wait.
    ("kernels", rf"cpu_op (?!(torch::)?autograd::).*::|\w+ {COMPILED}"),
    # `gloo:all_reduce` is on a thread of gloo's, from the call to the end of the collective. The
    # training thread waits for it inside no operator.
    ("communication", r"\w+ (gloo|mpi|ucc):"),
)

Event = dict[str, Any]
Gap = tuple[float, float, float]  # in which only the host works: length, start, end; microseconds


class Breakdown(NamedTuple):
    """Where the time of the traced steps went."""

    seconds: np.ndarray  # [steps, parts], in the order of `PARTS`
    compilations: int
    device: bool  # whether the trace shows a GPU at work
    # Seconds in which the host kept everything waiting, and the operators before and after.
    longest_gap: tuple[float, str, str]
    # Name, self_seconds, calls and share of each, the largest first, by torch's own account.
    operators: list[dict[str, Any]]

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the parts in all steps together; they add up to 1."""
        parts = self.seconds.sum(axis=0)
        return dict(zip(PARTS, (parts / parts.sum()).tolist(), strict=True))


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("profile", config)
    world = join(config.parallel, config.device)
    state = setup(config, world)
    if world.rank == 0:
        print("     tracing some steps, then timing steps without a trace ...", flush=True)
    tracer = trace_steps(config.profile, config.directory / "traces", state)
    trace, averages = tracer.written[-1], tracer.profile.key_averages()
    group = Group(world)
    ranks: list[Breakdown] = []
    problem = ""
    try:
        with group.together():
            own = breakdown(read_trace(trace), averages)
        ranks = group.gather(own)
    except RankError as error:
        problem = f"not a whole trace: {error}"
    steps = spread(record_steps(state, UNTRACED).seconds)
    state.loader.close()
    if world.rank == 0:
        stage.figures |= {"trace": str(trace), "step_seconds": steps, "diagnosis": None}
        measured, wanted = problem or f"{trace.name}, read back whole", "written and readable"
        tip = "is there space left on the disk?"
        stage.check("trace", not problem, measured=measured, wanted=wanted, advice=tip)
        if ranks:
            judge_steps(stage, world.device, ranks, steps["median"])
    del state
    leave(world)
    return stage.close() if world.rank == 0 else 0


def trace_steps(config: ProfileConfig, directory: Path, state: State) -> Profiler:
    """Trace steps of a training that was set up."""
    # The step after the last window is idle, so torch's averages are of that window.
    every = max(1, config.wait) + config.warmup + config.active
    tracer = Profiler(replace(config, every=every), directory, state)
    with tracer:
        for _ in range(every):
            train_step(state, state.loader.next())
            tracer.after_step(state)
    return tracer


def operators_of(averages: Iterable[Any], device: bool, seconds: float) -> list[dict[str, Any]]:
    """The operators of traced steps, with their time on the GPU, or their own on the CPU."""
    operators = []
    for average in averages:
        own = (average.self_device_time_total if device else average.self_cpu_time_total) / 1e6
        annotation = average.is_user_annotation and not average.key.startswith(COMPILED)
        kernel = average.device_type != torch.autograd.DeviceType.CPU  # its operator's time
        if own and not annotation and not kernel:
            operator = {"name": average.key, "self_seconds": own, "calls": average.count}
            operators.append(operator | {"share": own / seconds})
    return sorted(operators, key=itemgetter("self_seconds"), reverse=True)


def judge_steps(stage: Stage, device: torch.device, ranks: list[Breakdown], usual: float) -> None:
    """Say where the time goes and what to try; `usual` are the seconds of an untraced step."""
    # The slowest rank waits least in communication, since the others wait for it there.
    slowest = min(range(len(ranks)), key=lambda i: ranks[i].shares["communication"])
    rank, compilations = ranks[slowest], max(rank.compilations for rank in ranks)
    steps, traced = len(rank.seconds), float(rank.seconds.sum()) / len(rank.seconds)
    print(f"     open {stage.figures['trace']} at https://ui.perfetto.dev")
    print(f"     top operators by self time, in {steps} traced steps:")
    stage.figures["operators"] = rank.operators[:SHOWN]
    for each in rank.operators[:SHOWN]:
        own, calls = f"{each['self_seconds'] * 1e3:9.2f} ms", f"{each['calls']:6} x"
        print(f"     {each['share']:6.1%} {own} {calls}  {each['name'][:60]}")
    print(f"     a step took {traced * 1e3:.2f} ms while traced, else {usual * 1e3:.2f} ms")
    stage.figures |= {"steps": steps, "traced_step_seconds": traced, "recompiles": compilations}
    measured = f"{compilations} within {steps} traced steps"
    wanted = "none: while it compiles, no share means anything"
    tip = "if it only compiles late, raise --profile.wait"
    stage.check("recompiles", not compilations, measured=measured, wanted=wanted, advice=tip)
    if device.type != "cpu" and not rank.device:
        problem = f"the trace holds nothing that {device.type} did: torch.profiler cannot see it"
        stage.check("shares", None, measured=problem, wanted="measured")
        return
    shares = without_tracing(rank.shares, traced / usual) if rank.device else rank.shares
    words = {"data": "waiting for data", "host": "host gaps"}
    text = ", ".join(f"{words.get(part, part)} {shares[part]:.1%}" for part in PARTS)
    stage.check("shares", True, measured=text, wanted="measured")
    diagnosis, *others = diagnose(shares, compilations)
    stage.figures |= {"shares": shares, "diagnosis": diagnosis}
    if len(ranks) > 1:
        compare_ranks(stage, ranks, slowest)
    advise(stage, f"{diagnosis}: {advice(diagnosis, shares, rank, stage.config)}")
    for other in others:
        advise(stage, f"besides, {advice(other, shares, rank, stage.config)}")


def compare_ranks(stage: Stage, ranks: list[Breakdown], slowest: int) -> None:
    """Say how much of the communication is waiting for the slowest rank."""
    seconds = np.stack([rank.seconds for rank in ranks])
    # All steps are summed, since a GPU's steps do not end where the host's do.
    exposed = seconds[:, :, PARTS.index("communication")].sum(axis=1)
    waiting = float((exposed - exposed.min()).sum() / seconds.sum())
    stage.figures |= {"ranks": [rank.shares for rank in ranks], "waiting_for_ranks": waiting}
    print(f"     the ranks wait {waiting:.1%} of their time, mostly for rank {slowest}, shown here")


def without_tracing(shares: dict[str, float], slowdown: float) -> dict[str, float]:
    """Shares of a step on a GPU without what tracing added, which is all time of the host."""
    added = min(max(0.0, 1 - 1 / slowdown), shares["host"])
    rest = shares | {"host": shares["host"] - added}
    return {part: share / (1 - added) for part, share in rest.items()}


def diagnose(shares: dict[str, float], compilations: int) -> list[str]:
    """What most of a step goes to, then what else it loses much of its time to."""
    lost = {cause: sum(shares[part] for part in parts) for cause, parts in CAUSES.items()}
    first = "recompiling" if compilations else max(CAUSES, key=lambda cause: lost[cause])
    others = [cause for cause in CAUSES if cause not in (first, "kernel-bound")]
    return [first, *(cause for cause in others if lost[cause] > WORTH_A_WORD)]


def advice(diagnosis: str, shares: dict[str, float], rank: Breakdown, config: Config) -> str:
    """The figures behind a diagnosis, and the next thing to try."""
    if diagnosis == "input-bound" and shares["copies"] > shares["data"]:
        diagnosis = "copies"
    (gap, after, before), train, steps = rank.longest_gap, config.train, len(rank.seconds)
    step = float(rank.seconds.sum()) / steps
    # torch knows no operators of a CUDA graph.
    largest = [f", {one['share']:.0%} in {one['name'][:48]}" for one in rank.operators[:1]]
    situations = {
        "recompiling": f"{rank.compilations} compilations within {steps} steps, which need none",
        "input-bound": f"a step waits for data during {shares['data']:.0%} of its time",
        "copies": f"copies between host and device take {shares['copies']:.0%} of a step",
        "host-bound": f"nothing is computed in {shares['host']:.0%} of a step; the longest gap, "
        f"{gap * 1e3:.2g} of {step * 1e3:.3g} ms, is after {after[:48]} and before {before[:48]}",
        "kernel-bound": "".join([f"{shares['kernels']:.0%} of a step is computing", *largest]),
        "communication-bound": f"exposed communication is {shares['communication']:.0%} of a step",
    }
    command, workers = command_for("compile", config.directory), 2 * train.loader_workers or 2
    compiled = read_stage(config.directory, "compile")
    best = compiled["figures"].get("best", "none") if compiled else "blocks"
    may_compile = config.compile.mode == "none" and best != "none"
    compiling = f"--compile.mode {best} (`{command}` measures it)"
    in_python = gap > 0.2 * shares["host"] * step
    accumulates = train.micro_batch_size < train.global_batch_size
    larger = f"larger micro-batches (--train.micro-batch-size {2 * train.micro_batch_size})"
    gathers_twice = getattr(config.parallel, "reshard_after_forward", False)
    remedies = [  # for what, whether it applies here, and what to try
        ("recompiling", True, f"`{command}`: it names the guards"),
        ("recompiling", True, "--compile.dynamic True, or data of one length"),
        ("input-bound", True, f"--train.loader-workers {workers}, or a cheaper __getitems__"),
        ("copies", True, "smaller types in the dataset (uint8, converted on the device)"),
        ("copies", True, "no .item(), .cpu() or print in the step: they copy, and wait"),
        ("host-bound", in_python, "to move the Python work there out of the step"),
        ("host-bound", may_compile and not in_python, compiling),
        ("host-bound", accumulates and not in_python, larger),
        ("kernel-bound", rank.device and train.precision == "fp32", "--train.precision bf16"),
        ("kernel-bound", may_compile, compiling),
        ("communication-bound", gathers_twice, "--parallel.no-reshard-after-forward"),
        ("communication-bound", True, "a larger --train.global-batch-size, or fewer ranks"),
    ]
    tries = [text for name, applies, text in remedies if name == diagnosis and applies]
    rest = "a leaner model, or more devices; the loop itself has little left"
    return f"{situations[diagnosis]}. Try {', or '.join(tries) or rest}"


def read_trace(path: Path) -> list[Event]:
    """The events of a .json.gz that torch.profiler wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def breakdown(events: list[Event], averages: Iterable[Any] = ()) -> Breakdown:
    """Divide a trace's steps into `PARTS`, beside torch's averages; ValueError without a step."""
    events = [e | {"end": e["ts"] + e["dur"], "text": f"{e['cat']} {e['name']}"} for e in events]
    steps = sorted((e for e in events if e["text"].startswith(STEP)), key=itemgetter("ts"))
    if not steps:
        raise ValueError("it holds no step")
    thread = steps[0]["pid"], steps[0]["tid"]
    seen = [e for e in events if (e["pid"], e["tid"]) == thread or ELSEWHERE.match(e["text"])]
    device = any(e["text"].startswith(("kernel ", "gpu_mem")) for e in seen)
    rules = reversed(ON_GPU if device else ON_CPU)  # the weakest first; an event may match several
    claims = [(part, e) for part, rule in rules for e in seen if re.match(rule, e["text"])]
    seconds, gaps = divide(steps, claims)
    compilations = sum(event["name"] == COMPILATION for event in events)
    # The median of the steps' longest gaps: what happened only once says nothing.
    length, start, end = sorted(gaps)[len(gaps) // 2]
    work = [event for part, event in claims if part != "data"]
    earlier = [event for event in work if event["end"] <= start + 1e-3]
    later = [event for event in work if event["ts"] >= end - 1e-3]
    after = max(earlier, key=itemgetter("end"), default={"name": "the first step's start"})
    before = min(later, key=itemgetter("ts"), default={"name": "the last step's end"})
    gap = length / 1e6, after["name"], before["name"]
    operators = operators_of(averages, device, float(seconds.sum()))
    return Breakdown(seconds, compilations, device, gap, operators)


def divide(steps: list[Event], claims: list[tuple[str, Event]]) -> tuple[np.ndarray, list[Gap]]:
    """The seconds of each step and part, and the longest gap of each step."""
    claimed = spans(event for _, event in claims)
    edges = np.unique(np.append(spans(steps), claimed))
    owner = np.full(len(edges) - 1, HOST)  # of the time from each edge to the next
    for (part, _), (first, last) in zip(claims, np.searchsorted(edges, claimed), strict=True):
        owner[first:last] = PARTS.index(part)
    seconds, gaps = np.zeros((len(steps), len(PARTS))), []
    for row, (first, last) in zip(seconds, np.searchsorted(edges, spans(steps)), strict=True):
        lengths = np.diff(edges[first : last + 1])
        row += np.bincount(owner[first:last], lengths, minlength=len(PARTS)) / 1e6
        idle = np.concatenate([[False], owner[first:last] == HOST, [False]])
        intervals = edges[first + np.flatnonzero(np.diff(idle))].reshape(-1, 2).tolist()
        gaps.append(max(((b - a, a, b) for a, b in intervals), default=(0.0, 0.0, 0.0)))
    return seconds, gaps


def spans(events: Iterable[Event]) -> np.ndarray:
    """Starts and ends, [events, 2], in microseconds."""
    return np.array([(e["ts"], e["end"]) for e in events], dtype=float).reshape(-1, 2)
