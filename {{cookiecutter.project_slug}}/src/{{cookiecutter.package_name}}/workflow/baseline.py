"""The first stage: what one eager process does on this machine, before anything is made faster.

Takes the first steps of the run twice, by the project's own `setup` and `train_step` on its own
model and data.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

from .. import parallel
from ..config import Config
from ..engine.flops import cpu_peak_flops, forward_flops, peak_flops
from ..engine.memory import in_units, peak_memory
from ..engine.sampling import fetch
from ..engine.settings import override
from ..model import compute_loss
from ..train import State, setup
from .gates import Stage
from .measuring import Steps, describe, record_steps, spread

WARMUP, MEASURED = 5, 40
SECONDS = 60.0  # for each of the two runs, where steps are slow
DATA_WAIT_LIMIT = 0.05


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("baseline", config)
    config = override(config, {"compile.mode": "none"})
    world = parallel.setup(config.parallel, config.device)
    first = run_once(setup(config, world), WARMUP + MEASURED)
    state = setup(config, world)
    with gpu_utilisation(world.device) as utilisation:
        second = run_once(state, len(first.losses))
    judge(stage, state, first, second)
    if utilisation:
        stage.figures["gpu_utilisation"] = spread(utilisation)
        print(f"     GPU utilisation {describe(stage.figures['gpu_utilisation'], unit=' %')}")
    del state
    parallel.teardown(world)
    return stage.close()


def run_once(state: State, steps: int) -> Steps:
    """The first steps of a run; no more than about `SECONDS`, but enough to judge."""
    parts = [record_steps(state, WARMUP)]
    each = max(1e-6, float(parts[0].seconds[-1]))
    parts.append(record_steps(state, max(8, min(steps - WARMUP, int(SECONDS / each)))))
    state.loader.close()
    return parts[0] + parts[1]


def judge(stage: Stage, state: State, first: Steps, second: Steps) -> None:
    """Turn two recordings into checks and figures."""
    device = state.world.device
    steps = min(len(first.losses), len(second.losses))
    losses = second.losses
    differing = int((first.losses[:steps] != losses[:steps]).sum())
    stage.check(
        "deterministic",
        differing == 0,
        measured=f"{differing} of {steps} losses differ between two runs",
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
    waits = spread(both.waits / both.seconds)
    stage.check(
        "data_wait",
        waits["median"] < DATA_WAIT_LIMIT,
        measured=f"{waits['median']:.1%} of a step",
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
        "data_wait": waits,
        "peak_memory_bytes": memory,
        "flops_per_sample": 3 * flops if flops else None,
        "peak_flops": peak,
        "mfu": mfu,
        "parameters": sum(p.numel() for p in state.model.parameters()),
    }


@contextlib.contextmanager
def gpu_utilisation(device: torch.device) -> Iterator[list[float]]:
    """Percentages of time in which a kernel ran, as NVIDIA's driver tells them; none elsewhere."""
    samples: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            try:
                samples.append(float(torch.cuda.utilization(device)))
            except (ModuleNotFoundError, RuntimeError) as error:
                print(f"     GPU utilisation: not measured ({error}; pip install nvidia-ml-py)")
                return

    watcher = threading.Thread(target=watch, daemon=True)
    if device.type == "cuda":
        watcher.start()
    yield samples
    done.set()
    if watcher.is_alive():
        watcher.join()
