"""The report's plots: functions that fill a pair of axes with figures of the stages."""

import contextlib
import io
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

BLUE, GREY, INK = "#2f6fde", "#8a94a6", "#1d2433"
COLORS = [BLUE, "#e08a1e", "#2a9d6f", GREY, "#b58bd3"]  # of lines and bars that stand together
MEMORY = {"device_peak_bytes": "device, peak", "device_reserved_bytes": "device, reserved"}
MEMORY |= {"host_bytes": "host", "staging_bytes": "host, copies for saves"}
Picture = tuple[str, str | None]  # title, and an SVG as a data: address; None if there is none
Row = tuple[Any, ...]  # of `bars`: (what, value), or (what, value, low, high)
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=COLORS),
    "grid.color": "#e6e9ef",
    "legend.frameon": False,
    "svg.hashsalt": "report",  # the same figures give the same bytes
}


def picture(title: str, paint: Callable[..., None], *figures: Any) -> Picture:
    """What `paint(axes, *figures)` draws; no picture if it cannot or there is nothing to draw."""
    with matplotlib.rc_context(STYLE), io.BytesIO() as out:
        # 4.8 inches are wide enough to be read on a phone without turning it.
        figure = Figure(figsize=(4.8, 2.7), layout="constrained")
        axes = figure.subplots()
        # No figures, or too large ones.
        with contextlib.suppress(ValueError, TypeError, LookupError, ArithmeticError):
            paint(axes, *figures)
            if axes.has_data():
                figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
                return title, "data:image/svg+xml;base64," + b64encode(out.getvalue()).decode()
    return title, None


def curves(axes: Axes, records: list[dict[str, Any]], ylabel: str, names: dict[str, str]) -> None:
    """Figures by step, of the records that have them, under the names given; memory in GB."""
    for figure, name in names.items():
        unit = 1e9 if figure.endswith("bytes") else 1
        if points := [(r["step"], r[figure] / unit) for r in records if figure in r]:
            axes.plot(*zip(*points, strict=True), "o-" if name == "validation" else "-", label=name)
    axes.set(xlabel="step", ylabel=ylabel.replace("_", " "))
    axes.set_ylim(bottom=0 if names is MEMORY else None)
    if axes.lines:
        axes.legend()


def bars(axes: Axes, rows: list[Row], xlabel: str, label: Callable[[float], str]) -> None:
    """A bar with its value for each row, with a whisker from low to high if it has them."""
    for y, (_, value, *whisker) in enumerate(reversed(rows)):
        axes.barh(y, value, color=BLUE, height=0.6)
        axes.plot(whisker, [y] * len(whisker), "|-", color=INK, lw=1.2)
        end = max([value, *whisker])
        axes.annotate(label(value), (end, y), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [row[0] for row in reversed(rows)])
    longest = max((value for row in rows for value in row[1:]), default=0)
    axes.set(xlabel=xlabel, xlim=(0, 1.2 * longest or 1.0))  # room for the numbers
    axes.grid(axis="y", visible=False)
    figure: Any = axes.figure
    figure.set_figheight(0.85 + 0.36 * len(rows))


def scaling(axes: Axes, records: dict[str, dict[str, Any]]) -> None:
    """Samples/s over the number of processes, beside what no loss at all would give."""
    if len(records) < 2:
        return
    ranks = [int(n) for n in records]
    strong = [record["strong"]["samples_per_second"] for record in records.values()]
    weak = [record["weak"]["samples_per_second"] for record in records.values()]
    axes.plot(ranks, [strong[0] * n for n in ranks], ":", color=GREY, label="no loss at all")
    axes.plot(ranks, strong, "o-", label="same global batch")
    axes.plot(ranks, weak, "s--", label="batch grows")
    axes.set(xlabel="processes", ylabel="samples/s", xticks=ranks, ylim=(0, None))
    axes.legend()


def in_time(seconds: float) -> str:
    """A duration to be read by people."""
    for least, size, unit in ((172800, 86400, "d"), (7200, 3600, "h"), (600, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
