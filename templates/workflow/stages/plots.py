"""The report's plots: each takes figures of the stages and gives an SVG, or None without them."""

import io
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .recovery import lost_share

BLUE, ORANGE, GREEN = "#2f6fde", "#e08a1e", "#2a9d6f"
RED, GREY, INK = "#d1495b", "#8a94a6", "#1d2433"
SHARES = {
    "data": ("waiting for data", ORANGE),
    "host": ("host gaps", RED),
    "kernels": ("kernels", BLUE),
    "communication": ("communication", GREEN),
    "copies": ("copies", GREY),
}
MEMORY = {
    "parameters": BLUE,
    "gradients": GREEN,
    "optimizer": ORANGE,
    "activations": GREY,
    "gathered": "#b58bd3",  # weights of other ranks, there for a while
}
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
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
WIDTH, HEIGHT = 4.8, 2.7  # inches: wide enough to be read on a phone without turning it


def draw(paint: Callable[[Axes], Any], height: float = HEIGHT) -> str:
    """An SVG of one pair of axes that `paint` fills."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        paint(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue()


def loss_curve(records: list[dict[str, Any]], first_losses: list[float]) -> str | None:
    """Loss by step of the run, in training and validation; without a run, of baseline's steps."""
    series = {
        key: [(r["step"], r[key]) for r in records if r.get(key) is not None]
        for key in ("loss", "validation_loss")
    }
    training, validated = series["loss"] or [*enumerate(first_losses, 1)], series["validation_loss"]
    if not training:
        return None

    def paint(axes: Axes) -> None:
        axes.plot(*zip(*training, strict=True), color=BLUE, label="training")
        if validated:
            axes.plot(*zip(*validated, strict=True), "o-", color=ORANGE, label="validation")
            axes.legend()
        axes.set(xlabel="step", ylabel="loss")

    return draw(paint)


def bars(
    rows: Iterable[tuple[Any, ...]], xlabel: str, label: Callable[[float], str] = "{:.3g}".format
) -> str | None:
    """A bar with its value for each (what, value), with a whisker for (what, value, low, high)."""
    shown = [row for row in rows if row[1] is not None][::-1]
    if not shown:
        return None

    def paint(axes: Axes) -> None:
        for y, (_, value, *whisker) in enumerate(shown):
            low, high = whisker or (value, value)
            axes.barh(y, value, color=BLUE, height=0.6)
            if whisker:
                axes.plot([low, high], [y, y], "|-", color=INK, lw=1.2)
            axes.annotate(label(value), (high, y), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(shown)), [row[0] for row in shown])
        longest = max(max(row[1:]) for row in shown)
        axes.set(xlabel=xlabel, xlim=(0, 1.2 * longest or 1.0))  # room for the numbers
        axes.grid(axis="y", visible=False)

    return draw(paint, 0.85 + 0.36 * len(shown))


def step_shares(shares: dict[str, float]) -> str | None:
    """Where a step's time goes, as one divided bar."""
    shown = [(name, shares[name]) for name in SHARES if shares.get(name, 0) > 0]
    if not shown:
        return None

    def paint(axes: Axes) -> None:
        start = 0.0
        for name, share in shown:
            label, color = SHARES[name]
            axes.barh(0, 100 * share, left=start, color=color, label=f"{label} {share:.1%}")
            start += 100 * share
        axes.set(xlim=(0, max(100.0, start)), yticks=[], xlabel="% of a step")
        axes.grid(visible=False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)

    return draw(paint, 1.9)


def scaling(strong: dict[str, Any], weak: dict[str, Any]) -> str | None:
    """Samples/s over the number of processes, beside what no loss at all would give."""
    if len(strong) < 2:
        return None

    def paint(axes: Axes) -> None:
        ranks = sorted(map(int, strong))
        base = strong[str(ranks[0])]["samples_per_second"]
        ideal = [base * n / ranks[0] for n in ranks]
        axes.plot(ranks, ideal, ":", color=GREY, label="no loss at all")
        for series, mark, color, label in (
            (strong, "o-", BLUE, "same global batch"),
            (weak, "s--", GREEN, "batch grows"),
        ):
            values = [series[str(n)]["samples_per_second"] for n in ranks]
            axes.plot(ranks, values, mark, color=color, label=label)
        axes.set(xlabel="processes", ylabel="samples/s", xticks=ranks, ylim=(0, None))
        axes.legend()

    return draw(paint)


def memory(by_ranks: dict[str, dict[str, float]]) -> str | None:
    """Memory of a rank, as predicted part by part and as measured."""
    if not by_ranks:
        return None

    def paint(axes: Axes) -> None:
        ranks = sorted(by_ranks, key=int)
        bottom = [0.0] * len(ranks)
        for part, color in MEMORY.items():
            sizes = [by_ranks[n].get(part, 0) / 1e6 for n in ranks]
            if any(sizes):
                axes.bar(ranks, sizes, bottom=bottom, color=color, width=0.5, label=part)
                bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
        measured = {n: by_ranks[n]["measured"] / 1e6 for n in ranks if "measured" in by_ranks[n]}
        if measured:
            axes.plot(measured.keys(), measured.values(), "D", color=INK, label="measured")
        axes.set(xlabel="processes", ylabel="MB per rank")
        axes.grid(axis="x", visible=False)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return draw(paint)


def lost_time(
    cost: float, restart: float, failures: float, best: float, upload: float
) -> str | None:
    """Share of time lost over the interval between checkpoints (seconds), with the best one.

    `cost` of a save, `restart` of a restart, `failures` the mean time between two, `upload` what
    a save takes until it is published: no interval can be shorter.
    """
    if not (cost > 0 and best > 0):
        return None

    def paint(axes: Axes) -> None:
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

    return draw(paint)


def in_time(seconds: float) -> str:
    """A duration to be read by people."""
    for least, size, unit in ((172800, 86400, "d"), (7200, 3600, "h"), (600, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
