"""The third stage: where the time of a step goes, from a trace of the project's own steps.

Runs plain or under torchrun. Of several ranks it judges the one that waits least in communication:
it is for that one that the others wait.
"""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ..config import Config
from ..distributed import Group, World, join, leave
from ..profiler import Profiler, trace_steps
from ..train import State, setup, train_step
from .diagnosis import WORTH_A_WORD, advice, diagnose, others
from .gates import Stage
from .measuring import Interval, median_interval, spread, synchronize
from .trace import PARTS, Breakdown, TraceError, breakdown, read_trace

SECONDS, MOST = 5.0, 200  # for the steps that tell what an idle profiler costs
IDLE_LIMIT = 0.01
SHOWN = 10
WORDS = {"data": "waiting for data", "host": "host gaps"}


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("profile", config)
    world = join(config.parallel, config.device)
    group = Group(world)
    state = setup(config, world)
    wait, warmup, active = config.profile.wait, config.profile.warmup, config.profile.active
    say(world, f"tracing {active} steps after {wait + warmup}, {config.profile.repeat} times ...")
    written = trace_steps(config.profile, config.directory / "traces", state, train_step)
    found = group.agree(lambda: read_back(written))
    say(world, "timing steps while no profiler is at work ...")
    idle, seconds = idle_costs(state, group)
    state.loader.close()
    if world.rank == 0:
        judge(stage, world.device, found, written[-1], idle, seconds)
    del state
    leave(world)
    return stage.close() if world.rank == 0 else 0


def say(world: World, text: str) -> None:
    """One line, as a part begins."""
    if world.rank == 0:
        print(f"     {text}", flush=True)


def read_back(paths: list[Path]) -> Breakdown | str:
    """What the traces of a rank say, or why they cannot be read.

    Of all windows together; operators and the longest gap are those of the last one.
    """
    try:
        parts = [breakdown(read_trace(path)) for path in paths]
    except TraceError as error:
        return str(error)
    return parts[-1]._replace(
        seconds=np.concatenate([part.seconds for part in parts]),
        compilations=sum(part.compilations for part in parts),
    )


def idle_costs(state: State, group: Group) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each call to a profiler between its windows, and of the step before that call.

    With `--profile.every` a step between windows differs by this one call from a step of a run
    without: no torch.profiler exists then that could slow an operator down. So it is timed where
    it happens, with the caches as cold as a step leaves them; the clock's own cost is counted in.
    Comparing windows of whole steps would have to find it in a noise thousands of times as large.
    """
    profiler = Profiler(replace(state.config.profile, every=2**40), Path("unused"), state)
    calls, steps = [], []

    def take_step() -> None:
        started = time.perf_counter()
        train_step(state, state.loader.next())
        synchronize(state.world.device)
        between = time.perf_counter()
        profiler.after_step(state)
        calls.append(time.perf_counter() - between)
        steps.append(between - started)

    take_step()
    for _ in range(group.from_first(lambda: int(np.clip(SECONDS / steps[0], 8, MOST)))):
        take_step()
    return np.array(calls[1:]), np.array(steps[1:])


def judge(
    stage: Stage,
    device: torch.device,
    found: list[Breakdown | str],
    trace: Path,
    idle: np.ndarray,
    seconds: np.ndarray,
) -> None:
    """Turn what the ranks found into checks and figures."""
    problems = [f"rank {rank}: {it}" for rank, it in enumerate(found) if isinstance(it, str)]
    stage.figures |= {"trace": str(trace), "step_seconds": spread(seconds), "diagnosis": None}
    size = trace.stat().st_size / 2**20 if trace.exists() else 0
    stage.check(
        "trace",
        not problems,
        measured=problems[0] if problems else f"{trace.name}, {size:.1f} MiB, read back whole",
        wanted="written and readable",
        advice="look at the disk: is there space left?",
    )
    if not problems:
        print(f"     open {trace} at https://ui.perfetto.dev")
        judge_steps(stage, device, found, float(np.median(seconds)))
    judge_idle(stage, median_interval(idle / seconds), float(np.median(idle)))


def judge_steps(
    stage: Stage, device: torch.device, found: list[Breakdown], untraced: float
) -> None:
    """Where the time goes, and what to do about it; `untraced` is a step's usual seconds."""
    rank = min(range(len(found)), key=lambda rank: found[rank].shares["communication"])
    first = found[rank]
    steps = len(first.seconds)
    traced = float(first.seconds.sum()) / steps
    compilations = max(it.compilations for it in found)
    last = stage.config.profile.active
    print(f"     top operators by self time, in the last {last} traced steps:")
    for name, own, share, calls in first.operators[:SHOWN]:
        print(f"     {share:6.1%} {own * 1e3:9.2f} ms {calls:6} x  {name[:60]}")
    print(f"     a step took {traced * 1e3:.2f} ms while traced, else {untraced * 1e3:.2f} ms")
    stage.figures |= {
        "steps": steps,
        "traced_step_seconds": traced,
        "recompiles": compilations,
        "operators": [operator._asdict() for operator in first.operators[:SHOWN]],
    }
    stage.check(
        "recompiles",
        not compilations,
        measured=f"{compilations} within {steps} traced steps",
        wanted="none: while it compiles, no share means anything",
        advice="if it only compiles late, --profile.wait more steps",
    )
    if device.type != "cpu" and not first.device:
        why = f"the trace holds nothing that {device.type} did: torch.profiler is not told of it"
        stage.check("shares", None, measured=why, wanted="measured")
        return
    shares = without_tracing(first.shares, traced / untraced) if first.device else first.shares
    text = ", ".join(f"{WORDS.get(part, part)} {shares[part]:.1%}" for part in PARTS)
    stage.check("shares", True, measured=text, wanted="measured")
    diagnosis = diagnose(shares, compilations)
    stage.figures |= {"shares": shares, "diagnosis": diagnosis}
    if len(found) > 1:
        compare_ranks(stage, found, rank)
    stage.advise(f"{diagnosis}: {advice(diagnosis, shares, first, stage.config)}")
    for other in others(diagnosis, shares):
        stage.advise(f"besides, {advice(other, shares, first, stage.config)}")


def compare_ranks(stage: Stage, found: list[Breakdown], last: int) -> None:
    """How much of the communication is waiting for the rank that comes last to it."""
    steps = np.stack([it.seconds for it in found])
    exposed = steps[:, :, PARTS.index("communication")]
    if found[last].device:  # whose steps do not end where the host's do
        exposed = exposed.sum(axis=1, keepdims=True)
    waiting = float((exposed - exposed.min(axis=0)).sum() / steps.sum())
    stage.figures |= {"ranks": [it.shares for it in found], "waiting_for_ranks": waiting}
    print(f"     the ranks wait {waiting:.1%} of their time for one late to a collective")
    if waiting > WORTH_A_WORD / len(found):
        print(f"     most of all for rank {last}, of which the shares are")


def without_tracing(shares: dict[str, float], slowdown: float) -> dict[str, float]:
    """Shares of a step on a device, less what tracing added: that is all time of the host."""
    added = min(max(0.0, 1 - 1 / slowdown), shares["host"])
    return {
        part: (share - added if part == "host" else share) / (1 - added)
        for part, share in shares.items()
    }


def judge_idle(stage: Stage, ratio: Interval, call: float) -> None:
    """Whether `--profile.every` costs anything between its windows."""
    stage.figures["idle_overhead"] = ratio._asdict()
    decided = True if ratio.high < IDLE_LIMIT else False if ratio.low > IDLE_LIMIT else None
    noise = "; too noisy here to tell" if decided is None else ""
    stage.check(
        "idle_overhead",
        decided,
        measured=f"{ratio.value:.4%} of a step ({ratio.low:.4%} to {ratio.high:.4%}), "
        f"{call * 1e6:.2g} us a call{noise}",
        wanted=f"less than {IDLE_LIMIT:.0%}",
        advice="when steps are this short, leave --profile.every off and use this command",
    )
