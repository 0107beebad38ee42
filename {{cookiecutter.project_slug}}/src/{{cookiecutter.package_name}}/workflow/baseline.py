"""The first stage: what one eager process does on this machine, before anything is made faster.

Takes the first steps of the run twice, by the project's own `setup` and `train_step` on its own
model and data.
"""

import time

import numpy as np
import torch

from ..config import Config, override
from ..device import move
from ..distributed import join, leave, parallel
from ..loss import checked, loss_vector, means
from ..model import compute_loss
from ..run.hardware import cpu_peak_flops, forward_flops, in_units, peak_flops, peak_memory
from ..sampling import fetch, seed_step
from ..train import State, setup, train_step
from .gates import Stage
from .measuring import Steps, describe, differences, record_steps, spread, synchronize

WARMUP, MEASURED = 5, 40
BATCHES = 8  # on which the loss has to fall
SECONDS = 60.0  # for each of the two runs, where steps are slow
DATA_WAIT_LIMIT = 0.05
ADDS_UP = 0.01  # relative: bfloat16 rounds, while a mean is off by a factor
# Relative, of the first loss and the others, where kernels may add up in any order.
NEAR = {"first": 1e-5, "others": 1e-2}


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("baseline", config)
    config = override(config, {"compile.mode": "none"})
    world = join(config.parallel, config.device)
    print(
        f"     the first {WARMUP + MEASURED} steps, fewer if they are slow, twice ...", flush=True
    )
    first, _ = run_once(setup(config, world), WARMUP + MEASURED)
    state = setup(config, world)
    second, ends = run_once(state, len(first.losses))
    judge_sums(stage, state)
    utilisation = gpu_utilisation(state)
    judge(stage, state, first, second, ends)
    if utilisation:
        stage.figures["gpu_utilisation"] = spread(utilisation)
        print(f"     GPU utilisation {describe(stage.figures['gpu_utilisation'], unit=' %')}")
    del state
    leave(world)
    return stage.close()


def run_once(state: State, steps: int) -> tuple[Steps, tuple[float, float]]:
    """The first steps of a run; no more than about `SECONDS`, but enough to judge.

    And the loss on its first batches, before and after them: other batches would differ by more
    than what a few steps teach.
    """
    before = loss_on_first_batches(state)
    parts = [record_steps(state, WARMUP)]
    each = max(1e-6, float(parts[0].seconds[-1]))
    parts.append(record_steps(state, max(8, min(steps - WARMUP, int(SECONDS / each)))))
    after = loss_on_first_batches(state)
    state.loader.close()
    return parts[0] + parts[1], (before, after)


def loss_on_first_batches(state: State) -> float:
    """The mean over some batches, by the weights as they are; random numbers as in training."""
    world, sums = state.world, 0.0
    state.loader.seek(0)
    for step in range(BATCHES):
        seed_step(state.config.train.seed, step, world.rank, world.device)
        for batch in state.loader.next():
            with torch.no_grad(), parallel.autocast(world, state.compute_dtype):
                loss = checked(compute_loss(state.module, move(batch, world.device)))
            sums = sums + loss_vector(loss)
    state.loader.seek(state.step)
    return means(sums, loss.metrics)["loss"]


def judge(
    stage: Stage, state: State, first: Steps, second: Steps, ends: tuple[float, float]
) -> None:
    """Turn two recordings into checks and figures; `ends` are the losses before and after."""
    device, losses = state.world.device, second.losses
    judge_losses(stage, first.losses, losses, device.type == "cpu")
    stage.check(
        "loss_falls",
        ends[1] < ends[0],
        measured=f"from {ends[0]:.4f} to {ends[1]:.4f} in {len(losses)} steps, on the same "
        f"{BATCHES} batches",
        wanted="less in the end",
        advice="try another --optim.learning-rate, and look at a batch of the data",
    )
    both = first.after(WARMUP) + second.after(WARMUP)
    seconds = spread(both.seconds)
    samples = state.config.train.global_batch_size / seconds["median"]
    tokens = getattr(state.spec, "tokens_per_sample", None)
    per_token = f", {samples * tokens:,.0f} tokens/s" if tokens else ""
    stage.check(
        "throughput",
        bool(samples > 0),
        measured=f"{samples:,.1f} samples/s{per_token}; a step {describe(seconds, 1e3, ' ms')}",
        wanted="measured",
    )
    # Of all steps together: workers bring several batches at once, and the middle step no wait.
    waited = float(both.waits.sum() / both.seconds.sum())
    stage.check(
        "data_wait",
        waited < DATA_WAIT_LIMIT,
        measured=f"{waited:.1%} of the time",
        wanted=f"less than {DATA_WAIT_LIMIT:.0%}",
        advice="make __getitems__ cheaper, or read ahead with --train.loader-workers (which does "
        "not help when a step takes but a millisecond or two)",
    )
    batch = fetch(state.loader.source.dataset, state.loader.source.order.ids(0)[:1])
    flops = forward_flops(state.model, compute_loss, batch)
    peak = peak_flops(device) or (cpu_peak_flops() if device.type == "cpu" else None)
    mfu = 3 * flops * samples / peak if flops and peak else None
    memory = peak_memory(device)
    share = f"{mfu:.1%} of {peak / 1e9:,.0f} GFLOP/s (MFU)" if mfu else "MFU unknown"
    print(f"     {share}; peak memory {in_units(memory)}")
    stage.figures |= {
        "losses": losses.tolist(),
        "step_seconds": seconds,
        "samples_per_second": samples,
        "tokens_per_second": samples * tokens if tokens else None,
        "data_wait": spread(both.waits / both.seconds) | {"all": waited},
        "peak_memory_bytes": memory,
        "flops_per_sample": 3 * flops if flops else None,
        "peak_flops": peak,
        "mfu": mfu,
        "parameters": sum(p.numel() for p in state.model.parameters()),
    }


def judge_sums(stage: Stage, state: State) -> None:
    """The parts of a batch add up to it: so it may be divided among micro-batches and ranks.

    In evaluation, without dropout and the like; of what is random even then nothing can be told.
    """
    names: list[str] = []

    def sums(ids: np.ndarray) -> torch.Tensor:
        batch = move(fetch(state.loader.source.dataset, ids), state.world.device)
        with torch.no_grad(), parallel.autocast(state.world, state.compute_dtype):
            loss = compute_loss(state.module, batch)
        names[:] = "loss", "count", *loss.metrics
        return loss_vector(loss).cpu()

    wanted = f"the same within {ADDS_UP:.0%}"
    ids = state.loader.source.order.ids(0)[: state.config.train.micro_batch_size]
    if len(ids) == 1:
        stage.check("adds_up", None, measured="one sample cannot be divided", wanted=wanted)
        return
    state.module.eval()
    whole, again = sums(ids), sums(ids)
    parts = torch.stack([sums(half) for half in np.array_split(ids, 2)])
    state.module.train()
    size = torch.maximum(whole.abs(), parts.abs().amax(0)).clamp(min=1e-12)
    if bool(((whole - again).abs() / size).max() > ADDS_UP / 5):
        reason = "the model draws random numbers, in evaluation too"
        stage.check("adds_up", None, measured=reason, wanted=wanted)
        return
    apart, at = ((parts.sum(0) - whole).abs() / size).max(0)
    one, two = parts[:, at].tolist()
    stage.check(
        "adds_up",
        bool(apart < ADDS_UP),
        measured=f"{names[at]} of {len(ids)} samples {whole[at]:.6g}, in parts {one:.6g} and "
        f"{two:.6g}",
        wanted=wanted,
        advice="compute_loss must return sums, not means (reduction='sum'), over what it counts",
    )


def judge_losses(stage: Stage, first: np.ndarray, second: np.ndarray, cpu: bool) -> None:
    """The same steps give the same losses; about the same where kernels are not deterministic."""
    steps = min(len(first), len(second))
    apart = differences(first[:steps], second[:steps])
    differing = int(np.count_nonzero(apart))
    measured = f"{differing} of {steps} losses differ between two runs"
    if differing:
        measured += f", by up to {apart.max():.0e} (relative)"
    if exact := cpu or stage.config.train.deterministic:
        passed, wanted = not differing, "none"
    else:
        passed = bool(apart[0] <= NEAR["first"] and apart.max() <= NEAR["others"])
        wanted = (
            f"the first within {NEAR['first']:.0e}, the others {NEAR['others']:.0e}, as kernels "
            "add up in any order (--train.deterministic: to the bit)"
        )
    stage.check(
        "deterministic",
        passed,
        measured=measured,
        wanted=wanted,
        advice="look for randomness that is no function of the seed, or state kept between runs"
        + ("" if exact else "; --train.deterministic leaves nothing else"),
    )


def gpu_utilisation(state: State, seconds: float = 3.0) -> list[float]:
    """Percentages of time in which a kernel ran, as the GPU's driver tells them, while training.

    None elsewhere. The driver looks back on up to a second.
    """
    samples: list[float] = []
    if state.world.device.type != "cuda":
        return samples
    started, elapsed, due = time.perf_counter(), 0.0, 1.0
    while elapsed < seconds:
        train_step(state, state.loader.next())
        elapsed = time.perf_counter() - started
        if elapsed < due:
            continue
        due = elapsed + 0.2
        try:
            samples.append(float(torch.cuda.utilization(state.world.device)))
        except Exception as error:  # of the driver's own library, which may not be there either
            print(f"     GPU utilisation: not measured ({error}; pip install nvidia-ml-py)")
            break
    synchronize(state.world.device)
    state.loader.close()
    return samples
