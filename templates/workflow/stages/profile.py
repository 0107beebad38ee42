"""Profile some steps: show where their time goes, and what to try next (the profile stage).

The stage runs as one process, or under torchrun on several ranks.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ..config import Config, ProfileConfig
from ..distributed import Group, join, leave, parallel
from ..errors import RankError, command_for
from ..profiler import Profiler
from ..train import State, setup, train_step
from .chain import advise, read_stage
from .stage import Stage
from .timing import in_rounds, record_steps, spread
from .trace import COMMUNICATION, PARTS, Breakdown, breakdown, read_trace

UNTRACED_STEPS = 20
SHOWN_OPERATORS = 10
# A cause other than the main one is mentioned if it takes more than this fraction of a step.
MENTIONED_FRACTION = 0.15
# The causes that limit the speed of a step, each with the parts of a step's time (PARTS) that
# belong to it. The main cause is the diagnosis.
CAUSES = {
    "input-bound": ("data", "copies"),
    "host-bound": ("host",),
    "kernel-bound": ("kernels",),
    "communication-bound": ("communication",),
}


def measure(config: Config) -> int:
    """Run the stage; return 1 if a check failed, else 0.

    Collective: rank 0 judges the steps of all ranks, and the other ranks return 0. If training
    fails on one rank, its process ends, and torchrun then ends the others.
    """
    world = join(config.parallel, config.device)
    group = Group(world)
    # `Stage` locks the stage, which only one process can do. If rank 0 fails here, `together`
    # raises its error on all ranks.
    stage: Stage | None = None
    with group.together():
        if group.is_first:
            stage = Stage("profile", config)
            # The advice at the end needs these results. If a file is damaged, `read_stage` raises
            # an error now, before anything is measured.
            read_stage(config.directory, "compile")
            read_stage(config.directory, "baseline")
    state = setup(config, world)
    if group.is_first:
        print("     tracing some steps, then timing steps without a trace ...", flush=True)
    tracer = trace_steps(config.profile, config.directory / "traces", state)
    trace = tracer.written[-1]
    averages = tracer.profile.key_averages()
    # The breakdowns of all ranks on rank 0, and only this rank's own one on other ranks. The list
    # stays empty if a rank cannot read its trace.
    breakdowns: list[Breakdown] = []
    problem = ""
    try:
        # `together` raises the error of any rank on all ranks.
        with group.together():
            this_rank = breakdown(read_trace(trace), averages)
        breakdowns = group.gather(this_rank)
    except RankError as error:
        problem = f"the trace is incomplete: {error}"
    # Machines may have different numbers of loader workers, but all ranks must take the same number
    # of steps. So take the largest number of workers.
    workers = max(group.broadcast(group.gather(config.train.loader_workers)))
    # `in_rounds` averages over rounds of one step per worker, and needs at least two rounds.
    steps = record_steps(state, max(UNTRACED_STEPS, 2 * workers))
    untraced = spread(in_rounds(steps.seconds, workers))
    # Several workers deliver their batches in bursts, so the few traced steps may contain none of
    # the waits. Therefore, measure the fraction of waiting in the untraced steps.
    waiting = 0.0
    if workers > 1:
        waiting = float(steps.waits.sum() / steps.seconds.sum())
    state.loader.close()
    if stage is not None:
        # `judge_steps` replaces None with the diagnosis, if there is one.
        stage.figures |= {"trace": str(trace), "step_seconds": untraced, "diagnosis": None}
        stage.check(
            "trace",
            not problem,
            measured=problem or f"{trace.name}, complete",
            wanted="written and readable",
            advice="check that the disk is not full",
        )
        if breakdowns:
            judge_steps(stage, world.device, breakdowns, untraced["median"], waiting)
    # The process group must outlive the model, so drop the last reference to the model.
    del state
    leave(world)
    if stage is None:
        return 0
    return stage.close()


def trace_steps(config: ProfileConfig, directory: Path, state: State) -> Profiler:
    """Trace one window of training steps.

    The returned profiler has the path of the trace (`written`) and torch's averages (`profile`).
    """
    # `Profiler` repeats periods of `every` steps: first idle steps, then a window of warm-up steps
    # and recorded steps. It writes the trace when it advances to the first step of the next period.
    # If that step already belonged to a new window, torch would discard the averages of this one.
    # So a period must begin with at least one idle step.
    every = max(1, config.wait) + config.warmup + config.active
    tracer = Profiler(replace(config, every=every), directory, state)
    with tracer:
        for _ in range(every):
            train_step(state, state.loader.next())
            tracer.after_step(state)
    return tracer


def judge_steps(
    stage: Stage,
    device: torch.device,
    ranks: list[Breakdown],
    untraced: float,
    waiting: float = 0.0,
) -> None:
    """Report where the time goes and what to try.

    `ranks` has the breakdown of each rank. `untraced` is the seconds of an untraced step. `waiting`
    is the fraction of time that untraced steps waited for data (0 if not measured). It replaces the
    fraction from the trace if the latter is smaller.
    """
    # Report the slowest rank. It spends the least time in communication, since the other ranks wait
    # for it there.
    communicating = [float(each_rank.seconds[:, COMMUNICATION].sum()) for each_rank in ranks]
    slowest = communicating.index(min(communicating))
    # A rank that compiles holds up all ranks, so report the largest number of compilations.
    compilations = max(each_rank.compilations for each_rank in ranks)
    rank = ranks[slowest]._replace(compilations=compilations)
    steps = len(rank.seconds)
    traced = rank.step_seconds
    show_operators(stage, rank)
    print(
        f"     a traced step takes {traced * 1e3:.2f} ms, an untraced one {untraced * 1e3:.2f} ms"
    )
    stage.figures |= {"steps": steps, "traced_step_seconds": traced, "recompiles": compilations}
    stage.check(
        "recompiles",
        not compilations,
        measured=f"{compilations} in {steps} traced steps",
        wanted="none, since fractions of time are meaningless while compiling",
        advice="if the model compiles only at the start, raise --profile.wait",
    )
    # `rank.device` is False if the trace has no events on a GPU.
    if device.type != "cpu" and not rank.device:
        problem = f"torch.profiler recorded no work of the device ({device.type})"
        stage.check("shares", None, measured=problem, wanted="measured")
        return
    fractions = rank.fractions
    # With a GPU, the overhead of tracing is all in the part "host", so it can be removed. On a CPU,
    # tracing also slows down the operators, so the overhead of each part is unknown.
    if rank.device:
        fractions = without_tracing(fractions, traced / untraced)
    fractions = with_waits(fractions, waiting)
    stage.check("shares", True, measured=describe_fractions(fractions), wanted="measured")
    diagnosis, *others = diagnose(fractions, compilations)
    stage.figures |= {"shares": fractions, "diagnosis": diagnosis}
    if len(ranks) > 1:
        compare_ranks(stage, ranks, slowest)
    world_size = len(ranks)
    advise(stage, f"{diagnosis}: {advice(diagnosis, fractions, rank, stage.config, world_size)}")
    for other in others:
        advise(stage, f"also {other}: {advice(other, fractions, rank, stage.config, world_size)}")


def show_operators(stage: Stage, rank: Breakdown) -> None:
    """Print and record the operators with the most self time."""
    operators = rank.operators[:SHOWN_OPERATORS]
    stage.figures["operators"] = operators
    print(f"     open {stage.figures['trace']} at https://ui.perfetto.dev")
    print(f"     top operators by self time, in {len(rank.seconds)} traced steps:")
    for operator in operators:
        milliseconds = f"{operator['self_seconds'] * 1e3:9.2f} ms"
        calls = f"{operator['calls']:6} x"
        name = operator["name"][:60]
        print(f"     {operator['share']:6.1%} {milliseconds} {calls}  {name}")


def describe_fractions(fractions: dict[str, float]) -> str:
    """Describe the fraction of a step that each part takes."""
    words = {"data": "waiting for data", "host": "host gaps"}
    return ", ".join(f"{words.get(part, part)} {fractions[part]:.1%}" for part in PARTS)


def compare_ranks(stage: Stage, ranks: list[Breakdown], slowest: int) -> None:
    """Report how much of the communication is waiting for the slowest rank."""
    # The shape is [ranks, steps, parts].
    seconds = np.stack([rank.seconds for rank in ranks])
    # Sum over all steps, since single steps are not exact on a GPU: a step in the trace ends when
    # the host ends it, and the GPU may then still work on it.
    communicating = seconds[:, :, COMMUNICATION].sum(axis=1)
    # Assume that the rank with the least communication never waits. Then the additional time that
    # other ranks spend in communication is waiting.
    waiting = float((communicating - communicating.min()).sum() / seconds.sum())
    stage.figures |= {"ranks": [rank.fractions for rank in ranks], "waiting_for_ranks": waiting}
    print(f"     ranks wait {waiting:.1%} of their time, mostly for rank {slowest} (shown here)")


def without_tracing(fractions: dict[str, float], slowdown: float) -> dict[str, float]:
    """Remove the overhead of tracing, all of which is in the part "host", from the fractions.

    `slowdown` is the time of a traced step divided by that of an untraced one.
    """
    # The fraction of a traced step that is overhead: 0.2 for a slowdown of 1.25.
    overhead = max(0.0, 1 - 1 / slowdown)
    overhead = min(overhead, fractions["host"])
    rest = fractions | {"host": fractions["host"] - overhead}
    # Divide by the sum of the rest, so that the fractions add up to 1 again.
    return {part: fraction / (1 - overhead) for part, fraction in rest.items()}


def with_waits(fractions: dict[str, float], waiting: float) -> dict[str, float]:
    """Raise the fraction "data" to `waiting` if it is smaller, and shrink the others to match."""
    if waiting <= fractions["data"]:
        return fractions
    # The factor of the other fractions, so that all fractions still add up to 1.
    scale = (1 - waiting) / (1 - fractions["data"])
    result = {part: scale * fraction for part, fraction in fractions.items()}
    return result | {"data": waiting}


def diagnose(fractions: dict[str, float], compilations: int) -> list[str]:
    """Return the diagnosis, which is the main cause, and then other causes that take much time.

    If there were compilations, the diagnosis is "recompiling".
    """
    # The fraction of a step that each cause takes.
    taken: dict[str, float] = {}
    for cause, parts in CAUSES.items():
        taken[cause] = sum(fractions[part] for part in parts)
    diagnosis = "recompiling"
    if not compilations:
        diagnosis = max(taken, key=taken.__getitem__)
    diagnoses = [diagnosis]
    for cause in CAUSES:
        # Time in kernels is useful work, so mention it only as the main cause.
        if cause in (diagnosis, "kernel-bound"):
            continue
        if taken[cause] > MENTIONED_FRACTION:
            diagnoses.append(cause)
    return diagnoses


def advice(
    diagnosis: str,
    fractions: dict[str, float],
    rank: Breakdown,
    config: Config,
    world_size: int = 1,
) -> str:
    """Return the measurement behind a diagnosis, and what to try next."""
    # An input-bound step waits for data or for copies. The remedies for copies are different.
    if diagnosis == "input-bound" and fractions["copies"] > fractions["data"]:
        diagnosis = "copies"
    tries = remedies(diagnosis, fractions, rank, config, world_size)
    if not tries:
        if diagnosis == "host-bound":
            tries = ["less Python code in a step, or a larger --train.global-batch-size"]
        else:
            tries = ["a smaller model or more devices, since the loop itself has little to gain"]
    return f"{evidence(diagnosis, fractions, rank)}. Try {', or '.join(tries)}"


def evidence(diagnosis: str, fractions: dict[str, float], rank: Breakdown) -> str:
    """Describe the measurement behind a diagnosis."""
    if diagnosis == "recompiling":
        return f"{rank.compilations} compilations in {len(rank.seconds)} steps, after the warm-up"
    if diagnosis == "input-bound":
        return f"a step waits for data {fractions['data']:.0%} of its time"
    if diagnosis == "copies":
        return f"copies between host and device take {fractions['copies']:.0%} of a step"
    if diagnosis == "host-bound":
        gap = rank.longest_gap
        lengths = f"{gap.seconds * 1e3:.2g} ms of a traced step of {rank.step_seconds * 1e3:.3g} ms"
        between = f"after {gap.after[:48]} and before {gap.before[:48]}"
        if rank.device:
            gaps = f"the device idles {fractions['host']:.0%} of a step, waiting for the host"
        else:
            gaps = f"Python code outside of operators takes {fractions['host']:.0%} of a step"
        return f"{gaps}; the longest gap, {lengths}, is {between}"
    if diagnosis == "communication-bound":
        return f"exposed communication is {fractions['communication']:.0%} of a step"
    computing = f"{fractions['kernels']:.0%} of a step is computation"
    # The list may be empty, since torch reports no operators in a CUDA graph.
    if rank.operators:
        largest = rank.operators[0]
        computing += f", {largest['share']:.0%} in {largest['name'][:48]}"
    return computing


def remedies(
    diagnosis: str, fractions: dict[str, float], rank: Breakdown, config: Config, world_size: int
) -> list[str]:
    """List what to try for a diagnosis with these settings; [] if there is nothing left to try."""
    train = config.train
    tries: list[str] = []
    compile_tries = compile_remedy(config)
    if diagnosis == "recompiling":
        tries.append(f"`{command_for('compile', config.directory)}`, which names the guards")
        tries.append("--compile.dynamic True, or data of a fixed length")
    if diagnosis == "input-bound":
        workers = max(2, 2 * train.loader_workers)
        tries += [f"--train.loader-workers {workers}", "a cheaper __getitems__"]
    if diagnosis == "copies":
        tries.append("smaller types in the dataset (uint8, converted on the device)")
        tries.append("a step without .item(), .cpu() and print, which copy and wait")
    if diagnosis == "host-bound":
        # One long gap means slow Python code at that point; many short gaps mean small kernels.
        # The longest gap includes the overhead of tracing, and so does `rank.fractions`. So compare
        # these two, and not `fractions`, from which the overhead was removed.
        seconds_of_gaps = rank.fractions["host"] * rank.step_seconds
        if rank.longest_gap.seconds > 0.2 * seconds_of_gaps:
            return ["to move the Python code at that point out of the step"]
        tries += compile_tries
        if train.micro_batch_size < train.global_batch_size // world_size:
            larger = f"--train.micro-batch-size {2 * train.micro_batch_size}"
            tries.append(f"larger micro-batches ({larger})")
    if diagnosis == "kernel-bound":
        if rank.device and train.precision == "fp32":
            tries.append("--train.precision bf16")
        tries += compile_tries
    if diagnosis == "communication-bound":
        if parallel.reshards_after_forward(config.parallel):
            tries.append("--parallel.no-reshard-after-forward")
        tries.append("a larger --train.global-batch-size, or fewer ranks")
    # Do not advise a setting that the baseline stage has tried and rejected.
    for text in rejected_by_baseline(config):
        # The text is "--OPTION VALUE: REASON", such as "--train.loader-workers 2: slower, ...".
        # A remedy is either "--OPTION VALUE", or contains "(--OPTION VALUE)".
        rejected, _, _ = text.partition(":")
        tries = [each for each in tries if each != rejected and f"({rejected})" not in each]
    return tries


def rejected_by_baseline(config: Config) -> list[str]:
    """Return the settings that the baseline stage has rejected, with reasons; [] without any."""
    measured = read_stage(config.directory, "baseline")
    if not measured:
        return []
    return measured["figures"].get("rejected", [])


def compile_remedy(config: Config) -> list[str]:
    """Suggest a compile mode; [] if the run already compiles, or if no mode was faster."""
    # Suggest this mode if the compile stage has no result yet.
    best = "blocks"
    measured = read_stage(config.directory, "compile")
    if measured:
        best = measured["figures"].get("best", "none")
    if config.compile.mode != "none" or best == "none":
        return []
    return [f"--compile.mode {best} (`{command_for('compile', config.directory)}` measures it)"]
