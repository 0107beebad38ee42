"""The report's plots: functions that draw the metrics of a run and of the stages on axes."""

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
# The colors of curves in the same plot, in this order.
COLORS = [BLUE, "#e08a1e", "#2a9d6f", GREY, "#b58bd3"]
# Metrics of memory, in bytes, and their names in the plot.
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
    # A fixed salt for the ids in an SVG: the same metrics give the same bytes.
    "svg.hashsalt": "report",
}
MINUTE = 60
HOUR = 60 * MINUTE
DAY = 24 * HOUR


class Picture(NamedTuple):
    """A plot as the page shows it."""

    title: str
    # An SVG as a data: address; None if there was nothing to draw.
    image: str | None


class Bar(NamedTuple):
    """A row of a bar plot, with a whisker from `low` to `high` if both are given."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


def picture(title: str, paint: Callable[..., None], *data: Any) -> Picture:
    """Draw with `paint(axes, *data)`; without an image if that fails or draws nothing."""
    image = None
    with matplotlib.rc_context(STYLE), io.BytesIO() as out:
        # 4.8 inches are wide enough to be read on a phone without turning it.
        figure = Figure(figsize=(4.8, 2.7), layout="constrained")
        axes = figure.subplots()
        # The metrics may be missing, or too large to be drawn.
        with contextlib.suppress(ValueError, TypeError, LookupError, ArithmeticError):
            paint(axes, *data)
            if axes.has_data():
                figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
                image = "data:image/svg+xml;base64," + b64encode(out.getvalue()).decode()
    return Picture(title, image)


def curves(axes: Axes, records: list[dict[str, Any]], ylabel: str, names: dict[str, str]) -> None:
    """Plot metrics by step, each from the records that have it; bytes become GB.

    `names` holds the metrics to plot and the name of each in the legend.
    """
    for metric, name in names.items():
        unit = 1
        if metric.endswith("bytes"):
            unit = 1e9
        # A validation has few points, so each of them gets a marker.
        style = "-"
        if name == "validation":
            style = "o-"
        steps = []
        values = []
        for record in records:
            if metric in record:
                steps.append(record["step"])
                values.append(record[metric] / unit)
        if steps:
            axes.plot(steps, values, style, label=name)
    axes.set(xlabel="step", ylabel=ylabel.replace("_", " "))
    if names is MEMORY:
        axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend()


def bars(axes: Axes, rows: list[Bar], xlabel: str, label: Callable[[float], str]) -> None:
    """Plot a horizontal bar for each row, the first on top; `label` formats its value."""
    longest = 0.0
    # Bar 0 is at the bottom.
    upwards = list(reversed(rows))
    for y, row in enumerate(upwards):
        axes.barh(y, row.value, color=BLUE, height=0.6)
        end = row.value
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [y, y], "|-", color=INK, lw=1.2)
            end = max(row.value, row.low, row.high)
        longest = max(longest, end)
        axes.annotate(
            label(row.value), xy=(end, y), xytext=(5, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(upwards)), [row.label for row in upwards])
    # The numbers beside the bars need room.
    right = 1.2 * longest
    if right == 0:
        right = 1.0
    axes.set(xlabel=xlabel, xlim=(0, right))
    axes.grid(axis="y", visible=False)
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.set_figheight(0.85 + 0.36 * len(rows))


def scaling(axes: Axes, records: dict[str, dict[str, Any]]) -> None:
    """Plot samples/s over the number of processes, beside what no loss at all would give.

    `records` holds what the scale stage measured, by the number of processes.
    """
    if len(records) < 2:
        return
    ranks = []
    strong = []
    weak = []
    for count, record in records.items():
        ranks.append(int(count))
        strong.append(record["strong"]["samples_per_second"])
        weak.append(record["weak"]["samples_per_second"])
    no_loss = [strong[0] * count for count in ranks]
    axes.plot(ranks, no_loss, ":", color=GREY, label="no loss at all")
    axes.plot(ranks, strong, "o-", label="same global batch")
    axes.plot(ranks, weak, "s--", label="batch grows")
    axes.set(xlabel="processes", ylabel="samples/s", xticks=ranks, ylim=(0, None))
    axes.legend()


def three_digits(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:.3g}"


def four_digits(value: float) -> str:
    """Format a number with four significant digits and separators of thousands."""
    return f"{value:,.4g}"


def whole_number(value: float) -> str:
    """Format a number without decimals, with separators of thousands."""
    return f"{value:,.0f}"


def in_time(seconds: float) -> str:
    """Format a duration in the unit that people would use."""
    if seconds >= 2 * DAY:
        return f"{seconds / DAY:.3g} d"
    if seconds >= 2 * HOUR:
        return f"{seconds / HOUR:.3g} h"
    if seconds >= 10 * MINUTE:
        return f"{seconds / MINUTE:.3g} min"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"
