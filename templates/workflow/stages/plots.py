"""The report's plots: each takes figures of the stages and gives an SVG, or None without them."""

import io
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#2f6fde", "#e08a1e", "#2a9d6f", "#d1495b", "#8a94a6"
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
    """Loss by step of the run, of training and of validation, else of the baseline's steps."""
    training = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
    training = training or list(enumerate(first_losses, 1))
    validated = [
        (r["step"], r["validation_loss"]) for r in records if r.get("validation_loss") is not None
    ]
    if not training:
        return None

    def paint(axes: Axes) -> None:
        axes.plot(*zip(*training, strict=True), color=BLUE, label="training")
        if validated:
            axes.plot(*zip(*validated, strict=True), "o-", color=ORANGE, label="validation")
            axes.legend()
        axes.set(xlabel="step", ylabel="loss")

    return draw(paint)


def throughput(rows: list[tuple[str, float, float, float]]) -> str | None:
    """Bars of (what, samples/s, and its lower and upper end)."""
    if not rows:
        return None

    def paint(axes: Axes) -> None:
        names, middle, low, high = zip(*reversed(rows), strict=True)
        reach = [
            [m - a for m, a in zip(middle, low, strict=True)],
            [b - m for m, b in zip(middle, high, strict=True)],
        ]
        places = range(len(names))  # by number: two rows may have one name
        axes.barh(places, middle, color=BLUE, height=0.62, xerr=reach, ecolor="#1d2433", capsize=3)
        axes.set_yticks(places, names)
        for place, (value, end) in enumerate(zip(middle, high, strict=True)):
            axes.annotate(
                f"{value:,.0f}", (end, place), (5, 0), textcoords="offset points", va="center"
            )
        axes.margins(x=0.16)
        axes.set_xlabel("samples/s (median, p10 to p90)")
        axes.grid(axis="y", visible=False)

    return draw(paint, 0.9 + 0.36 * len(rows))


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
    found = {"same global batch": (strong, BLUE, "o-"), "batch grows": (weak, GREEN, "s--")}
    if len(strong) < 2:
        return None

    def paint(axes: Axes) -> None:
        ranks = sorted(map(int, strong))
        base = strong[str(ranks[0])]["samples_per_second"]
        ideal = [base * n / ranks[0] for n in ranks]
        axes.plot(ranks, ideal, ":", color=GREY, label="no loss at all")
        for label, (series, color, mark) in found.items():
            places = sorted(map(int, series))
            values = [series[str(n)]["samples_per_second"] for n in places]
            if places:
                axes.plot(places, values, mark, color=color, label=label)
        axes.set(xlabel="processes", ylabel="samples/s", xticks=ranks, ylim=(0, None))
        axes.legend()

    return draw(paint)


def memory(per_ranks: dict[str, dict[str, float]]) -> str | None:
    """Memory of a rank, as predicted part by part and as measured."""
    if not per_ranks:
        return None

    def paint(axes: Axes) -> None:
        ranks = sorted(per_ranks, key=int)
        bottom = [0.0] * len(ranks)
        for part, color in MEMORY.items():
            sizes = [(per_ranks[n].get(part) or 0) / 1e6 for n in ranks]
            if not any(sizes):
                continue
            axes.bar(ranks, sizes, bottom=bottom, color=color, width=0.5, label=part)
            bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
        measured = [(n, s) for n in ranks if (s := per_ranks[n].get("measured"))]
        if measured:
            places, sizes = zip(*((n, s / 1e6) for n, s in measured), strict=True)
            axes.plot(places, sizes, "D", color="#1d2433", label="measured")
        axes.set(xlabel="processes", ylabel="MB per rank")
        axes.grid(axis="x", visible=False)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return draw(paint)


def lost_time(
    cost: float, restart: float, failures: float, best: float, upload: float
) -> str | None:
    """Share of time lost over the interval between checkpoints (seconds), with its best place.

    `cost` of a save, `restart` of a restart, `failures` the mean time between two, `upload` what
    a save takes until it is published: no interval can be shorter.
    """
    if not (cost > 0 and best > 0):
        return None

    def paint(axes: Axes) -> None:
        places = [best * 10 ** (k / 20 - 1.5) for k in range(61)]
        shares = [100 * (cost / t + (t / 2 + restart) / failures) for t in places]
        axes.semilogx(places, shares, color=BLUE)
        least = 100 * (cost / best + (best / 2 + restart) / failures)
        axes.plot([best], [least], "o", color=ORANGE)
        axes.annotate(in_time(best), (best, least), (0, 9), textcoords="offset points", ha="center")
        if places[0] < upload:
            axes.axvspan(places[0], upload, color=GREY, alpha=0.18, lw=0)
        axes.set(xlabel="time between checkpoints", ylabel="% of time lost", ylim=(0, None))
        axes.xaxis.set_major_formatter(lambda seconds, _: in_time(seconds))

    return draw(paint)


def bars(parts: Iterable[tuple[str, float]], unit: str) -> str | None:
    """One bar each, with its value."""
    rows = [(name, value) for name, value in parts if value is not None]
    if not rows:
        return None

    def paint(axes: Axes) -> None:
        names, values = zip(*reversed(rows), strict=True)
        axes.barh(range(len(names)), values, color=BLUE, height=0.6)
        axes.set_yticks(range(len(names)), names)
        for place, value in enumerate(values):
            axes.annotate(
                in_time(value) if unit == "seconds" else f"{value:.3g}",
                (value, place),
                (5, 0),
                textcoords="offset points",
                va="center",
            )
        axes.margins(x=0.16)
        axes.set_xlabel(unit)
        axes.grid(axis="y", visible=False)

    return draw(paint, 0.8 + 0.36 * len(rows))


def in_time(seconds: float) -> str:
    """A duration to be read by people."""
    for least, size, unit in ((172800, 86400, "d"), (7200, 3600, "h"), (600, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
