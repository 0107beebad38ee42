"""Draw the report's plots of the metrics of a run and of the stages."""

import contextlib
import io
from base64 import b64encode
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

BLUE = "#2f6fde"
GREY = "#8a94a6"
INK = "#1d2433"
# The colors of curves in a plot, in order.
COLORS = [BLUE, "#e08a1e", "#2a9d6f", GREY, "#b58bd3"]
# Metrics of memory (in bytes) with the labels of their curves.
MEMORY = {
    "device_peak_bytes": "device, peak",
    "device_reserved_bytes": "device, reserved",
    "host_bytes": "host",
    "staging_bytes": "host, copies for saves",
}
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=COLORS),
    "grid.color": "#e6e9ef",
    "legend.frameon": False,
    # Matplotlib derives the ids in an SVG from a salt, which is random by default. With a fixed
    # salt, the same metrics give the same bytes.
    "svg.hashsalt": "report",
}
MINUTE = 60
HOUR = 60 * MINUTE
DAY = 24 * HOUR


class Picture(NamedTuple):
    """A plot for the page."""

    title: str
    # An SVG as a data: URL; None if there was nothing to draw.
    image: str | None


class Bar(NamedTuple):
    """A row of a bar plot, with a whisker from `low` to `high` if both are given."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


def picture(title: str, paint: Callable[..., None], *data: Any) -> Picture:
    """Draw a plot by calling `paint(axes, *data)`.

    The picture has no image if `paint` draws nothing, or fails on missing or invalid metrics.
    """
    image = None
    with matplotlib.rc_context(STYLE), io.BytesIO() as out:
        # At 4.8 inches the text is readable on a phone.
        figure = Figure(figsize=(4.8, 2.7), layout="constrained")
        axes = figure.subplots()
        # These errors occur if metrics are missing, of a wrong type, or too large to draw.
        with contextlib.suppress(ValueError, TypeError, LookupError, ArithmeticError):
            paint(axes, *data)
            if axes.has_data():
                # Leave out the date, so that the same metrics give the same bytes.
                figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
                image = "data:image/svg+xml;base64," + b64encode(out.getvalue()).decode()
    return Picture(title, image)


def curves(
    axes: Axes,
    records: list[dict[str, Any]],
    ylabel: str,
    labels: dict[str, str],
    unit: float = 1.0,
) -> None:
    """Plot a curve by step for each metric in `labels`, which maps metrics to their labels.

    Values are divided by `unit`. A curve leaves out the records that lack its metric.
    """
    for metric, label in labels.items():
        steps = []
        values = []
        for record in records:
            if record.get(metric) is not None:
                steps.append(record["step"])
                values.append(record[metric] / unit)
        # Mark the points of validations, which are few, and a single point, which has no line.
        style = "-"
        if metric.startswith("validation_") or len(steps) == 1:
            style = "o-"
        if steps:
            axes.plot(steps, values, style, label=label)
    axes.set(xlabel="step", ylabel=ylabel.replace("_", " "))
    if axes.lines:
        axes.legend()


def memory(axes: Axes, records: list[dict[str, Any]]) -> None:
    """Plot the memory of a run by step."""
    curves(axes, records, "GB", MEMORY, unit=1e9)
    axes.set_ylim(bottom=0)


def bars(axes: Axes, rows: list[Bar], xlabel: str, format_value: Callable[[float], str]) -> None:
    """Plot a horizontal bar for each row, the first row on top."""
    # The end of the longest bar or whisker.
    longest = 0.0
    # Matplotlib draws y = 0 at the bottom, so the last row comes first.
    from_bottom = list(reversed(rows))
    for y, row in enumerate(from_bottom):
        axes.barh(y, row.value, color=BLUE, height=0.6)
        end = row.value
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [y, y], "|-", color=INK, lw=1.2)
            end = max(row.value, row.low, row.high)
        longest = max(longest, end)
        axes.annotate(
            format_value(row.value),
            xy=(end, y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(from_bottom)), [row.label for row in from_bottom])
    # Leave room for the numbers next to the bars.
    right = 1.2 * longest
    # An axis cannot have the width 0.
    if right == 0:
        right = 1.0
    axes.set(xlabel=xlabel, xlim=(0, right))
    axes.grid(axis="y", visible=False)
    figure = axes.figure
    # For the type checker, `axes.figure` could also be a subfigure, whose height cannot be set.
    assert isinstance(figure, Figure)
    # The x axis with its label takes 0.85 inches, and each row takes 0.36 inches.
    figure.set_figheight(0.85 + 0.36 * len(rows))


def scaling(axes: Axes, records: dict[str, dict[str, Any]]) -> None:
    """Plot samples/s by number of processes, next to ideal scaling.

    `records` are the scale stage's results by number of processes. In strong scaling the global
    batch stays the same. In weak scaling it grows: two processes have twice the batch of one.
    """
    # A single number of processes gives no curve.
    if len(records) < 2:
        return
    ranks = []
    strong = []
    weak = []
    for count, record in records.items():
        ranks.append(int(count))
        strong.append(record["strong"]["samples_per_second"])
        weak.append(record["weak"]["samples_per_second"])
    # The first record is that of one process. Ideally, n processes are n times as fast.
    ideal = [strong[0] * count for count in ranks]
    axes.plot(ranks, ideal, ":", color=GREY, label="ideal")
    axes.plot(ranks, strong, "o-", label="same global batch")
    axes.plot(ranks, weak, "s--", label="batch grows")
    axes.set(xlabel="processes", ylabel="samples/s", xticks=ranks, ylim=(0, None))
    axes.legend()


def three_digits(value: float) -> str:
    """Format a number with three significant digits and thousands separators, such as 12,300."""
    # Round first, then format: ".3g" alone would show 12,345 as 1.23e+04.
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.10g}"


def four_digits(value: float) -> str:
    """Format a number with four significant digits and thousands separators, such as 12,350."""
    # Round first, then format: ".4g" alone would show 12,345.6 as 1.235e+04.
    rounded = float(f"{value:.4g}")
    return f"{rounded:,.10g}"


def whole_number(value: float) -> str:
    """Format a number without decimals or, below 10, with three significant digits."""
    if value < 10:
        return three_digits(value)
    return f"{value:,.0f}"


def in_time(seconds: float) -> str:
    """Format a duration in milliseconds, seconds, minutes, hours or days, such as 2.5 h."""
    if seconds >= 2 * DAY:
        return f"{three_digits(seconds / DAY)} d"
    if seconds >= 2 * HOUR:
        return f"{three_digits(seconds / HOUR)} h"
    if seconds >= 10 * MINUTE:
        return f"{three_digits(seconds / MINUTE)} min"
    if seconds >= 1:
        return f"{three_digits(seconds)} s"
    return f"{three_digits(1e3 * seconds)} ms"
