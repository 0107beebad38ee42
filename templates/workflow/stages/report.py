"""report.html: what a run and the stages of the workflow have found, on one page."""

import base64
import contextlib
import os
import re
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment
from markupsafe import Markup, escape

from ..checkpoint.manifest import reading
from ..errors import UserError, command_for, printable
from ..files import flatten, read_json, replace_file
from ..run.hardware import in_units
from ..run.journal import METRICS, finite, parsed
from ..run.samples import samples_of
from . import STAGES, plots
from .chain import RECOMMENDED, own_metrics, read_stage
from .interleaved import Interval
from .recovery import RESTART
from .stage import PACKAGE
from .timing import spread

Figures = dict[str, Any]
POINTS = 2000  # of a curve: more are thinned out
SAMPLES, METRICS_DRAWN = 4, 6
COMPILED = {"blocks": "block by block", "full": "as a whole"}  # by --compile.mode


def publish_report(run_dir: Path) -> Path:
    """Write RUN_DIR/report.html; UserError if nothing is there, RankError if it cannot be shown."""
    notes: list[str] = []
    sections = {name: section(run_dir, name) for name in STAGES}
    records = read_metrics(run_dir / METRICS, notes)
    run, settings = (read(run_dir / name, notes) for name in ("status.json", "config.json"))
    if not (records or notes or run or any(s["status"] != "not_run" for s in sections.values())):
        raise UserError(
            f"there is nothing to report in {run_dir}: run `{command_for('workflow', run_dir)}` or "
            f"`{command_for('train', run_dir)}` first"
        )
    if run.get("status") == "running" and records:  # it knows where the run began, or resumed
        run = {"status": "running or killed, last heard of", "step": records[-1]["step"]}
    samples = samples_of(run_dir)[::-1]
    newest = max(sections.values(), key=lambda each: each.get("measured_at", ""))
    environment = Environment(autoescape=True, undefined=ChainableUndefined)
    environment.filters |= {"prose": prose, "in_time": plots.in_time, "in_units": in_units}
    template = Path(__file__).with_name("report.html").read_text("utf-8")
    with reading(run_dir):  # whatever is in a damaged file
        page = environment.from_string(template).render(
            name=run_dir.name,
            package=PACKAGE,
            run=run,
            notes=notes,
            recommended=recommended(run_dir),
            validated=[record for record in records if "validation_loss" in record][-1:],
            sections=sections,
            compiled=COMPILED,
            plots=overview(sections, records),
            # The last one, and others as far apart as they can be.
            samples=[sample(path) for path in samples[:: -(-len(samples) // SAMPLES) or 1][::-1]],
            origin=[*newest.get("machine", {}).items(), *newest.get("versions", {}).items()],
            settings=flatten(settings or newest.get("settings", {})),
        )
    replace_file(path := run_dir / "report.html", page)
    return path


def read(path: Path, notes: list[str]) -> Figures:
    """The content of a JSON file; {} if there is none, or a damaged one, which is noted."""
    try:
        return read_json(path) if os.path.lexists(path) else {}
    except UserError as error:
        notes.append(str(error))
        return {}


def sample(path: Path) -> tuple[str, str, str]:
    """What a sample is called, its text, and its picture."""
    name, content = f"Sample, step {path.stem[5:].lstrip('0') or 0}", path.read_bytes()
    if path.suffix == ".png":
        return name, "", f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return name, printable(content.decode(errors="replace")), ""


def section(run_dir: Path, name: str) -> Figures:
    """What the page shows of a stage, whatever state its file is in."""
    page = {"about": STAGES[name].split(":")[0], "command": command_for(name, run_dir)}
    try:
        if content := read_stage(run_dir, name):
            return page | content | SHOW[name](content["figures"], content["settings"])
        return page | {"status": "not_run"}
    except UserError as error:
        problem = str(error).partition(": measure again")[0]
    except Exception as error:  # what cannot be shown, whatever is in it
        problem = f"its figures are damaged or of an older version of this project ({error!r})"
    return page | {"status": "damaged", "problem": problem}


def recommended(run_dir: Path) -> Figures:
    """What the stages recommend, and how many times as fast it is; {} if that is not known."""
    with contextlib.suppress(UserError, ValueError, TypeError, LookupError):  # damaged
        content = read_stage(run_dir, RECOMMENDED)
        if content and content["status"] != "fail" and content["figures"]["settings"]:
            factor = content["figures"].get("factor") if content["status"] == "pass" else None
            return content["figures"] | {"factor": factor and Interval(*map(float, factor))}
    return {}


def rate(label: str, seconds: Figures, settings: Figures) -> plots.Row:
    """A row of the plot of throughput, from the seconds of a step."""
    batch = settings["train"]["global_batch_size"]
    return (label, *(batch / seconds[key] for key in ("median", "p90", "p10")))


def of_baseline(figures: Figures, settings: Figures) -> Figures:
    """Throughput of one process without torch.compile."""
    return {"rates": [rate("not compiled (baseline)", figures["step_seconds"], settings)]}


def of_compile(figures: Figures, settings: Figures) -> Figures:
    """Throughput with and without compiling, measured in one process."""
    rates = []
    for mode, of_mode in figures["modes"].items():
        rates.append(rate(f"compiled, {COMPILED[mode]}", of_mode["step_seconds"], settings))
        rates.append(rate("the same, not compiled", of_mode["eager_step_seconds"], settings))
    return {"rates": rates}


def of_profile(figures: Figures, settings: Figures) -> Figures:
    """The operators in which the time of a step goes."""
    rows = []
    for operator in figures.get("operators", [])[:8]:
        name = operator["name"]
        # Both ends of a long name: operators and their backward differ in the last letters.
        short = name if len(name) <= 28 else f"{name[:17]}…{name[-10:]}"
        rows.append((short, 100 * operator["share"]))
    unit, title = "% of a step, self time", "Operators by self time"
    return {"pictures": [plots.picture(title, plots.bars, rows, unit, "{:.3g}".format)]}


def of_scale(figures: Figures, settings: Figures) -> Figures:
    """Throughput and memory by the number of processes."""
    records = figures.get("ranks", {})
    throughput = plots.picture("Throughput by processes", plots.scaling, records)
    peaks = [(f"of {n}", record["memory"]["measured"] / 1e6) for n, record in records.items()]
    memory = plots.picture("Memory of a rank", plots.bars, peaks, "MB", "{:,.4g}".format)
    return {"pictures": [throughput, memory]}


def of_checkpoint(figures: Figures, settings: Figures) -> Figures:
    """What saving and failing cost, and what follows for the interval between saves."""
    if "interval_seconds" not in figures:  # a process of the drill broke down before
        return {}
    blocked, published = (figures[key]["median"] for key in ("blocked_seconds", "save_seconds"))
    restart, hours = figures["restart_seconds"], figures["hours_between_failures"]
    rows = [("blocked by a save", blocked), ("save, until published", published)]
    rows += [(f"restart: {what}", restart[part]) for part, what in RESTART.items()]
    rows.append(("verify and load", figures["restore_seconds"]))
    costs = blocked, restart["total"], 3600 * hours, figures["interval_seconds"], published
    titles = "What saving and restarting cost", f"Time lost, at a failure every {hours:g} h"
    return {
        "pictures": [
            plots.picture(titles[0], plots.bars, rows, "seconds", plots.in_time),
            plots.picture(titles[1], plots.lost_time, *costs),
        ]
    }


SHOW = {
    "baseline": of_baseline,
    "compile": of_compile,
    "profile": of_profile,
    "scale": of_scale,
    "checkpoint": of_checkpoint,
}


def overview(sections: dict[str, Figures], records: list[Figures]) -> list[plots.Picture]:
    """The first plots."""
    rates = [row for each in sections.values() for row in each.get("rates", ())]
    if run := [r["samples_per_second"] for r in records if r.get("samples_per_second")]:
        rates.append(("training run", *(spread(run)[key] for key in ("median", "p10", "p90"))))
    what, curve = "samples/s (median, p10 to p90)", plots.metric_curve
    return [
        *(
            plots.picture(name[:1].upper() + name[1:].replace("_", " "), curve, records, name)
            for name in ["loss", *own_metrics(records)[:METRICS_DRAWN]]
        ),
        plots.picture("Throughput by stage", plots.bars, rates, what, "{:,.0f}".format),
        plots.picture("Memory of the run", plots.memory_curve, records),
    ]


def read_metrics(path: Path, notes: list[str]) -> list[Figures]:
    """The lines of metrics.jsonl; of many, one of each of `POINTS` parts of the file.

    Those with a validation are counted apart. Damaged lines are left out, with a note.
    """
    kept: dict[tuple[bool, int], Figures] = {}
    damaged = 0
    with open(path if path.is_file() else os.devnull, "rb") as lines:
        total = os.fstat(lines.fileno()).st_size
        for line in lines:
            if record := parsed(line):
                record = {figure: value for figure, value in record.items() if finite(value)}
                kept["validation_loss" in record, POINTS * lines.tell() // total] = record
            else:
                damaged += line.endswith(b"\n")  # the last may be cut
    if damaged:
        notes.append(f"{path.name}: damaged lines, left out here: {damaged}")
    return sorted(kept.values(), key=lambda record: record["step"])


def prose(text: str) -> Markup:
    """Plain text with what stands between backticks as code."""
    return Markup(re.sub("`(.*?)`", r"<code>\1</code>", str(escape(text))))
