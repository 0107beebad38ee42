"""report.html: what a run and the stages of the workflow have found, on one page."""

import base64
import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from ..errors import UserError, command_for, printable
from ..files import flatten, read_json, replace_file
from ..run.hardware import in_units
from ..run.journal import METRICS, finite, parsed
from ..run.samples import read_sample, samples_of
from . import STAGES, plots
from .chain import RECOMMENDED, read_stage
from .interleaved import Interval
from .recovery import RESTART
from .stage import PACKAGE
from .timing import spread

Figures = dict[str, Any]
POINTS = 2000  # of a curve: more are thinned out
COMPILED = {"blocks": "block by block", "full": "as a whole"}  # by --compile.mode


@dataclass
class Section:
    """What the page shows of a stage."""

    name: str
    about: str
    command: str
    status: str = "not_run"  # or damaged, or the stage's own
    problem: str = ""
    content: Figures = field(default_factory=dict)  # of workflow/<stage>.json
    tiles: list[tuple[str, str]] = field(default_factory=list)  # (what, value)
    rates: list[plots.Row] = field(default_factory=list)  # samples/s
    pictures: list[plots.Picture] = field(default_factory=list)

    def rate(self, label: str, seconds: dict[str, float] | None) -> None:
        """Add a row to the plot of throughput, if the seconds of a step are known."""
        batch = self.content["settings"]["train"]["global_batch_size"]
        if seconds:
            rates = (batch / seconds[key] for key in ("median", "p90", "p10"))
            self.rates.append((label, *rates))


def publish_report(run_dir: Path) -> Path:
    """Write RUN_DIR/report.html."""
    path = run_dir / "report.html"
    replace_file(path, page_of(run_dir))
    return path


def page_of(run_dir: Path) -> str:
    """The page as HTML; what is damaged is named on it. UserError if nothing is there."""
    notes: list[str] = []
    sections = [section(run_dir, name) for name in STAGES]
    records = read_metrics(run_dir / METRICS, notes)
    run, settings = (read(run_dir / name, notes) for name in ("status.json", "config.json"))
    if not (records or notes or run or any(it.status != "not_run" for it in sections)):
        raise UserError(
            f"there is nothing to report in {run_dir}: run `{command_for('workflow', run_dir)}` or "
            f"`{command_for('train', run_dir)}` first"
        )
    if run.get("status") == "running" and records:  # it knows where the run began, or went on
        run = {"status": "running or killed, last heard of", "step": records[-1]["step"]}
    tiles = [tile for it in sections for tile in it.tiles]
    for record in [record for record in records if "validation_loss" in record][-1:]:
        validated = f"validation loss, step {record['step']}"
        tiles.insert(0, (validated, f"{record['validation_loss']:.4f}"))
    measured = [it.content for it in sections if it.content]
    newest = max(measured, key=lambda content: content.get("measured_at", ""), default={})
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
        settings=flatten(settings or newest.get("settings", {})),
    )


def read(path: Path, notes: list[str]) -> Figures:
    """The content of a JSON file; {} if there is none, or a damaged one, which is noted."""
    try:
        return read_json(path) if os.path.lexists(path) else {}
    except UserError as error:
        notes.append(str(error))
        return {}


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
            SHOW[name](result, content["figures"])
        return result
    except UserError as error:
        problem = str(error).partition(": measure again")[0]
    except Exception as error:  # what cannot be shown, whatever is in it
        problem = f"its figures are damaged or of an older version of this project ({error!r})"
    return Section(name, result.about, result.command, "damaged", problem)


def recommended(run_dir: Path) -> Figures:
    """What the stages recommend, and how many times as fast it is; {} if that is not known."""
    with contextlib.suppress(UserError, ValueError, TypeError, LookupError):  # damaged
        content = read_stage(run_dir, RECOMMENDED)
        if content and content["status"] != "fail" and content["figures"]["settings"]:
            factor = content["figures"].get("factor") if content["status"] == "pass" else None
            return content["figures"] | {"factor": factor and Interval(*map(float, factor))}
    return {}


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
        section.tiles.append(("what bounds a step", diagnosis.removesuffix("-bound")))
    rows = []
    for operator in figures.get("operators", [])[:8]:
        name = operator["name"]
        # Both ends of a long name: operators and their backward differ in the last letters.
        short = name if len(name) <= 28 else f"{name[:17]}…{name[-10:]}"
        rows.append((short, 100 * operator["share"]))
    unit = "% of a step, self time"
    title = "Operators by self time"
    section.pictures.append(plots.picture(title, plots.bars, rows, unit, "{:.3g}".format))


def of_scale(section: Section, figures: Figures) -> None:
    """Throughput and memory by the number of processes."""
    records = figures.get("ranks", {})
    section.pictures += [
        plots.picture("Throughput by processes", plots.scaling, records),
        plots.picture("Memory of a rank", plots.memory, records),
    ]


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
    rows += [(f"restart: {what}", restart[part]) for part, what in RESTART.items()]
    rows.append(("verify and load", figures["restore_seconds"]))
    costs = blocked, restart["total"], 3600 * hours, best, published
    titles = "What saving and restarting cost", f"Time lost, at a failure every {hours:g} h"
    section.pictures += [
        plots.picture(titles[0], plots.bars, rows, "seconds", plots.in_time),
        plots.picture(titles[1], plots.lost_time, *costs),
    ]


SHOW = {
    "baseline": of_baseline,
    "compile": of_compile,
    "profile": of_profile,
    "scale": of_scale,
    "checkpoint": of_checkpoint,
}


def overview(sections: list[Section], records: list[Figures]) -> list[plots.Picture]:
    """The first plots."""
    first_losses = sections[0].content.get("figures", {}).get("losses", [])
    rates = [rate for it in sections for rate in it.rates]
    if run := [r["samples_per_second"] for r in records if r.get("samples_per_second")]:
        rates.append(("training run", *(spread(run)[key] for key in ("median", "p10", "p90"))))
    what = "samples/s (median, p10 to p90)"
    title = "Loss" if records else "Loss in the baseline's steps"
    return [
        plots.picture(title, plots.loss_curve, records, first_losses),
        plots.picture("Throughput by stage", plots.bars, rates, what, "{:,.0f}".format),
        plots.picture("Memory of the run", plots.memory_curve, records),
    ]


def read_metrics(path: Path, notes: list[str]) -> list[Figures]:
    """The lines of metrics.jsonl; of many, one of each of `POINTS` parts of the file.

    Those with a validation are counted apart. Damaged lines are left out, with a note.
    """
    kept: dict[tuple[bool, int], Figures] = {}
    size = damaged = 0
    if not path.is_file():
        return []
    total = path.stat().st_size
    with open(path, "rb") as lines:
        for line in lines:
            size += len(line)
            if record := parsed(line):
                record = {figure: value for figure, value in record.items() if finite(value)}
                kept["validation_loss" in record, POINTS * size // total] = record
            else:
                damaged += line.endswith(b"\n")  # the last may be cut
    if damaged:
        notes.append(f"{path.name}: damaged lines, left out here: {damaged}")
    return sorted(kept.values(), key=lambda record: record["step"])


def prose(text: str) -> Markup:
    """Plain text with what stands between backticks as code."""
    return Markup(re.sub("`(.*?)`", r"<code>\1</code>", str(escape(text))))
