"""What holds a step up, and what to try about it: from the shares of its time to words."""

from collections.abc import Iterator

from ..config import Config
from ..run.hardware import usable_cores
from .gates import command, read_stage
from .trace import Breakdown

BOUND = {
    "data": "input-bound",
    "copies": "input-bound",
    "host": "host-bound",
    "kernels": "kernel-bound",
    "communication": "communication-bound",
}
WORTH_A_WORD = 0.15  # of a step, lost to something that is not what it is bound by


def diagnose(shares: dict[str, float], compilations: int) -> str:
    """What most of a step goes to; compiling makes every other share meaningless, so it wins."""
    if compilations:
        return "recompiling"
    return max(BOUND.values(), key=lambda name: of(shares, name))


def of(shares: dict[str, float], diagnosis: str) -> float:
    """The share of a step that stands behind a diagnosis."""
    return sum(shares[part] for part, name in BOUND.items() if name == diagnosis)


def advice(diagnosis: str, shares: dict[str, float], found: Breakdown, config: Config) -> str:
    """The numbers behind a diagnosis, and the next thing to try."""
    say = {
        "recompiling": recompiling,
        "input-bound": input_bound,
        "host-bound": host_bound,
        "kernel-bound": kernel_bound,
        "communication-bound": communication_bound,
    }[diagnosis]
    numbers, what = say(shares, found, config)
    return f"{numbers}. Try {what}"


def others(diagnosis: str, shares: dict[str, float]) -> Iterator[str]:
    """What else a step loses much of its time to."""
    for name in dict.fromkeys(BOUND.values()):
        if name not in (diagnosis, "kernel-bound") and of(shares, name) > WORTH_A_WORD:
            yield name


def recompiling(shares: dict[str, float], found: Breakdown, config: Config) -> tuple[str, str]:
    """Something varies that the compiler took for constant."""
    numbers = (
        f"{found.compilations} compilations within {len(found.seconds)} steps that should need none"
    )
    return numbers, (
        f"`{command('compile', config.directory)}`, which names the guards that failed; where "
        "lengths vary, --compile.dynamic True, or data of one length"
    )


def input_bound(shares: dict[str, float], found: Breakdown, config: Config) -> tuple[str, str]:
    """The loop waits for a batch, or for its copy to the device."""
    numbers = f"a step waits for data during {shares['data']:.0%} of its time"
    if shares["copies"] > shares["data"]:
        numbers = f"copies between host and device take {shares['copies']:.0%} of a step"
        return numbers, (
            "smaller types in the dataset (uint8, converted on the device); copies that the host "
            "waits for come from .item(), .cpu() or print in the step"
        )
    workers = config.train.loader_workers
    more = 2 * workers or max(1, min(4, usable_cores() - 1))
    return numbers, f"--train.loader-workers {more}, or make __getitems__ cheaper"


def host_bound(shares: dict[str, float], found: Breakdown, config: Config) -> tuple[str, str]:
    """Neither data nor kernels: Python, launches, waits on the device."""
    gap, steps = found.longest_gap, len(found.seconds)
    step = found.seconds.sum() / steps
    numbers = (
        f"nothing is computed during {shares['host']:.0%} of a step; the longest gap, "
        f"{gap.seconds * 1e3:.2g} ms of a step's {step * 1e3:.3g}, is after {_short(gap.after)} "
        f"and before {_short(gap.before)}"
    )
    if gap.seconds > 0.2 * shares["host"] * step:
        return numbers, "to move the Python work there out of the step, or into tensor operations"
    tries = [*_compiling(config), *_larger_batches(config)]
    return numbers, " and ".join(tries) or "more work per step: launching it takes longer than it"


def kernel_bound(shares: dict[str, float], found: Breakdown, config: Config) -> tuple[str, str]:
    """The device computes, as it should."""
    numbers = f"{shares['kernels']:.0%} of a step is computing"
    if found.operators:
        top = found.operators[0]
        numbers += f", {top.share:.0%} in {_short(top.name)}"
    tries = []
    if found.device and config.train.precision == "fp32":
        tries.append("--train.precision bf16")
    tries += _compiling(config)
    return numbers, " and ".join(tries) or (
        f"more devices (`{command('scale', config.directory)}` says what they bring) or a leaner "
        "model; the loop itself has little left to give"
    )


def communication_bound(
    shares: dict[str, float], found: Breakdown, config: Config
) -> tuple[str, str]:
    """The ranks wait for each other's numbers, and nothing is computed meanwhile."""
    numbers = f"communication that nothing hides takes {shares['communication']:.0%} of a step"
    if getattr(config.parallel, "reshard_after_forward", False):
        tries = "--parallel.no-reshard-after-forward (gathers once, not twice, for more memory)"
    else:
        tries = "more samples per step (--train.global-batch-size; it is part of a run's identity)"
    return numbers, f"{tries}, or fewer ranks"


def _compiling(config: Config) -> list[str]:
    if config.compile.mode != "none":
        return []
    measured = read_stage(config.directory, "compile")
    if not measured or "best" not in measured["figures"]:
        return [f"--compile.mode blocks (`{command('compile', config.directory)}` measures it)"]
    best = measured["figures"]["best"]
    return [] if best == "none" else [f"--compile.mode {best}, which was measured to be faster"]


def _larger_batches(config: Config) -> list[str]:
    train = config.train
    if train.micro_batch_size >= train.global_batch_size:
        return []
    return [f"fewer, larger micro-batches (--train.micro-batch-size {2 * train.micro_batch_size})"]


def _short(name: str) -> str:
    return name if len(name) <= 48 else name[:45] + "..."
