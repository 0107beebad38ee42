"""Measure how one eager process trains, before any optimization: the baseline stage."""

import contextlib
import gc
from dataclasses import dataclass

import numpy as np

from ..adds_up import (
    DRAWS,
    TOLERANCE,
    BatchSlice,
    compare,
    evaluate,
    need_not_add_up,
    read_batches,
    whole_and_parts,
)
from ..config import Config, override
from ..distributed import Group, World, join, leave
from ..resume import load_first_weights
from ..run.hardware import in_units
from ..run.model_state import evaluation_mode
from ..train import State, setup
from .stage import Stage
from .timing import (
    Steps,
    describe,
    differences,
    in_rounds,
    peak_memory,
    record_steps,
    spread,
)

# Each of two runs takes this many warm-up steps, and then this many measured steps.
WARMUP = 5
MEASURED = 40
# Time limit of each run in seconds. A slow run takes fewer steps.
SECONDS = 60.0
# The number of batches on which the loss must fall.
BATCHES = 8
# Steps may wait for data for this fraction of their time, or for this many seconds each.
DATA_WAIT_LIMIT = 0.05
NEGLIGIBLE_WAIT = 1e-3
CHEAPER = "make __getitems__ cheaper"
# Allowed relative differences between the losses of two runs, if kernels may sum in any order: of
# the first loss, and of all losses.
FIRST = 1e-5
OTHERS = 1e-2


def measure(config: Config) -> int:
    """Run the stage; return 1 if a check failed, else 0."""
    stage = Stage("baseline", config)
    state, steps = judge_steps(stage)
    more_workers = max(2, 2 * config.train.loader_workers)
    advice = f"{CHEAPER}, or read ahead with --train.loader-workers {more_workers}"
    judge_waits(stage, steps, advice)
    world = state.world
    # The process group must outlive the model, so drop the last reference to the model.
    del state
    leave(world)
    return stage.close()


def judge_steps(stage: Stage) -> tuple[State, Steps]:
    """Take the first steps of the run twice and check them.

    Returns the state after the second run, and the steps of both runs without the warm-up.
    """
    config = override(stage.config, {"compile.mode": "none"})
    world = join(config.parallel, config.device)
    print("     the first steps of the run, twice ...", flush=True)
    first = take_first_steps(set_up(config, world), WARMUP + MEASURED)
    # Blocks with activation checkpointing are in reference cycles, so only the garbage collector
    # frees the first model.
    gc.collect()
    state = set_up(config, world)
    # A slow first run has taken fewer steps. Then the second run needs no more steps, either.
    second = take_first_steps(state, len(first.steps.losses))
    judge_sums(stage, state)
    on_cpu = world.device.type == "cpu"
    judge_losses(stage, first.steps.losses, second.steps.losses, on_cpu)
    judge_progress(stage, second)
    steps = first.steps.without_first(WARMUP).followed_by(second.steps.without_first(WARMUP))
    stage.figures["losses"] = second.steps.losses.tolist()
    measure_throughput(stage, state, steps)
    return state, steps


def set_up(config: Config, world: World) -> State:
    """Set up training with the initial weights of the run, or those of --init-from."""
    state = setup(config, world)
    if config.init_from:
        load_first_weights(state, Group(world))
    return state


@dataclass(frozen=True)
class FirstSteps:
    """The first steps of a run, and the mean loss on its first batches before and after them."""

    steps: Steps
    loss_before: float
    loss_after: float


def take_first_steps(state: State, steps: int) -> FirstSteps:
    """Take the first `steps` steps of a run, warm-up included, or fewer to stay near `SECONDS`.

    The losses of the steps do not show whether training works: each step has another batch, and
    losses differ more between batches than a few steps improve them. So the loss is also measured
    on the same batches before and after the steps.
    """
    before = loss_on_first_batches(state)
    warmup = record_steps(state, WARMUP)
    step_seconds = max(1e-6, float(warmup.seconds[-1]))
    steps_in_time = int(SECONDS / step_seconds)
    # Take at least 8 steps, however slow they are.
    measured = record_steps(state, max(8, min(steps - WARMUP, steps_in_time)))
    after = loss_on_first_batches(state)
    state.loader.close()
    return FirstSteps(warmup.followed_by(measured), loss_before=before, loss_after=after)


def loss_on_first_batches(state: State) -> float:
    """Return the mean loss over the first `BATCHES` global batches, without training on them."""
    slices: list[BatchSlice] = []
    for step in range(BATCHES):
        for micro_batch in state.plan:
            slices.append(BatchSlice(step, micro_batch.indices))
    # The model is in training mode, as in the steps. Random numbers, such as those of dropout, are
    # the same in each call.
    with contextlib.closing(read_batches(state, slices)) as batches:
        sums = evaluate(state, batches).sums
    # The shape is [draws, batches, names]. The first two names are the sum of the losses and their
    # count.
    total, count, *_ = sums.sum((0, 1)).tolist()
    return total / count


def judge_progress(stage: Stage, taken: FirstSteps) -> None:
    """Check that the first steps lower the loss on the same batches."""
    before = taken.loss_before
    after = taken.loss_after
    steps = len(taken.steps.losses)
    measured = f"from {before:.4f} to {after:.4f} on {BATCHES} batches in {steps} steps"
    advice = "try another --optim.learning-rate, and look at a batch of the data"
    stage.check(
        "loss_falls", after < before, measured=measured, wanted="lower at the end", advice=advice
    )


def measure_throughput(stage: Stage, state: State, steps: Steps) -> None:
    """Measure throughput, peak memory and MFU, and print them."""
    # Workers deliver batches in bursts, so only some steps wait for data. A median over single
    # steps would hide the waits, so take it over means of rounds with one step per worker.
    step_seconds = spread(in_rounds(steps.seconds, state.config.train.loader_workers))
    samples_per_second = state.config.train.global_batch_size / step_seconds["median"]
    measured = f"{samples_per_second:,.1f} samples/s"
    # The spec of the data has this attribute only if a sample is a sequence of tokens.
    tokens_per_sample = getattr(state.spec, "tokens_per_sample", None)
    tokens_per_second = None
    if tokens_per_sample:
        tokens_per_second = samples_per_second * tokens_per_sample
        measured += f", {tokens_per_second:,.0f} tokens/s"
    measured += f"; a step {describe(step_seconds)}"
    stage.check("throughput", True, measured=measured, wanted="measured")

    memory = peak_memory(state.world.device)
    text = f"     peak memory {in_units(memory)}"
    mfu = None
    if state.peak_flops and state.forward_flops:
        # `forward_flops` is for one sample. A backward pass takes twice as many FLOPs.
        mfu = 3 * state.forward_flops * samples_per_second / state.peak_flops
    if mfu:
        text += f", {mfu:.1%} of the device's peak FLOP/s (MFU)"
    print(text)
    stage.figures |= {
        "step_seconds": step_seconds,
        "samples_per_second": samples_per_second,
        "tokens_per_second": tokens_per_second,
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "peak_memory_bytes": memory,
        "mfu": mfu,
    }


def judge_waits(stage: Stage, steps: Steps, advice: str) -> None:
    """Check that steps hardly wait for data; `advice` is what to do otherwise."""
    # Use means, not medians: workers deliver batches in bursts, so most steps may not wait at all.
    wait = float(steps.waits.mean())
    fraction = wait / float(steps.seconds.mean())
    stage.figures["data_wait"] = spread(steps.waits / steps.seconds) | {"all": fraction}
    measured = f"{fraction:.1%} of the time, {wait * 1e3:.2f} ms a step"
    wanted = f"less than {DATA_WAIT_LIMIT:.0%} or {NEGLIGIBLE_WAIT * 1e3:g} ms"
    passed = fraction < DATA_WAIT_LIMIT or wait < NEGLIGIBLE_WAIT
    stage.check("data_wait", passed, measured=measured, wanted=wanted, advice=advice)


def judge_losses(stage: Stage, first: np.ndarray, second: np.ndarray, cpu: bool) -> None:
    """Check that two runs have the same losses, or close ones if kernels are not deterministic."""
    steps = min(len(first), len(second))
    relative = differences(first[:steps], second[:steps])
    differing = int(np.count_nonzero(relative))
    measured = f"{differing} of {steps} losses differ between two runs"
    if differing:
        measured += f", by up to {relative.max():.0e} (relative)"
    advice = "look for randomness that does not depend on the seed, or state kept between runs"
    # Kernels on a CPU are deterministic even without --train.deterministic.
    if cpu or stage.config.train.deterministic:
        passed = differing == 0
        wanted = "none"
    else:
        passed = bool(relative[0] <= FIRST and relative.max() <= OTHERS)
        wanted = f"at most {FIRST:.0e} in the first loss and {OTHERS:.0e} in the others"
        advice += "; --train.deterministic excludes the order of sums in kernels as the cause"
    stage.check("deterministic", passed, measured=measured, wanted=wanted, advice=advice)


def judge_sums(stage: Stage, state: State) -> None:
    """Check that the sums of compute_loss over two halves of a batch add up to those of the batch.

    Gradient accumulation requires this. The model is in evaluation mode, without dropout. It may
    still be random, so each batch is evaluated several times (draws), and the means are compared.
    """
    wanted = f"the same within {TOLERANCE:.0%}"
    if need_not_add_up():
        measured = "declared: ADDS_UP = False in model.py"
        stage.check("adds_up", True, measured=measured, wanted=wanted)
        return
    size = min(state.config.train.micro_batch_size, state.config.train.global_batch_size)
    if size == 1:
        stage.check("adds_up", None, measured="one sample cannot be split", wanted=wanted)
        return
    reading = contextlib.closing(read_batches(state, whole_and_parts(size), DRAWS))
    with evaluation_mode(state.module), reading as batches:
        evaluation = evaluate(state, batches, DRAWS)
    comparison = compare(evaluation, size)
    if comparison.is_random:
        wanted += f" plus 4 standard errors over {DRAWS} random draws"
    wrong = comparison.wrong
    # Show the first sum that does not add up. If all sums add up, show the one that differs most.
    shown = wrong[0] if wrong else int(comparison.relative.argmax())
    measured = comparison.describe(shown)
    passed = not wrong
    advice = ""
    if wrong:
        advice = comparison.advice(shown)
    elif comparison.is_too_random:
        passed = None
        measured = f"too random to tell: {measured}"
    stage.check("adds_up", passed, measured=measured, wanted=wanted, advice=advice)
