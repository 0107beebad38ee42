"""The report's plots: functions that fill a pair of axes with figures of the stages."""

import io
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .recovery import lost_share

BLUE, ORANGE, GREEN = "#2f6fde", "#e08a1e", "#2a9d6f"
GREY, VIOLET, INK = "#8a94a6", "#b58bd3", "#1d2433"
Picture = tuple[str, str | None]  # title, and an SVG as a data: address; None if there is none
Row = tuple[Any, ...]  # of `bars`: (what, value), or (what, value, low, high)
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b9c0cc",
    "axes.labelcolor": "#4a5468",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ef",
    "xtick.color": "#4a5468",
    "ytick.color": "#4a5468",
    "legend.frameon": False,
    "legend.fontsize": 9,
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


def curve(axes: Axes, records: list[dict[str, Any]], key: str, form: str, **style: Any) -> None:
    """Draw a figure by step, of the records that have it; memory in GB."""
    unit = 1e9 if key.endswith("bytes") else 1
    if points := [(r["step"], r[key] / unit) for r in records if key in r]:
        axes.plot(*zip(*points, strict=True), form, **style)


def loss_curve(axes: Axes, records: list[dict[str, Any]], first_losses: list[float]) -> None:
    """Loss by step of the run, in training and validation; without a run, of baseline's steps."""
    records = records or [{"step": n, "loss": loss} for n, loss in enumerate(first_losses, 1)]
    curve(axes, records, "loss", "-", color=BLUE, label="training")
    curve(axes, records, "validation_loss", "o-", color=ORANGE, label="validation")
    if len(axes.lines) > 1:
        axes.legend()
    axes.set(xlabel="step", ylabel="loss")


def memory_curve(axes: Axes, records: list[dict[str, Any]]) -> None:
    """What the run took by step: at most on the device, and on the host."""
    curve(axes, records, "device_peak_bytes", "-", color=BLUE, label="device, peak")
    curve(axes, records, "device_reserved_bytes", "-", color=VIOLET, label="device, reserved")
    curve(axes, records, "host_bytes", "-", color=ORANGE, label="host")
    curve(axes, records, "staging_bytes", "-", color=GREEN, label="host, copies for saves")
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
    alone = records["1"]["strong"]["samples_per_second"]
    axes.plot(ranks, [alone * n for n in ranks], ":", color=GREY, label="no loss at all")
    for kind, mark, color, label in (
        ("strong", "o-", BLUE, "same global batch"),
        ("weak", "s--", GREEN, "batch grows"),
    ):
        values = [record[kind]["samples_per_second"] for record in records.values()]
        axes.plot(ranks, values, mark, color=color, label=label)
    axes.set(xlabel="processes", ylabel="samples/s", xticks=ranks, ylim=(0, None))
    axes.legend()


def memory(axes: Axes, records: dict[str, dict[str, Any]]) -> None:
    """Peak memory of a rank by the number of processes."""
    values = [record["memory"]["measured"] / 1e6 for record in records.values()]
    axes.bar([*records], values, color=BLUE, width=0.5)
    axes.set(xlabel="processes", ylabel="MB per rank")
    axes.grid(axis="x", visible=False)


def lost_time(
    axes: Axes, cost: float, restart: float, failures: float, best: float, upload: float
) -> None:
    """Share of time lost over the interval between checkpoints (seconds), with the best one.

    `cost` of a save, `restart` of a restart, `failures` the mean time between two, `upload` what
    a save takes until it is published: no interval can be shorter.
    """
    intervals = [best * 10 ** (k / 20 - 1.5) for k in range(61)]
    shares = [100 * lost_share(t, cost, restart, failures) for t in intervals]
    axes.semilogx(intervals, shares, color=BLUE)
    least = best, 100 * lost_share(best, cost, restart, failures)
    axes.plot(*least, "o", color=ORANGE)
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
