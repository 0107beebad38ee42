"""What is better or worse in one run, or in one result of a stage, than in another.

A difference counts when it is more than two standard errors: those of both medians, and what the
same code differs by from one measurement to the next (`NOISE`; `ONCE` for a figure that was
measured once). What was measured interleaved has its own interval. Where measurements of the same
code differ by no more than that, at most 5 of 100 pairs get a verdict; shared machines differ more.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..errors import UserError, printable
from ..files import flatten, read_json
from ..run.hardware import in_units
from ..run.journal import finite, read_records
from . import STAGES
from .chain import has_effect, own_metrics, read_stage, result_in
from .interleaved import Interval, median_interval
from .timing import differences, spread

NOISE, NOISE_OF_BYTES, ONCE = 0.032, 0.01, 0.13  # standard deviations of a measurement, relative
LOSSES = 0.01  # relative
MORE_IS_BETTER = ("per_second", "speedup", "efficiency", "mfu")
LESS_IS_BETTER = ("seconds", "bytes")
OF_RUN = ("samples_per_second", "device_peak_bytes", "host_bytes")
OF_MACHINE = ("device", "gpus", "cpu", "cores")
BUSY = 1.5  # load for each core
FEW = 5  # records of a run, too few for its throughput
Content = dict[str, Any]  # of workflow/<stage>.json, or of what `content_of_run` makes of a run


@dataclass(frozen=True)
class CompareConfig:
    """The two, each a run directory or a result of a stage, as runs/NAME/workflow/baseline.json."""

    a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """The earlier one."""
    b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """The later one, which is judged."""
    fail_on_regression: bool = False
    """Exit code 1 when a figure of B is worse."""


def compare(options: CompareConfig) -> int:
    """Print a verdict for each figure that both have; 1 if one is worse and that counts."""
    a, b = contents(options.a), contents(options.b)
    common = [name for name in b if name in a]
    if not common:
        text = f"{options.a} ({', '.join(a)}) and {options.b} ({', '.join(b)})"
        raise UserError(f"nothing was measured in both: {text}")
    worse = 0
    for name in common:
        print(f"{name}: {options.a} -> {options.b}")
        try:
            lines = list(verdicts(a[name], b[name]))
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise UserError(f"{name}: damaged figures, or of an older version ({error})") from None
        for line, verdict in lines:
            mark = "FAIL" if verdict == "worse" else "    "
            print(printable(f"{mark} {line}{verdict and f': {verdict}'}"))
            worse += verdict == "worse"
    print(f"{worse or 'no'} figure{'s' * (worse != 1)} worse")
    return int(worse > 0 and options.fail_on_regression)


def contents(path: Path) -> dict[str, Content]:
    """What was measured in a run directory, by stage ("run" is the training run), or in a file."""
    if not path.is_dir():
        content = result_in(path, *STAGES)
        return {content["stage"]: content}
    stages = {name: content for name in STAGES if (content := read_stage(path, name))}
    return {"run": content_of_run(path), **stages} if (path / "config.json").exists() else stages


def content_of_run(path: Path) -> Content:
    """The figures of a training run, as a stage would have written them."""
    records = list(read_records(path))
    figures: Content = {"records": len(records)}
    for name in ("loss", "validation_loss"):
        figures[f"{name}es"] = {r["step"]: r[name] for r in records if name in r}
    for name in OF_RUN:  # without the first record, which holds warm-up and compilation
        if values := [value for record in records[1:] for value in finite(record.get(name))]:
            figures[name] = max(values) if name.endswith("bytes") else spread(values)
    status = read_json(path / "status.json")
    run = {key: status.get(key) for key in ("machine", "versions", "ranks")}
    # Whether more of them is better is yours to know: they get no verdict.
    names = [f"{part}{name}" for name in own_metrics(records) for part in ("", "validation_")]
    last = {n: value for record in records for n in names for value in finite(record.get(n))}
    return run | {"settings": read_json(path / "config.json"), "figures": figures, "metrics": last}


def another_machine(a: Content, b: Content) -> str:
    """Why two measurements cannot be compared; "" if they can."""
    if not (a["machine"] and b["machine"]):  # of a run that has not begun
        return "the machine is not known"
    for origin, keys in (("machine", OF_MACHINE), ("versions", ("torch",))):
        for key in keys:
            if a[origin][key] != b[origin][key]:
                return f"{key} {a[origin][key]} and {b[origin][key]}"
    if a.get("ranks") and b.get("ranks") and a["ranks"] != b["ranks"]:
        return f"{a['ranks']} and {b['ranks']} ranks"
    return ""


def too_busy(a: Content, b: Content) -> str:
    """Why seconds say nothing: other work held the cores, or few records; "" if they do."""
    if min(content["figures"].get("records", FEW) for content in (a, b)) < FEW:
        return f"too few to tell, of {FEW} records at least"
    for machine in (a["machine"], b["machine"]):
        if machine and machine["load"] > BUSY * machine["cores"]:
            return f"a load of {machine['load']} on {machine['cores']} cores"
    return ""


def verdicts(a: Content, b: Content) -> Iterator[tuple[str, str]]:
    """Lines, of figures each with a word: better, worse, within noise or not comparable."""
    before, after = (dict(flatten(content["settings"])) for content in (a, b))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name) and has_effect(name):
            yield f"{name}: {before.get(name)} -> {after.get(name)}", ""
    apart, busy = another_machine(a, b), too_busy(a, b)
    metrics, others = (content.get("metrics", {}) for content in (a, b))
    for name in (name for name in metrics if name in others):
        yield f"{name} {metrics[name]:.4g} -> {others[name]:.4g} (the last ones)", ""
    first, second = dict(measured(a["figures"])), dict(measured(b["figures"]))
    for name in (name for name in first if name in second):
        one, two = first[name], second[name]
        if isinstance(one, dict):
            yield verdict_of_losses(name, one, two)
        elif one.low > 0 and two.low > 0:
            of_bytes = name.endswith("bytes")
            once = one.low == one.high or two.low == two.high
            times = ratio(one, two, NOISE_OF_BYTES if of_bytes else ONCE if once else 0.0)
            word = word_for(times, ends_with(name, MORE_IS_BETTER))
            line = f"{name} {shown(name, one)} -> {shown(name, two)}, {times} times"
            reason = apart or (not of_bytes and busy)
            yield line, f"not comparable: {reason}" if reason else word


def ends_with(name: str, endings: tuple[str, ...]) -> bool:
    """Whether a part of a dotted name has one of these endings."""
    return any(part.endswith(endings) for part in name.split("."))


def measured(figures: Content, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What can be better or worse, by dotted names: intervals, and losses by step."""
    for key, value in figures.items():
        name = f"{prefix}{key}"
        if key.endswith("losses"):
            steps = value if isinstance(value, dict) else dict(enumerate(value, 1))
            yield name, {step: next(iter(finite(x)), math.nan) for step, x in steps.items()}
        elif not isinstance(value, dict):
            if ends_with(name, LESS_IS_BETTER + MORE_IS_BETTER) and name != "interval_seconds":
                yield from ((name, Interval(x, x, x)) for x in finite(value))
        elif "median" in value:
            yield name, interval_of(*(float(value[key]) for key in ("median", "p10", "p90", "n")))
        elif "low" in value:
            yield name, Interval(*(float(value[key]) for key in ("value", "low", "high")))
        else:
            yield from measured(value, f"{name}.")


def verdict_of_losses(name: str, a: dict[int, float], b: dict[int, float]) -> tuple[str, str]:
    """Losses at the same steps, of which the later half counts; one that is lost is worse."""
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return name, "not comparable: no step in common"
    line = f"{name} at step {steps[-1]} {a[steps[-1]]:.4f} -> {b[steps[-1]]:.4f}"
    if not any(differences(*([losses[step] for step in steps] for losses in (a, b)))):
        return line, "the same to the bit"
    later = steps[len(steps) // 2 :]
    lost = [sum(math.isnan(losses[step]) for step in later) for losses in (a, b)]
    if lost[0] != lost[1]:
        return line, "worse" if lost[1] > lost[0] else "better"
    changes = [1 + (b[step] - a[step]) / abs(a[step]) for step in later if a[step]]
    times = median_interval([x for x in changes if math.isfinite(x)] or [1.0])
    small = 1 - LOSSES <= times.value <= 1 + LOSSES
    return f"{line}, {times} times", "within noise" if small else word_for(times, False)


def interval_of(median: float, p10: float, p90: float, count: float) -> Interval:
    """The 95 % interval of a median of normally distributed values, and of the next measurement."""
    # Two standard errors of a median are 2.5 / sqrt(count) deviations, and p90 - p10 is 2.56 of
    # these, if there are many values; for the spread of a few, three less are counted.
    width = (p90 - p10) / median / math.sqrt(max(1, count - 3)) if median > 0 else 0.0
    reach = math.exp(min(99.0, math.hypot(width, 2 * NOISE)))
    return Interval(median, median / reach, median * reach)


def ratio(a: Interval, b: Interval, noise: float) -> Interval:
    """How many times as large a figure became, with its 95 % interval; `noise` of each."""
    errors = [math.log(figure.high / figure.low) / 4 for figure in (a, b)]  # standard errors
    times, reach = b.value / a.value, math.exp(2 * math.hypot(noise, noise, *errors))
    return Interval(times, times / reach, times * reach)


def word_for(times: Interval, more_is_better: bool) -> str:
    """A word for how many times as large a figure became."""
    if times.low <= 1 <= times.high:
        return "within noise"
    return "better" if (times.value > 1) == more_is_better else "worse"


def shown(name: str, figure: Interval) -> str:
    """A figure with its unit."""
    if name.endswith("bytes"):
        return in_units(int(figure.value))
    return f"{figure.value:,.4g}{' s' * name.endswith('seconds')}"
