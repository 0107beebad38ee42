"""The baseline stage: what one eager process does here, before anything is made faster."""

import gc

import numpy as np
import torch

from ..config import Config, override
from ..device import move
from ..distributed import join, leave, parallel
from ..loss import LossSum, loss_vector, returned
from ..model import compute_loss
from ..run.hardware import in_units
from ..sampling import STEP, fetch, sample_keys, seed_random
from ..train import State, setup
from .stage import Stage
from .timing import Steps, describe, differences, peak_memory, record_steps, spread

WARMUP, MEASURED = 5, 40  # steps
SECONDS = 60.0  # for each of the two runs, if steps are slow
BATCHES = 8  # on which the loss has to fall
DATA_WAIT_LIMIT, WORTH_A_WORD = 0.05, 1e-3  # of a step: its share, and seconds
CHEAPER = "make __getitems__ cheaper"
ADDS_UP = 0.01  # relative: bfloat16 rounds by less, while a mean is off by a factor
DRAWS, TOO_RANDOM = 16, 0.1  # evaluations, as a model may be random; a limit that says nothing
NOT_A_SUM = {
    "mean": "compute_loss must return sums, not means (reduction='sum')",
    "count": "a count must be of its batch: how many values its sum adds up",
    "batch": "it compares samples of a batch, so micro-batches and ranks change it. For a loss, "
    "make what is compared one sample; for a metric, return the sums it is made of",
}
# Relative differences of the first loss and of the others, where kernels may add in any order.
FIRST, OTHERS = 1e-5, 1e-2
Batch = tuple[int, slice]  # a step, and places in its global batch


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("baseline", config)
    state, steps = judge_steps(stage)
    workers, world = 2 * config.train.loader_workers or 2, state.world
    judge_waits(stage, steps, f"{CHEAPER}, or read ahead with --train.loader-workers {workers}")
    del state
    leave(world)
    return stage.close()


def judge_steps(stage: Stage) -> tuple[State, Steps]:
    """Take the first steps of the run twice and judge them; a state, and the steps of both."""
    config = override(stage.config, {"compile.mode": "none"})
    world = join(config.parallel, config.device)
    print("     the first steps of the run, twice ...", flush=True)
    first, _ = first_steps(setup(config, world), WARMUP + MEASURED)
    gc.collect()  # recomputed blocks refer to themselves
    state = setup(config, world)
    second, (before, after) = first_steps(state, len(first.losses))
    judge_sums(stage, state)
    judge_losses(stage, first.losses, second.losses, world.device.type == "cpu")
    steps, wanted = len(second.losses), "lower at the end"
    measured = f"from {before:.4f} to {after:.4f} on {BATCHES} batches, by {steps} steps"
    advice = "try another --optim.learning-rate, and look at a batch of the data"
    stage.check("loss_falls", after < before, measured=measured, wanted=wanted, advice=advice)
    both = Steps(*(np.append(a[WARMUP:], b[WARMUP:]) for a, b in zip(first, second, strict=True)))
    seconds = spread(both.seconds)
    samples = config.train.global_batch_size / seconds["median"]
    tokens = samples * (getattr(state.spec, "tokens_per_sample", None) or 0)
    per_token = f", {tokens:,.0f} tokens/s" if tokens else ""
    measured = f"{samples:,.1f} samples/s{per_token}; a step {describe(seconds)}"
    stage.check("throughput", True, measured=measured, wanted="measured")
    memory, mfu = peak_memory(world.device), None
    if state.peak_flops and state.forward_flops:  # backward takes twice what forward does
        mfu = 3 * state.forward_flops * samples / state.peak_flops
    share = f", {mfu:.1%} of the device's peak FLOP/s (MFU)" if mfu else ""
    print(f"     peak memory {in_units(memory)}{share}")
    stage.figures |= {
        "losses": second.losses.tolist(),
        "step_seconds": seconds,
        "samples_per_second": samples,
        "tokens_per_second": tokens or None,
        "parameters": sum(p.numel() for p in state.model.parameters()),
        "peak_memory_bytes": memory,
        "mfu": mfu,
    }
    return state, both


def first_steps(state: State, steps: int) -> tuple[Steps, tuple[float, float]]:
    """The first steps of a run, within about `SECONDS`; the loss on fixed batches before and after.

    The losses of the steps come from batches that differ by more than a few steps teach.
    """
    before = loss_on_first_batches(state)
    warmup = record_steps(state, WARMUP)
    in_time = int(SECONDS / max(1e-6, float(warmup.seconds[-1])))
    measured = record_steps(state, max(8, min(steps - WARMUP, in_time)))
    after = loss_on_first_batches(state)
    state.loader.close()
    return Steps(*map(np.append, warmup, measured)), (before, after)


def loss_on_first_batches(state: State) -> float:
    """The mean loss over the first batches."""
    batches = [(step, share.places) for step in range(BATCHES) for share in state.plan]
    total, count, *_ = evaluate(state, batches)[0].sum((0, 1)).tolist()
    return total / count


def judge_waits(stage: Stage, steps: Steps, advice: str) -> None:
    """Check that steps hardly wait for data."""
    wait = float(steps.waits.mean())
    # Over all steps together: loader workers bring several batches at once, then the median is 0.
    share = wait / float(steps.seconds.mean())
    stage.figures["data_wait"] = spread(steps.waits / steps.seconds) | {"all": share}
    measured = f"{share:.1%} of the time, {wait * 1e3:.2f} ms a step"
    wanted = f"less than {DATA_WAIT_LIMIT:.0%}, or than {WORTH_A_WORD * 1e3:g} ms"
    passed = share < DATA_WAIT_LIMIT or wait < WORTH_A_WORD
    stage.check("data_wait", passed, measured=measured, wanted=wanted, advice=advice)


def judge_losses(stage: Stage, first: np.ndarray, second: np.ndarray, cpu: bool) -> None:
    """Check that two runs have the same losses; about the same if kernels are not deterministic."""
    steps = min(len(first), len(second))
    apart = differences(first[:steps], second[:steps])
    differing = int(np.count_nonzero(apart))
    measured = f"{differing} of {steps} losses differ between two runs"
    if differing:
        measured += f", by up to {apart.max():.0e} (relative)"
    advice = "look for randomness that does not follow from the seed, or state kept between runs"
    if cpu or stage.config.train.deterministic:
        passed, wanted = not differing, "none"
    else:
        passed = bool(apart[0] <= FIRST and apart.max() <= OTHERS)
        wanted = f"at most {FIRST:.0e} in the first loss and {OTHERS:.0e} in the others"
        advice += "; --train.deterministic rules out the order in which kernels add"
    stage.check("deterministic", passed, measured=measured, wanted=wanted, advice=advice)


def judge_sums(stage: Stage, state: State) -> None:
    """Check that the parts of a batch add up to it, so that micro-batches and ranks may share it.

    In evaluation mode, without dropout; on average, as a model may be random even then.
    """
    wanted = f"the same within {ADDS_UP:.0%}"
    size = min(state.config.train.micro_batch_size, state.config.train.global_batch_size)
    if size == 1:
        stage.check("adds_up", None, measured="one sample cannot be divided", wanted=wanted)
        return
    middle = (size + 1) // 2
    parts = [(0, slice(size)), (0, slice(middle)), (0, slice(middle, size))]
    state.module.eval()
    drawn, names = evaluate(state, parts, DRAWS)
    state.module.train()
    scale = drawn.abs().amax((0, 1)).clamp(min=1e-12)
    error = ((drawn[:, 1] + drawn[:, 2] - drawn[:, 0]) / scale).std(0) / DRAWS**0.5
    if error.max() > ADDS_UP / 100:
        wanted += f", and 4 standard errors of {DRAWS} draws of its random numbers"
    limit, (whole, one, two) = ADDS_UP + 4 * error, drawn.mean(0)
    apart = (one + two - whole).abs() / scale
    wrong = [at for at in range(len(names)) if not apart[at] <= limit[at]]  # of NaN, too
    at = wrong[0] if wrong else int(apart.argmax())
    measured = f"{names[at]} of {size} samples {whole[at]:.6g}, "
    measured += f"in parts {one[at]:.6g} + {two[at]:.6g}"
    share = middle / size if 1 in wrong else one[1] / (one[1] + two[1])
    of_means = (share * one + (1 - share) * two - whole).abs() / scale <= limit
    kind = "count" if at % 2 else "mean" if of_means[at] else "batch"
    passed, advice = not wrong, NOT_A_SUM[kind]
    if not wrong and limit.max() > TOO_RANDOM:
        passed, measured, advice = None, f"too random to tell: {measured}", ""
    stage.check("adds_up", passed, measured=measured, wanted=wanted, advice=advice)


def evaluate(state: State, batches: list[Batch], draws: int = 1) -> tuple[torch.Tensor, list[str]]:
    """Sums and counts of batches [draws, batches, names], and their names; draws are seeded.

    A batch is a slice of a step's global batch.
    """
    vectors, names, world = [], [], state.world
    dataset, order = state.loader.source.dataset, state.loader.source.order
    for step, places in draws * batches:
        seed_random(state.config.train.seed, STEP, len(vectors), world.rank, device=world.device)
        # Augmented as in training, while what samples draw is drawn anew.
        keys = None
        if hasattr(dataset, "augment"):
            keys = sample_keys(order.seed, order.positions(step)[places])
        batch = move(fetch(dataset, order.ids(step)[places], keys), world.device)
        with torch.no_grad():
            loss = parallel.forward(compute_loss, state, batch)
            returned(loss, LossSum, "what compute_loss (model.py) returns")
        vectors.append(loss_vector(loss).double().cpu())
        names = ["loss", "count"]
        for name, metric in loss.metrics.items():
            names += [name, f"count of {name}" if isinstance(metric, tuple) else "count"]
    return torch.stack(vectors).unflatten(0, (draws, -1)), names
