"""report.html: what a run and the stages of the workflow have found, on one page."""

import base64
import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from ..errors import UserError, command_for, printable
from ..files import flatten, read_json, replace_file
from ..run.hardware import in_units
from ..run.journal import finite, parsed
from ..run.samples import read_sample, samples_of
from . import STAGES, earlier_results, plots
from .chain import RECOMMENDED, interval, read_stage, result_in
from .recovery import RESTART
from .stage import PACKAGE
from .timing import spread

Figures = dict[str, Any]
POINTS = 2000  # of a curve: more are thinned out
COMPILED = {"blocks": "block by block", "full": "as a whole"}  # by --compile.mode
MOST_OF_A_STEP = {  # by the diagnosis of the profile stage
    "input-bound": "waiting for data",
    "host-bound": "Python on the host",
    "kernel-bound": "computing",
    "communication-bound": "communication between ranks",
    "recompiling": "recompiling",
}


@dataclass
class Section:
    """What the page shows of a stage."""

    name: str
    about: str
    command: str
    status: str = "not_run"  # or damaged, or the stage's own
    problem: str = ""
    content: Figures = field(default_factory=dict)  # of workflow/<stage>.json
    rejected: list[str] = field(default_factory=list)  # settings that were tried
    earlier: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """The results before this one: when, status, and tiles."""
    tiles: list[tuple[str, str]] = field(default_factory=list)  # (what, value)
    rates: list[plots.Row] = field(default_factory=list)  # samples/s
    plots: list[tuple[str, str | None]] = field(default_factory=list)  # (title, picture)

    def rate(self, label: str, seconds: dict[str, float] | None) -> None:
        """Add a row to the plot of throughput, if the seconds of a step are known."""
        batch = self.content["settings"]["train"]["global_batch_size"]
        if seconds:
            self.rates.append((label, *(batch / seconds[key] for key in ("median", "p90", "p10"))))

    def plot(self, title: str, paint: Callable[..., None], *figures: Any) -> None:
        """Add a plot, unless there is nothing to draw."""
        if self.command:  # an earlier result has no plots
            self.plots.append((title, plots.picture(paint, *figures)))


def publish_report(run_dir: Path) -> Path:
    """Write RUN_DIR/report.html."""
    path, page = run_dir / "report.html", page_of(run_dir)
    try:
        replace_file(path, page)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from None
    return path


def page_of(run_dir: Path) -> str:
    """The page as HTML; what is damaged is named on it. UserError if nothing is there."""
    notes: list[str] = []
    sections = [section(run_dir, name) for name in STAGES]
    records = read_metrics(run_dir / "metrics.jsonl", notes)
    found: dict[str, Figures] = {}
    for file in (run_dir / "status.json", run_dir / "config.json"):
        try:
            found |= {file.stem: read_json(file)} if os.path.lexists(file) else {}
        except UserError as error:
            notes.append(str(error))
    if not (records or notes or "status" in found or any(s.status != "not_run" for s in sections)):
        raise UserError(
            f"there is nothing to report in {run_dir}: run `{command_for('workflow', run_dir)}` or "
            f"`{command_for('train', run_dir)}` first"
        )
    run = found.get("status", {})
    if run.get("status") == "running" and records:  # it knows where the run began, or went on
        run = {"status": "running or killed, last heard of", "step": records[-1]["step"]}
    measured = [it.content for it in sections if it.content]
    newest = max(measured, key=lambda content: content["measured_at"], default={})
    tiles = [tile for it in sections for tile in it.tiles]
    for record in [r for r in records if r.get("validation_loss") is not None][-1:]:
        what = f"validation loss, step {record['step']}"
        tiles.insert(0, (what, f"{record['validation_loss']:.4f}"))
    environment = Environment(autoescape=True)
    environment.filters["prose"] = prose
    template = Path(__file__).with_name("report.html").read_text("utf-8")
    return environment.from_string(template).render(
        name=run_dir.name,
        package=PACKAGE,
        run=run,
        notes=notes,
        recommended=recommended(run_dir),
        sections=sections,
        tiles=tiles,
        plots=overview(sections, records),
        samples=[sample(path) for path in samples_of(run_dir)[-1:]],
        origin=[*newest.get("machine", {}).items(), *newest.get("versions", {}).items()],
        settings=flatten(found.get("config") or newest.get("settings", {})),
    )


def sample(path: Path) -> tuple[str, str, str]:
    """What a sample is called, its text, and its picture."""
    name, content = f"Sample, step {path.stem[5:].lstrip('0') or 0}", read_sample(path)
    if path.suffix == ".png":
        return name, "", f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return name, printable(content.decode(errors="replace")), ""


def section(run_dir: Path, name: str) -> Section:
    """What the page shows of a stage, whatever state its file is in."""
    result = Section(name, STAGES[name].split(":")[0], command_for(name, run_dir))
    try:
        if content := read_stage(run_dir, name):
            result.content, result.status = content, content["status"]
            result.rejected = [str(each) for each in content["figures"].get("rejected", [])]
            SHOW[name](result, content["figures"])
            result.earlier = [*earlier(run_dir, name, content["measured_at"])]
        return result
    except UserError as error:
        problem = str(error).partition(": measure again")[0]
    except Exception as error:  # what cannot be shown, whatever is in it
        problem = f"its figures are damaged or of an older version of this project ({error!r})"
    return Section(name, result.about, result.command, "damaged", problem)


def earlier(run_dir: Path, name: str, last: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """The results of a stage before the last one, the newest first."""
    for path in reversed(earlier_results(run_dir, name)):
        view = Section(name, "", "")
        with contextlib.suppress(Exception):  # it may be of an older version of this project
            view.content = content = result_in(path, name)
            SHOW[name](view, content["figures"])
            if (when := content["measured_at"]) != last:
                yield when, content["status"], dict(view.tiles)


def recommended(run_dir: Path) -> Figures:
    """What the stages recommend, and how many times as fast it is; {} if that is not known."""
    content = None
    with contextlib.suppress(UserError):
        content = read_stage(run_dir, RECOMMENDED)
    if not content or content["status"] == "fail" or not content["figures"].get("settings"):
        return {}
    factor = content["figures"].get("factor") if content["status"] == "pass" else None
    return content["figures"] | {"factor": interval(factor)}


def of_baseline(section: Section, figures: Figures) -> None:
    """Throughput of one process without torch.compile."""
    section.rate("not compiled (baseline)", figures.get("step_seconds"))
    for key, what, shown in (
        ("samples_per_second", "samples/s", "{:,.0f}".format),
        ("tokens_per_second", "tokens/s", "{:,.0f}".format),
        ("mfu", "of the device's peak (MFU)", "{:.1%}".format),
        ("matmul_share", "of the matmul peak", "{:.1%}".format),
        ("peak_memory_bytes", "peak memory", in_units),
    ):
        if figures.get(key):
            section.tiles.append((f"{what}, not compiled", shown(figures[key])))


def of_compile(section: Section, figures: Figures) -> None:
    """Throughput of compiled code, and the speedup."""
    modes, best = figures.get("modes", {}), figures.get("best", "none")
    for mode, of_mode in modes.items():
        section.rate(f"compiled, {COMPILED[mode]}", of_mode.get("step_seconds"))
        section.rate("the same, not compiled", of_mode.get("eager_step_seconds"))
    if best in modes:
        speedup = modes[best]["speedup"]["value"]
        section.tiles.append((f"times as fast, compiled {COMPILED[best]}", f"{speedup:.2f}"))


def of_profile(section: Section, figures: Figures) -> None:
    """What takes most of a step, and the operators in which its time goes."""
    if diagnosis := figures.get("diagnosis"):
        section.tiles.append(("what takes most of a step", MOST_OF_A_STEP[diagnosis]))
    rows = [
        # Both ends of a long name: operators and their backward differ in the last letters.
        (name if len(name) <= 28 else f"{name[:17]}…{name[-10:]}", 100 * share)
        for name, share in ((it["name"], it["share"]) for it in figures.get("operators", [])[:8])
    ]
    what = "% of a step, self time"
    section.plot("Operators by self time", plots.bars, rows, what, "{:.3g}".format)


def of_scale(section: Section, figures: Figures) -> None:
    """Throughput and memory by the number of processes."""
    records = figures.get("ranks", {})
    section.plot("Throughput by processes", plots.scaling, records)
    section.plot("Memory of a rank", plots.memory, records)


def of_checkpoint(section: Section, figures: Figures) -> None:
    """What saving and failing cost, and what follows for the interval between saves."""
    if not figures:
        return
    blocked, published = (figures[key]["median"] for key in ("blocked_seconds", "save_seconds"))
    restart, best = figures["restart_seconds"], figures["interval_seconds"]
    hours = figures["hours_between_failures"]
    section.tiles += [
        ("training blocked by a save", plots.in_time(blocked)),
        ("from kill to the next step", plots.in_time(restart["total"])),
        ("save every", plots.in_time(best)),
    ]
    rows = [("blocked by a save", blocked), ("save, until published", published)]
    parts = (part for part in RESTART if part in restart)  # older results tell fewer
    rows += [(f"restart: {RESTART[part]}", restart[part]) for part in parts]
    rows.append(("verify and load", figures["restore_seconds"]))
    title = "What saving and restarting cost"
    section.plot(title, plots.bars, rows, "seconds", plots.in_time)
    costs = blocked, restart["total"], 3600 * hours, best, published
    section.plot(f"Time lost, at a failure every {hours:g} h", plots.lost_time, *costs)


SHOW = {
    "baseline": of_baseline,
    "compile": of_compile,
    "profile": of_profile,
    "scale": of_scale,
    "checkpoint": of_checkpoint,
}


def overview(sections: list[Section], records: list[Figures]) -> list[tuple[str, str | None]]:
    """The first plots: (title, picture)."""
    first_losses = sections[0].content.get("figures", {}).get("losses", [])
    rates = [rate for it in sections for rate in it.rates]
    if run := [r["samples_per_second"] for r in records if r.get("samples_per_second")]:
        figures = spread(run)
        rates.append(("training run", *(figures[key] for key in ("median", "p10", "p90"))))
    title = "Loss" if records else "Loss in the baseline's steps"
    loss = plots.picture(plots.loss_curve, records, first_losses)
    what = "samples/s (median, p10 to p90)"
    throughput = plots.picture(plots.bars, rates, what, "{:,.0f}".format)
    memory = plots.picture(plots.memory_curve, records)
    return [(title, loss), ("Throughput by stage", throughput), ("Memory of the run", memory)]


def read_metrics(path: Path, notes: list[str]) -> list[Figures]:
    """The lines of metrics.jsonl, of many every n-th and those with a validation.

    Lines that are damaged are left out, with a note.
    """
    records: list[Figures] = []
    validated: list[Figures] = []
    count = damaged = 0
    every = 1
    with open(path if path.is_file() else os.devnull, "rb") as lines:
        for line in lines:
            record = parsed(line)
            if record is None:
                damaged += line.endswith(b"\n")  # the last may be cut
                continue
            count += 1
            record = {figure: value for figure, value in record.items() if finite(value)}
            if record.get("validation_loss") is not None:
                validated.append(record)
            elif count % every == 0:
                records.append(record)
            if len(records) > POINTS:
                every, records = 2 * every, records[::2]
            if len(validated) > POINTS:
                validated = validated[::2]
    if damaged:
        notes.append(f"{path.name}: damaged lines, left out here: {damaged}")
    return sorted(records + validated, key=lambda record: record["step"])


def prose(text: str) -> Markup:
    """Plain text with what stands between backticks as code."""
    return Markup(re.sub("`(.*?)`", r"<code>\1</code>", str(escape(text))))
