"""The first stage: what one eager process does on this machine, before anything is made faster.

Runs the project's own `setup` and `train_step` on its own model and data, twice, and writes
workflow/baseline.json.
"""

import logging
import time

import numpy as np
import torch

from .. import parallel
from ..config import Config
from ..engine.memory import peak_memory
from ..engine.metrics import cpu_peak_flops, forward_flops, means, peak_flops
from ..engine.sampling import fetch
from ..engine.settings import override
from ..model import compute_loss
from ..train import State, setup, train_step
from .gates import Stage

log = logging.getLogger(__name__)
WARMUP, MEASURED = 5, 40
DATA_WAIT_LIMIT = 0.05


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    config = override(config, {"compile.mode": "none"})
    world = parallel.setup(config.parallel, config.device)
    steps = WARMUP + MEASURED
    first = record_steps(setup(config, world), steps)
    state = setup(config, world)
    second = record_steps(state, steps)
    stage = Stage("baseline", config.directory)
    judge(stage, state, first, second)
    del state
    parallel.teardown(world)
    return stage.close()


def record_steps(state: State, steps: int) -> dict[str, np.ndarray]:
    """Losses, seconds and seconds of waiting for data of each step, device-synchronised."""
    losses, seconds, waits = [], [], []
    synchronize(state.world.device)
    for _ in range(steps):
        started, waited = time.perf_counter(), state.loader.seconds
        train_step(state, state.loader.next())
        synchronize(state.world.device)
        seconds.append(time.perf_counter() - started)
        waits.append(state.loader.seconds - waited)
        losses.append(means(state.sums, state.metrics)["loss"])
        state.sums = 0.0
    state.loader.close()
    return {"loss": np.array(losses), "seconds": np.array(seconds), "waits": np.array(waits)}


def judge(
    stage: Stage, state: State, first: dict[str, np.ndarray], second: dict[str, np.ndarray]
) -> None:
    """Turn two recordings into checks and figures."""
    config, device = state.config, state.world.device
    losses = second["loss"]
    differing = int((first["loss"] != losses).sum())
    stage.check(
        "deterministic",
        differing == 0,
        measured=f"{differing} of {len(losses)} losses differ between two runs",
        wanted="none",
        advice="try --train.deterministic"
        if device.type == "cuda"
        else "look for randomness that is no function of the seed, or state kept between runs",
    )
    quarter = max(1, len(losses) // 4)
    start, end = losses[:quarter].mean(), losses[-quarter:].mean()
    stage.check(
        "loss_falls",
        bool(end < start),
        measured=f"{start:.4f} in the first quarter of {len(losses)} steps, {end:.4f} in the last",
        wanted="less in the last",
        advice="try another --optim.learning-rate, and look at a batch of the data",
    )
    both = {key: np.concatenate([run[key][WARMUP:] for run in (first, second)]) for key in first}
    p10, median, p90 = (float(x) for x in np.percentile(both["seconds"], [10, 50, 90]))
    samples = config.train.global_batch_size / median
    tokens = getattr(state.spec, "tokens_per_sample", None)
    stage.check(
        "throughput",
        bool(np.isfinite(samples)),
        measured=f"{samples:,.1f} samples/s"
        + (f", {samples * tokens:,.0f} tokens/s" if tokens else "")
        + f"; a step {median * 1e3:.2f} ms (p10 {p10 * 1e3:.2f}, p90 {p90 * 1e3:.2f})",
        wanted="measured",
        advice="",
    )
    wait = float(np.median(both["waits"] / both["seconds"]))
    stage.check(
        "data_wait",
        wait < DATA_WAIT_LIMIT,
        measured=f"{wait:.1%} of a step",
        wanted=f"less than {DATA_WAIT_LIMIT:.0%}",
        advice="read ahead with --train.loader-workers, or make __getitems__ cheaper",
    )
    batch = fetch(state.loader.source.dataset, state.loader.source.order.ids(0)[:1])
    flops = forward_flops(state.model, compute_loss, batch)
    peak = peak_flops(device) or (cpu_peak_flops() if device.type == "cpu" else None)
    mfu = 3 * flops * samples / peak if flops and peak else None
    memory = peak_memory(device)
    share = f"{mfu:.1%} of {peak / 1e9:,.0f} GFLOP/s (MFU)" if mfu else "MFU unknown"
    print(f"     {share}; peak memory {memory / 1e9:.2f} GB")
    stage.figures = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "step_seconds": {"median": median, "p10": p10, "p90": p90, "steps": len(both["seconds"])},
        "samples_per_second": samples,
        "tokens_per_second": samples * tokens if tokens else None,
        "data_wait": wait,
        "peak_memory_bytes": memory,
        "flops_per_sample": 3 * flops if flops else None,
        "peak_flops": peak,
        "mfu": mfu,
        "parameters": sum(p.numel() for p in state.model.parameters()),
    }


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
