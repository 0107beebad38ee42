"""report.html: what a run and the stages of the workflow have found, on one page."""

import json
import logging
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ..config import load
from ..errors import UserError
from ..run.hardware import in_units
from ..run.tracker import log_report
from . import STAGES, plots
from .stage import PACKAGE, command, read_stage

log = logging.getLogger(__name__)
Figures = dict[str, Any]


@dataclass
class Section:
    """What the page shows of a stage."""

    name: str
    about: str
    command: str
    status: str = "not_run"  # or damaged, or that of the stage
    problem: str = ""
    content: Figures = field(default_factory=dict)  # of workflow/<stage>.json
    tiles: list[tuple[str, str]] = field(default_factory=list)  # (what, value)
    rates: list[tuple[str, float, float, float]] = field(default_factory=list)  # samples/s
    plots: list[tuple[str, str | None]] = field(default_factory=list)  # (title, SVG)

    def rate(self, label: str, seconds: dict[str, float]) -> None:
        """Add a row to the plot of throughput: the median, its lower and upper end."""
        batch = self.content["settings"]["train"]["global_batch_size"]
        self.rates.append((label, *(batch / seconds[key] for key in ("median", "p90", "p10"))))


def publish_report(run_dir: Path) -> Path:
    """Write the report, and hand it to the tracker of a run that has trained."""
    path, settings = write_report(run_dir), run_dir / "config.json"
    if settings.exists():
        try:
            log_report(run_dir, load(settings), path)
        except (UserError, KeyError, ValueError) as error:  # the run left damaged files
            log.warning("the tracker did not get %s: %s", path.name, error)
    return path


def write_report(run_dir: Path) -> Path:
    """Write RUN_DIR/report.html; what is damaged is named on it. UserError if nothing is there."""
    notes: list[str] = []
    sections = [section(run_dir, name) for name in STAGES]
    records = read_metrics(run_dir / "metrics.jsonl", notes)
    status, config = (read_json(run_dir / f"{name}.json", notes) for name in ("status", "config"))
    if not (records or notes or status or any(it.status != "not_run" for it in sections)):
        raise UserError(
            f"there is nothing to report in {run_dir}: run `{command('workflow', run_dir)}` or "
            f"`{command('train', run_dir)}` first"
        )
    measured = [it.content for it in sections if it.content]
    newest = max(measured, key=lambda content: content["measured_at"], default={})
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"picture": picture, "moment": moment, "prose": prose}
    page = environment.get_template("report.html").render(
        name=run_dir.name,
        package=PACKAGE,
        run=status or {},
        notes=notes,
        sections=sections,
        tiles=[*of_run(records), *(tile for it in sections for tile in it.tiles)],
        plots=list(overview(sections, records)),
        origin=[*newest.get("machine", {}).items(), *newest.get("versions", {}).items()],
        settings=list(flatten(config or newest.get("settings", {}))),
    )
    path = run_dir / "report.html"
    try:
        path.write_text(page, "utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from None
    return path


def section(run_dir: Path, name: str) -> Section:
    """What the page shows of a stage, whatever state its file is in."""
    about, again = STAGES[name].split(":")[0], command(name, run_dir)
    try:
        if (content := read_stage(run_dir, name)) is None:
            return Section(name, about, again)
        found = Section(name, about, again, content["status"], content=content)
        SHOW[name](found, content["figures"])
    except UserError as error:
        return Section(name, about, again, "damaged", str(error).partition(": measure again")[0])
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"its figures are damaged or of an older version of this project ({error!r})"
        return Section(name, about, again, "damaged", problem)
    return found


def of_baseline(found: Section, figures: Figures) -> None:
    """Throughput of one eager process."""
    if figures.get("step_seconds"):
        found.rate("baseline, eager", figures["step_seconds"])
        found.tiles.append(("samples/s, eager", f"{figures['samples_per_second']:,.0f}"))
    if figures.get("tokens_per_second"):
        found.tiles.append(("tokens/s, eager", f"{figures['tokens_per_second']:,.0f}"))
    if figures.get("mfu"):
        found.tiles.append(("MFU, eager", f"{figures['mfu']:.1%}"))
    if figures.get("peak_memory_bytes"):
        found.tiles.append(("peak memory, eager", in_units(figures["peak_memory_bytes"])))


def of_compile(found: Section, figures: Figures) -> None:
    """The speedup, and seconds of compiling, cold and warm."""
    modes = figures.get("modes", {})
    for mode, mode_figures in modes.items():
        if mode_figures.get("step_seconds"):
            found.rate(f"compiled, {mode}", mode_figures["step_seconds"])
    if best := modes.get(figures.get("best")):
        what = f"speedup, compiled {figures['best']}"
        found.tiles.append((what, f"{best['speedup']['value']:.2f}x"))
    rows = [
        (f"{mode}, {cache}", seconds)
        for mode, mode_figures in modes.items()
        for cache, seconds in mode_figures.get("compile_seconds", {}).items()
    ]
    svg = plots.bars(rows, "seconds", plots.in_time)
    found.plots.append(("Compiling, with a cold and a warm cache", svg))


def of_profile(found: Section, figures: Figures) -> None:
    """Where a step's time goes, and in which operators."""
    if figures.get("diagnosis"):
        found.tiles.append(("a step is", figures["diagnosis"]))
    rows = [
        # Both ends of a long name: operators and their backward differ in the last letters.
        (name if len(name) <= 28 else f"{name[:17]}…{name[-10:]}", 100 * share)
        for name, share in ((it["name"], it["share"]) for it in figures.get("operators", [])[:8])
    ]
    found.plots += [
        ("Where a step's time goes", plots.step_shares(figures.get("shares", {}))),
        ("Operators by self time", plots.bars(rows, "% of a step, self time")),
    ]


def of_scale(found: Section, figures: Figures) -> None:
    """Throughput and memory by the number of processes."""
    each = " of 1 thread" if figures.get("threads") == 1 else ""  # other stages had more
    strong = figures.get("strong", {})
    for ranks, pace in strong.items():
        processes = "process" if ranks == "1" else "processes"
        found.rate(f"scale, {ranks} {processes}{each}", pace["step_seconds"])
    statuses = {check["name"]: check["status"] for check in found.content["checks"]}
    if statuses.get("strong_efficiency") != "not_measured":
        for ranks, value in [*figures.get("strong_efficiency", {}).items()][-1:]:
            found.tiles.append((f"strong efficiency, {ranks} ranks", f"{value:.0%}"))
    found.plots += [
        ("Throughput by processes", plots.scaling(strong, figures.get("weak", {}))),
        ("Memory of a rank", plots.memory(figures.get("memory", {}))),
    ]


def of_checkpoint(found: Section, figures: Figures) -> None:
    """What saving and failing cost, and what follows for the interval between saves."""
    if not figures:
        return
    blocked, published = (figures[key]["median"] for key in ("blocked_seconds", "save_seconds"))
    restart, best = figures["restart_seconds"], figures["interval_seconds"]
    hours = figures["hours_between_failures"]
    found.tiles += [
        ("training blocked by a save", plots.in_time(blocked)),
        ("from kill to the next step", plots.in_time(restart["total"])),
        ("save every", plots.in_time(best)),
    ]
    rows = [
        ("blocked by a save", blocked),
        ("save, until published", published),
        *((f"restart: {part.replace('_', ' ')}", restart[part]) for part in RESTART_PARTS),
    ]
    curve = plots.lost_time(blocked, restart["total"], 3600 * hours, best, published)
    found.plots += [
        ("What saving and restarting cost", plots.bars(rows, "seconds", plots.in_time)),
        (f"Time lost, at a failure every {hours:g} h", curve),
    ]


RESTART_PARTS = ("launch", "restore", "first_step")
SHOW = {
    "baseline": of_baseline,
    "compile": of_compile,
    "profile": of_profile,
    "scale": of_scale,
    "checkpoint": of_checkpoint,
}


def of_run(records: list[Figures]) -> Iterator[tuple[str, str]]:
    """The run's own tile."""
    for record in [r for r in records if r.get("validation_loss") is not None][-1:]:
        yield f"validation loss, step {record['step']}", f"{record['validation_loss']:.4f}"


def overview(sections: list[Section], records: list[Figures]) -> Iterator[tuple[str, str]]:
    """The first plots: (title, SVG)."""
    baseline = sections[0].content.get("figures", {})
    if svg := plots.loss_curve(records, baseline.get("losses", [])):
        yield ("Loss" if records else "Loss in the baseline's steps"), svg
    rates = [rate for it in sections for rate in it.rates]
    if run := [r["samples_per_second"] for r in records if r.get("samples_per_second")]:
        p10, median, p90 = (float(x) for x in np.percentile(run, [10, 50, 90]))
        rates.append(("training run", median, p10, p90))
    if svg := plots.bars(rates, "samples/s (median, p10 to p90)", "{:,.0f}".format):
        yield "Throughput by stage", svg


def flatten(tree: Figures, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and values of settings."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, json.dumps(value)


def read_json(path: Path, notes: list[str]) -> Figures | None:
    """An object from a file of the run; None, with a note, if it is damaged."""
    try:
        return dict(json.loads(path.read_bytes())) if path.exists() else None
    except (OSError, ValueError, TypeError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return None


def read_metrics(path: Path, notes: list[str]) -> list[Figures]:
    """The lines of metrics.jsonl; those that are damaged are left out, with a note."""
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]  # the last may be cut
    records, damaged = [], 0
    for line in lines:
        try:
            records.append({"step": None} | json.loads(line))
        except (ValueError, TypeError):
            damaged += 1
    whole = [record for record in records if isinstance(record["step"], int)]
    if damaged := damaged + len(records) - len(whole):
        notes.append(f"{path.name}: {damaged} damaged lines are left out")
    return whole


def picture(svg: str) -> str:
    """An SVG as an address that holds all of it."""
    return "data:image/svg+xml;base64," + b64encode(svg.encode()).decode()


def moment(text: str) -> str:
    """A time of JSON as people write it."""
    return text.replace("T", " ").replace("Z", " UTC")


def prose(text: str) -> Markup:
    """Plain text with what stands between backticks as code."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts)
    )
