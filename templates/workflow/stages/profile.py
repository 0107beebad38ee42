"""The profile stage: where the time of a step goes, and what to try about it.

It runs plain or under torchrun. Of several ranks it reports the slowest one, which waits least in
communication, since the others wait for it there.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from ..config import Config
from ..distributed import Group, World, join, leave
from ..errors import RankError, command_for
from ..files import replacing
from ..profiler import ProfileConfig, Profiler
from ..run.hardware import usable_cores
from ..train import State, setup, train_step
from .chain import read_stage
from .interleaved import Interval, median_interval
from .stage import Stage
from .timing import record_steps, spread
from .trace import COMPILED, PARTS, Breakdown, breakdown, read_trace

log = logging.getLogger(__name__)
SECONDS, MOST_STEPS = 5.0, 200  # to measure what an idle profiler costs
IDLE_LIMIT = 0.01
SHOWN = 10  # operators
WORTH_A_WORD = 0.15  # the share of a step from which on a second cause is mentioned
CAUSES = {
    "input-bound": ("data", "copies"),
    "host-bound": ("host",),
    "kernel-bound": ("kernels",),
    "communication-bound": ("communication",),
}
Shares = dict[str, float]


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("profile", config)
    world = join(config.parallel, config.device)
    group = Group(world)
    state = setup(config, world)
    if world.rank == 0:
        print("     tracing some steps, then timing steps without a trace ...", flush=True)
    tracer = trace_steps(config.profile, config.directory / "traces", state)
    traces = tracer.written
    try:
        ranks, problem = group.agree(lambda: read_back(traces, tracer.averages)), ""
    except RankError as error:
        ranks, problem = [], f"not a whole trace: {error}"
    calls, steps = idle_costs(state, group)
    state.loader.close()
    del state
    leave(world)
    if world.rank:
        return 0
    stage.figures |= {"trace": str(traces[-1]), "step_seconds": spread(steps), "diagnosis": None}
    size = traces[-1].stat().st_size / 2**20
    measured = problem or f"{traces[-1].name}, {size:.1f} MiB, read back whole"
    wanted, tip = "written and readable", "is there space left on the disk?"
    stage.check("trace", not problem, measured=measured, wanted=wanted, advice=tip)
    if ranks:
        judge_steps(stage, world.device, ranks, float(np.median(steps)))
    judge_idle(stage, median_interval(calls / steps), float(np.median(calls)))
    return stage.close()


class Tracer(Profiler):
    """A profiler that keeps torch's averages over the last window."""

    def _write(self, finished: profile) -> None:
        super()._write(finished)
        self.averages = finished.key_averages()


def trace_steps(config: ProfileConfig, directory: Path, state: State) -> Tracer:
    """Trace steps of a training that was set up."""
    tracer = Tracer(replace(config, every=0), directory, state)
    snapshot = directory / f"memory_rank_{state.world.rank}.pickle"
    with memory_snapshot(snapshot, state.world), tracer:
        for _ in range(tracer.period * config.repeat):
            train_step(state, state.loader.next())
            tracer.after_step(state)
    return tracer


@contextlib.contextmanager
def memory_snapshot(path: Path, world: World) -> Iterator[None]:
    """Record CUDA allocations into `path`, for pytorch.org/memory_viz; nothing on other devices."""
    if world.device.type != "cuda":
        yield
        return
    # Python's stacks alone: C++ stacks would slow the traced steps down.
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        yield
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            torch.cuda.memory._dump_snapshot(str(temporary))
        log.info("memory snapshot: %s", path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def read_back(traces: list[Path], averages: Iterable[Any] = ()) -> Breakdown:
    """Where the time of this rank's traced steps went."""
    windows = [breakdown(read_trace(path)) for path in traces]
    seconds = np.concatenate([window.seconds for window in windows])
    compilations, last = sum(window.compilations for window in windows), windows[-1]
    # Operators and the longest gap come from the last window.
    operators = operators_of(averages, last.device, float(last.seconds.sum()))
    return last._replace(seconds=seconds, compilations=compilations, operators=operators)


def operators_of(averages: Iterable[Any], device: bool, seconds: float) -> list[dict[str, Any]]:
    """The operators of traced steps, with their time on the GPU, or their own on the CPU."""
    operators = []
    for it in averages:
        own = (it.self_device_time_total if device else it.self_cpu_time_total) / 1e6
        annotation = it.is_user_annotation and not it.key.startswith(COMPILED)
        if own and not annotation and it.device_type == DeviceType.CPU:  # not the kernels as well
            operator = {"name": it.key, "self_seconds": own, "calls": it.count}
            operators.append(operator | {"share": own / seconds})
    return sorted(operators, key=itemgetter("self_seconds"), reverse=True)


def idle_costs(state: State, group: Group) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each call to a profiler between its windows, and of the step before that call.

    The call is all that `--profile.every` adds to such a step. It is timed by itself, since a
    difference of whole steps would drown in noise.
    """
    profiler = Profiler(replace(state.config.profile, every=2**40), Path("unused"), state)
    (first,) = record_steps(state, 1).seconds
    count = group.from_first(lambda: int(np.clip(SECONDS / first, 8, MOST_STEPS)))
    calls, steps = np.zeros((2, count))
    for i in range(count):
        (steps[i],) = record_steps(state, 1).seconds
        started = time.perf_counter()
        profiler.after_step(state)
        calls[i] = time.perf_counter() - started
    return calls, steps


def judge_steps(stage: Stage, device: torch.device, ranks: list[Breakdown], usual: float) -> None:
    """Say where the time goes and what to try; `usual` are the seconds of an untraced step."""
    slowest = min(range(len(ranks)), key=lambda i: ranks[i].shares["communication"])
    rank = ranks[slowest]
    steps, operators = len(rank.seconds), rank.operators[:SHOWN]
    traced = float(rank.seconds.sum()) / steps
    compilations = max(other.compilations for other in ranks)
    print(f"     open {stage.figures['trace']} at https://ui.perfetto.dev")
    print(f"     top operators by self time, in {steps} traced steps:")
    for it in operators:
        own, calls = f"{it['self_seconds'] * 1e3:9.2f} ms", f"{it['calls']:6} x"
        print(f"     {it['share']:6.1%} {own} {calls}  {it['name'][:60]}")
    print(f"     a step took {traced * 1e3:.2f} ms while traced, else {usual * 1e3:.2f} ms")
    stage.figures |= {"steps": steps, "traced_step_seconds": traced}
    stage.figures |= {"recompiles": compilations, "operators": operators}
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
    stage.advise(f"{diagnosis}: {advice(diagnosis, shares, rank, stage.config)}")
    for other in others:
        stage.advise(f"besides, {advice(other, shares, rank, stage.config)}")


def compare_ranks(stage: Stage, ranks: list[Breakdown], slowest: int) -> None:
    """Say how much of the communication is waiting for the slowest rank."""
    seconds = np.stack([rank.seconds for rank in ranks])
    exposed = seconds[:, :, PARTS.index("communication")]
    if ranks[slowest].device:  # a GPU's steps do not end where the host's do
        exposed = exposed.sum(axis=1, keepdims=True)
    waiting = float((exposed - exposed.min(axis=0)).sum() / seconds.sum())
    stage.figures |= {"ranks": [rank.shares for rank in ranks], "waiting_for_ranks": waiting}
    print(f"     the ranks spend {waiting:.1%} of their time waiting for a slower one")
    if waiting > WORTH_A_WORD / len(ranks):
        print(f"     mostly for rank {slowest}, whose shares are reported")


def without_tracing(shares: Shares, slowdown: float) -> Shares:
    """Shares of a step on a GPU without what tracing added, which is all time of the host."""
    added = min(max(0.0, 1 - 1 / slowdown), shares["host"])
    rest = shares | {"host": shares["host"] - added}
    return {part: share / (1 - added) for part, share in rest.items()}


def judge_idle(stage: Stage, ratio: Interval, call: float) -> None:
    """Check that `--profile.every` costs almost nothing between its windows."""
    stage.figures["idle_overhead"] = ratio._asdict()
    passed = None if ratio.low <= IDLE_LIMIT <= ratio.high else ratio.high < IDLE_LIMIT
    measured = f"{ratio.value:.4%} of a step ({ratio.low:.4%} to {ratio.high:.4%}), "
    measured += f"{call * 1e6:.2g} us a call{'; too noisy here to tell' if passed is None else ''}"
    wanted = f"less than {IDLE_LIMIT:.0%}"
    tip = "if steps are this short, leave --profile.every off and use this command"
    stage.check("idle_overhead", passed, measured=measured, wanted=wanted, advice=tip)


def diagnose(shares: Shares, compilations: int) -> list[str]:
    """What most of a step goes to, then what else it loses much of its time to."""
    lost = {cause: sum(shares[part] for part in parts) for cause, parts in CAUSES.items()}
    first = "recompiling" if compilations else max(CAUSES, key=lambda cause: lost[cause])
    others = [cause for cause in CAUSES if cause not in (first, "kernel-bound")]
    return [first, *(cause for cause in others if lost[cause] > WORTH_A_WORD)]


def advice(diagnosis: str, shares: Shares, rank: Breakdown, config: Config) -> str:
    """The figures behind a diagnosis, and the next thing to try."""
    match diagnosis:
        case "recompiling":
            return (
                f"{rank.compilations} compilations within {len(rank.seconds)} steps that should "
                f"need none. `{command_for('compile', config.directory)}` names the guards that "
                "failed; where lengths vary, try --compile.dynamic True, or data of one length"
            )
        case "input-bound" if shares["copies"] > shares["data"]:
            return (
                f"copies between host and device take {shares['copies']:.0%} of a step. Try "
                "smaller types in the dataset (uint8, converted on the device); .item(), .cpu() "
                "and print in the step copy, too, and wait"
            )
        case "input-bound":
            workers = 2 * config.train.loader_workers or max(1, min(4, usable_cores() - 1))
            return (
                f"a step waits for data during {shares['data']:.0%} of its time. Try "
                f"--train.loader-workers {workers}, or make __getitems__ cheaper"
            )
        case "host-bound":
            return on_host(shares["host"], rank, config)
        case "kernel-bound":
            return on_kernels(shares["kernels"], rank, config)
    remedy = "more samples per step (--train.global-batch-size; it is part of a run's identity)"
    if getattr(config.parallel, "reshard_after_forward", False):
        remedy = "--parallel.no-reshard-after-forward (gathers once, not twice, for more memory)"
    text = f"communication that nothing hides takes {shares['communication']:.0%} of a step"
    return f"{text}. Try {remedy}, or fewer ranks"


def on_host(share: float, rank: Breakdown, config: Config) -> str:
    """Neither data nor kernels: Python, launches, waits for the device."""
    (gap, after, before), train = rank.longest_gap, config.train
    step = float(rank.seconds.sum()) / len(rank.seconds)
    tries = try_compiling(config)
    if train.micro_batch_size < train.global_batch_size:
        size = 2 * train.micro_batch_size
        tries.append(f"fewer, larger micro-batches (--train.micro-batch-size {size})")
    if gap > 0.2 * share * step:
        tries = ["to move the Python work there out of the step, or into tensor operations"]
    return (
        f"nothing is computed during {share:.0%} of a step; the longest gap, "
        f"{gap * 1e3:.2g} ms of a step's {step * 1e3:.3g}, is after {after[:48]} and before "
        f"{before[:48]}. Try {' and '.join(tries) or 'more work per step'}"
    )


def on_kernels(share: float, rank: Breakdown, config: Config) -> str:
    """The device computes, as it should."""
    text = f"{share:.0%} of a step is computing"
    for top in rank.operators[:1]:  # of a CUDA graph torch knows no operators
        text += f", {top['share']:.0%} in {top['name'][:48]}"
    tries = try_compiling(config)
    if rank.device and config.train.precision == "fp32":
        tries.insert(0, "--train.precision bf16")
    rest = "a leaner model, or more devices; the loop itself has little left"
    return f"{text}. Try {' and '.join(tries) or rest}"


def try_compiling(config: Config) -> list[str]:
    """The compile mode to try, if any."""
    if config.compile.mode != "none":
        return []
    measured = read_stage(config.directory, "compile") or {"figures": {}}
    best = measured["figures"].get("best")
    if best is None:
        return [f"--compile.mode blocks (`{command_for('compile', config.directory)}` measures it)"]
    return [] if best == "none" else [f"--compile.mode {best}, which was measured to be faster"]
