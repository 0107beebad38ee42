"""The report's plots: functions that fill a pair of axes with figures of the stages."""

import io
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from .recovery import lost_share

BLUE, GREY, INK = "#2f6fde", "#8a94a6", "#1d2433"
COLORS = [BLUE, "#e08a1e", "#2a9d6f", GREY, "#b58bd3"]  # of lines and bars that stand together
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
        try:
            paint(axes, *figures)
            if not axes.has_data():
                return title, None
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        except (ValueError, TypeError, LookupError, ArithmeticError):  # no figures, or too large
            return title, None
        return title, "data:image/svg+xml;base64," + b64encode(out.getvalue()).decode()


def curve(axes: Axes, records: list[dict[str, Any]], key: str, label: str, form: str = "-") -> None:
    """Draw a figure by step, of the records that have it; memory in GB."""
    unit = 1e9 if key.endswith("bytes") else 1
    if points := [(r["step"], r[key] / unit) for r in records if key in r]:
        axes.plot(*zip(*points, strict=True), form, label=label)


def metric_curve(axes: Axes, records: list[dict[str, Any]], name: str) -> None:
    """The loss or a metric by step, in training and validation."""
    curve(axes, records, name, "training")
    curve(axes, records, f"validation_{name}", "validation", "o-")
    if axes.lines:
        axes.legend()
    axes.set(xlabel="step", ylabel=name.replace("_", " "))


def memory_curve(axes: Axes, records: list[dict[str, Any]]) -> None:
    """What the run took by step: at most on the device, and on the host."""
    curve(axes, records, "device_peak_bytes", "device, peak")
    curve(axes, records, "host_bytes", "host")
    curve(axes, records, "staging_bytes", "host, copies for saves")
    curve(axes, records, "device_reserved_bytes", "device, reserved")
    axes.set(xlabel="step", ylabel="GB", ylim=(0, 1.1 * axes.dataLim.ymax))
    axes.legend(loc="lower left")


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
    strong, weak = (
        [record[kind]["samples_per_second"] for record in records.values()]
        for kind in ("strong", "weak")
    )
    axes.plot(ranks, [strong[0] * n for n in ranks], ":", color=GREY, label="no loss at all")
    axes.plot(ranks, strong, "o-", label="same global batch")
    axes.plot(ranks, weak, "s--", label="batch grows")
    axes.set(xlabel="processes", ylabel="samples/s", xticks=ranks, ylim=(0, None))
    axes.legend()


def lost_time(
    axes: Axes, cost: float, restart: float, failures: float, best: float, upload: float
) -> None:
    """Share of time lost over the interval between checkpoints (seconds), with the best one.

    `cost` of a save, `restart` of a restart, `failures` the mean time between two, `upload` what
    a save takes until it is published: no interval can be shorter.
    """
    intervals = [best * 10 ** (k / 20 - 1.5) for k in range(61)]
    shares = [100 * lost_share(t, cost, restart, failures) for t in intervals]
    axes.semilogx(intervals, shares)
    least = best, 100 * lost_share(best, cost, restart, failures)
    axes.plot(*least, "o")
    axes.annotate(in_time(best), least, (0, 9), textcoords="offset points", ha="center")
    if intervals[0] < upload:
        axes.axvspan(intervals[0], upload, color=GREY, alpha=0.18, lw=0)
    axes.set(xlabel="time between checkpoints", ylabel="% of time lost", ylim=(0, None))
    axes.xaxis.set_major_formatter(lambda seconds, _: in_time(seconds))


def in_time(seconds: float) -> str:
    """A duration to be read by people."""
    for least, size, unit in ((172800, 86400, "d"), (7200, 3600, "h"), (600, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
