"""Compare two runs, or two results of a stage: which metrics of the later one are better or worse.

A metric is better or worse if the difference exceeds two standard errors. The standard error
includes the errors of both medians, and the variation from one measurement of the same code to the
next (`NOISE`, or `ONCE` for a single value). For interleaved measurements, the interval that their
stage computed is used. If the real variation does not exceed these constants, at most 5 % of pairs
without a real difference are called better or worse. On shared machines, more pairs may be.
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
from .chain import has_effect, read_stage, result_in, user_metrics
from .interleaved import Interval, median_interval
from .timing import differences, spread

# Relative standard deviations between measurements of the same code: of a median over steps, of a
# number of bytes, and of a value that was measured once.
NOISE = 0.032
NOISE_OF_BYTES = 0.01
ONCE = 0.13
# A relative difference of losses up to this one is within noise.
LOSSES = 0.01
# The endings of metrics' names that decide whether more or less is better.
MORE_IS_BETTER = ("per_second", "speedup", "efficiency", "mfu")
LESS_IS_BETTER = ("seconds", "bytes")
# The metrics of a training run that are compared, in addition to losses.
OF_RUN = ("samples_per_second", "device_peak_bytes", "host_bytes")
# The facts about a machine that must be the same.
OF_MACHINE = ("device", "gpus", "cpu", "cores")
# If the load per core is higher than this, times are not comparable.
BUSY = 1.5
# If a run has fewer records than this, its times are not comparable.
FEW = 5
# The content of workflow/<stage>.json, or of a run in the same form (`content_of_run`).
Content = dict[str, Any]


@dataclass(frozen=True)
class CompareConfig:
    """The two, each a run directory or a result of a stage, as runs/NAME/workflow/baseline.json."""

    a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """The earlier run."""
    b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """The later run, which is judged."""
    fail_on_regression: bool = False
    """Exit with code 1 if a metric of B is worse."""


def compare(options: CompareConfig) -> int:
    """Print a verdict for each common metric.

    Returns 1 if a metric is worse and `fail_on_regression` is set, else 0.
    """
    a = contents(options.a)
    b = contents(options.b)
    common = [name for name in b if name in a]
    if not common:
        text = f"{options.a} ({', '.join(a)}) and {options.b} ({', '.join(b)})"
        raise UserError(f"there is nothing to compare: {text} have no stage in common")
    worse = 0
    for name in common:
        print(f"{name}: {options.a} -> {options.b}")
        try:
            lines = list(verdicts(a[name], b[name]))
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise UserError(
                f"{name}: the results are damaged or from another version ({error}): measure again"
            ) from None
        for line, verdict in lines:
            mark = "    "
            if verdict == "worse":
                worse += 1
                mark = "FAIL"
            if verdict:
                line = f"{line}: {verdict}"
            print(printable(f"{mark} {line}"))
    plural = "" if worse == 1 else "s"
    print(f"{worse or 'no'} metric{plural} worse")
    return int(worse > 0 and options.fail_on_regression)


def contents(path: Path) -> dict[str, Content]:
    """Return the results by stage, from the file of one stage or from a run directory.

    For a run directory, the entry "run" has the metrics of the training run itself.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: give a run directory, or the result of a stage")
    if not path.is_dir():
        content = result_in(path, *STAGES)
        return {content["stage"]: content}
    by_stage: dict[str, Content] = {}
    if (path / "config.json").exists():
        by_stage["run"] = content_of_run(path)
    for name in STAGES:
        content = read_stage(path, name)
        if content:
            by_stage[name] = content
    return by_stage


def content_of_run(path: Path) -> Content:
    """Return the metrics of a training run in the form of a stage's JSON."""
    records = list(read_records(path))
    figures: Content = {"records": len(records)}
    for name, plural in (("loss", "losses"), ("validation_loss", "validation_losses")):
        losses: dict[int, Any] = {}
        for record in records:
            if name in record:
                losses[record["step"]] = record[name]
        figures[plural] = losses
    for name in OF_RUN:
        # Skip the first record, which includes warm-up and compilation.
        values = finite_values(records[1:], name)
        if values and name.endswith("bytes"):
            figures[name] = max(values)
        elif values:
            figures[name] = spread(values)
    # Metrics of your code get no verdict, since only you know whether more is better.
    metrics: list[str] = []
    for metric in user_metrics(records):
        metrics += [metric, f"validation_{metric}"]
    last_values: dict[str, float] = {}
    for record in records:
        for name in metrics:
            if finite(record.get(name)):
                last_values[name] = float(record[name])
    status = read_json(path / "status.json")
    return {
        "machine": status.get("machine"),
        "versions": status.get("versions"),
        "ranks": status.get("ranks"),
        "settings": read_json(path / "config.json"),
        "figures": figures,
        "metrics": last_values,
    }


def finite_values(records: list[dict[str, Any]], name: str) -> list[float]:
    """Return the values of a metric that are finite numbers, in the order of the records."""
    values: list[float] = []
    for record in records:
        if finite(record.get(name)):
            values.append(float(record[name]))
    return values


def another_machine(a: Content, b: Content) -> str:
    """Return the reason why the machines make two results incomparable, or ""."""
    # The machine is unknown for an imported run, and for a finished run that lost its status.json
    # and was then started again.
    if not a["machine"] or not b["machine"]:
        return "the machine is unknown"
    for key in OF_MACHINE:
        if a["machine"][key] != b["machine"][key]:
            return f"{key} {a['machine'][key]} and {b['machine'][key]}"
    if a["versions"]["torch"] != b["versions"]["torch"]:
        return f"torch {a['versions']['torch']} and {b['versions']['torch']}"
    # Only a training run has ranks.
    ranks_of_a = a.get("ranks")
    ranks_of_b = b.get("ranks")
    if ranks_of_a and ranks_of_b and ranks_of_a != ranks_of_b:
        return f"{ranks_of_a} and {ranks_of_b} ranks"
    return ""


def too_busy(a: Content, b: Content) -> str:
    """Return the reason why times cannot be compared (few records, busy cores), or ""."""
    for content in (a, b):
        # Only a training run has a number of records, and a stage has none.
        figures = content["figures"]
        if "records" in figures and figures["records"] < FEW:
            return f"fewer than {FEW} records"
    for machine in (a["machine"], b["machine"]):
        if machine and machine["load"] > BUSY * machine["cores"]:
            return f"a load of {machine['load']} on {machine['cores']} cores"
    return ""


def verdicts(a: Content, b: Content) -> Iterator[tuple[str, str]]:
    """Yield lines to print, each with its verdict.

    First come the settings that differ and the metrics of your code, with "" as the verdict. Then
    come measurements, which are better, worse, within noise, or not comparable.
    """
    yield from changed_settings(a, b)
    last_a = a.get("metrics", {})
    last_b = b.get("metrics", {})
    for name in last_a:
        if name in last_b:
            yield f"{name} {last_a[name]:.4g} -> {last_b[name]:.4g} (last values)", ""
    # Each of these is a reason, or "". The first rules out a verdict on any measurement except
    # losses. The second rules it out only for times and speeds.
    machine_differs = another_machine(a, b)
    times_unreliable = too_busy(a, b)
    measured_a = dict(measured(a["figures"]))
    measured_b = dict(measured(b["figures"]))
    for name, first in measured_a.items():
        if name not in measured_b:
            continue
        second = measured_b[name]
        # Losses by step are a dictionary, and all other measurements are intervals.
        if isinstance(first, dict):
            yield verdict_of_losses(name, first, second)
        elif not ends_with(name, LESS_IS_BETTER + MORE_IS_BETTER):
            # A fraction of a step, such as data_wait, gets no verdict: it also grows when the rest
            # of the step gets faster.
            yield f"{name} {shown(name, first)} -> {shown(name, second)}", ""
        # `ratio` takes logarithms, so values that may be 0 are left out.
        elif first.low > 0 and second.low > 0:
            reason = machine_differs
            # Bytes do not depend on the machine's load.
            if not reason and not ends_with(name, ("bytes",)):
                reason = times_unreliable
            line, verdict = verdict_of_figure(name, first, second)
            if reason:
                verdict = f"not comparable: {reason}"
            yield line, verdict


def changed_settings(a: Content, b: Content) -> Iterator[tuple[str, str]]:
    """Yield a line, without a verdict, for each changed setting that can affect measurements."""
    before = dict(flatten(a["settings"]))
    after = dict(flatten(b["settings"]))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name) and has_effect(name):
            yield f"{name}: {before.get(name)} -> {after.get(name)}", ""


def verdict_of_figure(name: str, a: Interval, b: Interval) -> tuple[str, str]:
    """Return the line of a measurement, and its verdict."""
    # An interval with a width already includes the variation between measurements. Values that were
    # measured once have an interval without a width, so they need additional noise. So do bytes,
    # which are peaks.
    noise = 0.0
    if ends_with(name, ("bytes",)):
        noise = NOISE_OF_BYTES
    elif a.low == a.high or b.low == b.high:
        noise = ONCE
    times = ratio(a, b, noise)
    line = f"{name} {shown(name, a)} -> {shown(name, b)}, {times} times"
    return line, word_for(times, ends_with(name, MORE_IS_BETTER))


def ends_with(name: str, endings: tuple[str, ...]) -> bool:
    """Return whether any word of a dotted name has one of these endings.

    In "modes.full.step_seconds" for example, the last word has the ending "seconds".
    """
    return any(word.endswith(endings) for word in name.split("."))


def measured(figures: Content, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield comparable values with their dotted names: intervals, and losses by step.

    Nested dictionaries are handled by calls with a `prefix` for the names, such as "modes.".
    """
    for key, value in figures.items():
        name = f"{prefix}{key}"
        if key.endswith("losses"):
            yield name, losses_by_step(value)
        elif not isinstance(value, dict):
            # Skip a single value unless it gets a verdict. The recommended interval between saves
            # gets none, since a longer one is neither better nor worse.
            judged = ends_with(name, LESS_IS_BETTER + MORE_IS_BETTER) and name != "interval_seconds"
            if judged and finite(value):
                number = float(value)
                yield name, Interval(value=number, low=number, high=number)
        # This is a result of `spread`.
        elif "median" in value:
            interval = interval_of(
                median=float(value["median"]),
                p10=float(value["p10"]),
                p90=float(value["p90"]),
                count=float(value["n"]),
            )
            yield name, interval
        # This is an Interval, such as a speedup of the stage `compile`.
        elif "low" in value:
            yield name, Interval(float(value["value"]), float(value["low"]), float(value["high"]))
        else:
            yield from measured(value, f"{name}.")


def losses_by_step(losses: Any) -> dict[int, float]:
    """Return losses by step, with NaN for values that are not finite.

    `losses` is a dictionary by step for a run, and a list from step 1 on for a stage.
    """
    by_step = losses if isinstance(losses, dict) else dict(enumerate(losses, 1))
    numbers: dict[int, float] = {}
    for step, loss in by_step.items():
        numbers[step] = float(loss) if finite(loss) else math.nan
    return numbers


def verdict_of_losses(name: str, a: dict[int, float], b: dict[int, float]) -> tuple[str, str]:
    """Compare losses at the same steps; return a line and its verdict.

    If all losses are equal, the verdict says so. Otherwise only the later half of the steps counts:
    the side that has more losses there that are not finite is worse. If both sides have equally
    many of them, the median ratio of the losses decides.
    """
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return name, "not comparable: no step in common"
    last = steps[-1]
    line = f"{name} at step {last} {a[last]:.4f} -> {b[last]:.4f}"
    losses_of_a = [a[step] for step in steps]
    losses_of_b = [b[step] for step in steps]
    if not differences(losses_of_a, losses_of_b).any():
        return line, "the same to the bit"
    later = steps[len(steps) // 2 :]
    nans_in_a = sum(math.isnan(a[step]) for step in later)
    nans_in_b = sum(math.isnan(b[step]) for step in later)
    if nans_in_a != nans_in_b:
        return line, "worse" if nans_in_b > nans_in_a else "better"
    ratios: list[float] = []
    for step in later:
        if a[step]:
            # This is b / a for positive losses. It also exceeds 1 if a negative loss rises.
            loss_ratio = 1 + (b[step] - a[step]) / abs(a[step])
            if math.isfinite(loss_ratio):
                ratios.append(loss_ratio)
    # Without any ratio, the losses count as equal.
    times = median_interval(ratios or [1.0])
    line = f"{line}, {times} times"
    if 1 - LOSSES <= times.value <= 1 + LOSSES:
        return line, "within noise"
    return line, word_for(times, more_is_better=False)


def interval_of(median: float, p10: float, p90: float, count: float) -> Interval:
    """Return the 95 % interval of a median, including the variation between measurements.

    The formula assumes that values are normally distributed.
    """
    # With many values, two standard errors of a median are 2.5 / sqrt(count) standard deviations,
    # and p90 - p10 is 2.56 standard deviations. So two errors are about (p90 - p10) / sqrt(count).
    # With few values the error is larger, so reduce `count` by three.
    two_errors_of_median = 0.0
    if median > 0:
        two_errors_of_median = (p90 - p10) / median / math.sqrt(max(1, count - 3))
    two_errors = math.hypot(two_errors_of_median, 2 * NOISE)
    # The relative error of a median near 0 is huge. Limit it, so that `exp` does not overflow.
    factor = math.exp(min(99.0, two_errors))
    return Interval(value=median, low=median / factor, high=median * factor)


def ratio(a: Interval, b: Interval, noise: float) -> Interval:
    """Return the ratio b / a with its 95 % interval.

    `noise` is an additional relative standard error of both a and b.
    """
    # The ends of a 95 % interval are four standard errors apart. An error of a logarithm is the
    # relative error of the value itself.
    error_of_a = math.log(a.high / a.low) / 4
    error_of_b = math.log(b.high / b.low) / 4
    factor = math.exp(2 * math.hypot(noise, noise, error_of_a, error_of_b))
    times = b.value / a.value
    return Interval(value=times, low=times / factor, high=times * factor)


def word_for(times: Interval, more_is_better: bool) -> str:
    """Return the verdict on a measurement that is now `times` its earlier value."""
    if times.low <= 1 <= times.high:
        return "within noise"
    grew = times.value > 1
    return "better" if grew == more_is_better else "worse"


def shown(name: str, figure: Interval) -> str:
    """Format a measurement with its unit."""
    if ends_with(name, ("bytes",)):
        return in_units(int(figure.value))
    unit = " s" if ends_with(name, ("seconds",)) else ""
    return f"{figure.value:,.4g}{unit}"
