"""Goodput: which share of a long run's time is training that is kept, from 8 to 100,000 GPUs.

A simulation, given what a save and a restart cost and how often a GPU fails. Lives between
failures are drawn at random; in each, training starts again, continues, saves every so often, and
loses what was not yet durable at the next failure. The best interval is searched by trying, and
put beside the formula of Young (CACM 1974) and Daly (FGCS 2006), sqrt(2 * cost * mean life).

What a restart takes of a job that large is put together from what was measured in parts (RESTARTS).

The costs come from a run's own `checkpoint` stage (`--measured runs/NAME/workflow/checkpoint.json`)
or from the options. The default failure rate is what Llama 3's authors published: 419 unexpected
interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4).
"""

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .common import RESULTS
from .limits import CPU, load, replicated_whole, rows_of, whole
from .planning import extrapolated

LLAMA_GPUS = 16384
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * LLAMA_GPUS)
GPUS = (8, 64, 512, 1024, 4096, LLAMA_GPUS, 32768, 100_000)
STATE = 12 * 405e9  # bytes: weights and two moments of Llama 3 405B in float32
GROUP = 64  # ranks that hold a copy of it (HSDP)
NETWORK = 50e9  # bytes a second from one GPU to another, on another machine: assumed
RESTARTS = (  # jobs: GPUs, ranks that hold a copy, whether the group that failed restarts alone
    ("FSDP", 1024, 1024, False),
    ("HSDP", LLAMA_GPUS, GROUP, False),
    ("HSDP", 100_000, GROUP, False),
    ("HSDP, a group restarts alone", 100_000, GROUP, True),
)
BURSTS = 0.7  # shape of Weibull lives that come in bursts


@dataclass(frozen=True)
class Costs:
    """Seconds that a save and a failure cost."""

    blocked: float
    """Training stands still for so long in each save."""
    upload: float
    """Seconds from then until the checkpoint is durable, during training (synchronous: 0)."""
    restart: float
    """From a failure to the next step, noticing it included."""

    def cycle(self, interval: float) -> float:
        """Seconds from one save to the next: a save waits for the upload before it."""
        return max(interval, self.upload) + self.blocked

    def first(self, interval: float) -> float:
        """Seconds from the first step after a start until its first checkpoint is durable."""
        return interval + self.blocked + self.upload


def lives_of(count: int, shape: float, rng: np.random.Generator) -> np.ndarray:
    """Times between failures, (count,), with mean 1: Weibull; shape 1 is the exponential law."""
    return rng.weibull(shape, count) / math.gamma(1 + 1 / shape)


def simulate(costs: Costs, interval: float, lives: np.ndarray) -> tuple[float, float]:
    """Goodput of a run that saves after each `interval` seconds of training, and its error.

    `lives` are the seconds between failures; one that strikes during a restart starts it again.
    The second value is the standard error of the first.
    """
    kept = kept_of(costs, interval, lives)
    goodput = kept.sum() / lives.sum()
    error = np.std(kept - goodput * lives) / (lives.mean() * math.sqrt(len(lives)))
    return float(goodput), float(error)


def kept_of(costs: Costs, interval: float, lives: np.ndarray) -> np.ndarray:
    """Seconds of training in each life that a durable checkpoint keeps."""
    kept = lives - costs.restart  # and on in place: new memory would take longer than the sums
    kept -= costs.first(interval)
    kept /= costs.cycle(interval)
    np.floor(kept, out=kept)
    kept += 1
    np.maximum(kept, 0, out=kept)
    kept *= interval
    return kept


def expected(costs: Costs, interval: float, mean_life: float) -> float:
    """The same for exponential lives in closed form; with `upload` 0 it is Daly's equation 13."""
    whole = math.exp(-(costs.restart + costs.first(interval)) / mean_life)
    return interval * whole / -math.expm1(-costs.cycle(interval) / mean_life) / mean_life


def young_daly(costs: Costs, mean_life: float) -> float:
    """The interval by the formula; no shorter than an upload, which the next save waits for."""
    return max(math.sqrt(2 * costs.blocked * mean_life), costs.upload)


def best_interval(costs: Costs, lives: np.ndarray) -> tuple[float, float]:
    """The interval with the highest goodput, and that, by trying 97 of them around the formula."""
    middle = young_daly(costs, float(lives.mean()))
    tried = [middle * 2 ** (k / 16) for k in range(-48, 49)]
    whole = lives.sum()
    found = [float(kept_of(costs, interval, lives).sum() / whole) for interval in tried]
    best = int(np.argmax(found))
    return tried[best], found[best]


def row(gpus: int, costs: Costs, rate: float, lives: np.ndarray) -> dict[str, float]:
    """What one way of saving comes to on `gpus` GPUs; `lives` with mean 1."""
    mean_life = 3600 / (rate * gpus)
    mine = lives * mean_life
    formula = young_daly(costs, mean_life)
    interval, goodput = best_interval(costs, mine)
    by_formula, error = simulate(costs, formula, mine)
    return {
        "gpus": gpus,
        "hours_between_failures": mean_life / 3600,
        "best_interval_seconds": interval,
        "formula_interval_seconds": formula,
        "best_goodput": goodput,
        "formula_goodput": by_formula,
        "formula_goodput_error": error,
        "formula_goodput_expected": expected(costs, formula, mean_life),
    }


def restart_parts(results: Path, gpus: int, group: int, alone: bool) -> dict[str, float]:
    """Seconds of the parts of a restart, by what was measured, and how that grew with ranks."""
    planning, meeting, restart, restore = (
        load(results, name) for name in ("planning", "meeting", "restart", "restore")
    )
    rate = 1e9 * restore["series"]["2 ranks: dcp, restore"]["median"]
    store = meeting["groups"]["as needed"]
    parts = {
        "started again": restart["series"]["a rank is killed"]["median"],
        "met": extrapolated(store, "server" + CPU, group if alone else gpus),
    }
    if alone:
        return {**parts, "index": 0.0, "read": STATE / group / NETWORK}
    row = next(row for row in rows_of(planning)[0] if row["ranks"] == 1024)
    index = sum(
        replicated_whole(planning, key, gpus) if group < gpus else whole(planning, row, key)
        for key in ("index_read" + CPU, "load" + CPU)
    )
    return {**parts, "index": index, "read": STATE / group / rate}


def restarts(results: Path, costs: Costs, rate: float, lives: np.ndarray) -> list[dict[str, Any]]:
    """Each job of RESTARTS: the parts of its restart, and its goodput; `lives` with mean 1."""
    rows = []
    for job, gpus, group, alone in RESTARTS:
        parts = restart_parts(results, gpus, group, alone)
        mean_life, mine = 3600 / (rate * gpus), replace(costs, restart=sum(parts.values()))
        if alone:  # no step is done again: what a group has lost, the others have
            kept = np.maximum(lives * mean_life - mine.restart, 0).sum() / mean_life / lives.sum()
            goodput = float(kept * mine.upload / mine.cycle(mine.upload))
        else:
            goodput = best_interval(mine, lives * mean_life)[1]
        rows.append({"job": job, "gpus": gpus, "parts": parts, "goodput": goodput})
    return rows


def measured(path: Path) -> dict[str, float]:
    """Costs by what a run's `checkpoint` stage has measured."""
    figures = json.loads(path.read_text("utf-8"))["figures"]
    # A save also makes the steps beside it slower. Older results lack this cost.
    cost = figures.get("cost_seconds", figures["blocked_seconds"])
    whole = figures["save_seconds"]
    restart = figures["restart_seconds"]["total"]
    return {"blocked": cost["median"], "save": whole["median"], "restart": restart}


def main() -> None:
    """Simulate every scale, synchronous and asynchronous; print a table and write the result."""
    parser = argparse.ArgumentParser("python -m benchmarks.goodput", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--measured", type=Path, help="a run's workflow/checkpoint.json")
    parser.add_argument("--blocked", type=float, default=0.02, help="seconds, asynchronous save")
    parser.add_argument("--save", type=float, default=30.0, help="seconds until it is durable")
    parser.add_argument("--restart", type=float, default=300.0, help="seconds to the next step")
    parser.add_argument(
        "--rate", type=float, default=FAILURES_PER_GPU_HOUR, help="failures per GPU and hour"
    )
    parser.add_argument("--shape", type=float, default=1.0, help="of Weibull lives (1: no memory)")
    parser.add_argument("--failures", type=int, default=200_000, help="to simulate at each scale")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    given = parser.parse_args()
    seconds = {"blocked": given.blocked, "save": given.save, "restart": given.restart}
    seconds |= measured(given.measured) if given.measured else {}
    asynchronous = Costs(
        seconds["blocked"], max(seconds["save"] - seconds["blocked"], 0.0), seconds["restart"]
    )
    ways = {
        "synchronous": replace(asynchronous, blocked=seconds["save"], upload=0.0),
        "asynchronous": asynchronous,
    }
    lives, bursts = (
        lives_of(given.failures, shape, np.random.default_rng(given.seed))
        for shape in (given.shape, BURSTS)
    )
    result: dict[str, Any] = {
        "command": "python -m benchmarks.goodput",
        "settings": {**seconds, "rate": given.rate, "shape": given.shape, "failures": len(lives)},
        "restarts": restarts(RESULTS, asynchronous, given.rate, lives),
        "bursts": {"shape": BURSTS, **row(LLAMA_GPUS, asynchronous, given.rate, bursts)},
        "ways": {
            way: [row(gpus, costs, given.rate, lives) for gpus in GPUS]
            for way, costs in ways.items()
        },
    }
    given.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1)
    (given.out / "goodput.json").write_text(text + "\n", "utf-8")
    for way, rows in result["ways"].items():
        for it in rows:
            print(
                f"{way}, {it['gpus']:,} GPUs, "
                f"a failure every {it['hours_between_failures']:.2f} h: best every "
                f"{it['best_interval_seconds']:.0f} s, {it['best_goodput']:.2%}; "
                f"by the formula every {it['formula_interval_seconds']:.0f} s, "
                f"{it['formula_goodput']:.2%} (expected {it['formula_goodput_expected']:.2%})"
            )


if __name__ == "__main__":
    main()
