"""report.html: what a run and the stages of the workflow have found, on one page."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment

from ..checkpoint.manifest import reading
from ..errors import UserError, command_for, printable
from ..files import flatten, read_json, replace_file
from ..run.hardware import in_units
from ..run.journal import METRICS, finite, parsed
from ..run.samples import samples_of
from . import STAGES, plots
from .chain import RECOMMENDED, own_metrics, read_stage
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
        raise UserError(f"nothing to report in {run_dir}: first `{command_for('train', run_dir)}`")
    if run.get("status") == "running" and records:  # it knows where the run began, or resumed
        run = {"status": "running or killed, last heard of", "step": records[-1]["step"]}
    samples = samples_of(run_dir)[::-1]
    newest = max(sections.values(), key=lambda each: each.get("measured_at", ""))
    environment = Environment(autoescape=True, undefined=ChainableUndefined)
    environment.filters |= {"in_time": plots.in_time, "in_units": in_units}
    template = Path(__file__).with_name("report.html").read_text("utf-8")
    with reading(run_dir):  # whatever is in a damaged file
        page = environment.from_string(template).render(
            name=run_dir.name,
            package=PACKAGE,
            run=run,
            notes=notes,
            recommended=section(run_dir, RECOMMENDED),
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
    page = {"about": STAGES.get(name, "").split(":")[0], "command": command_for(name, run_dir)}
    try:
        if content := read_stage(run_dir, name):
            pictures = [*pictures_of(name, content["figures"])]  # drawn here: errors are caught
            return page | content | {"rates": rates_of(name, content), "pictures": pictures}
        return page | {"status": "not_run"}
    except UserError as error:
        problem = str(error).partition(": measure again")[0]
    except Exception as error:  # what cannot be shown, whatever is in it
        problem = f"its figures are damaged or of an older version of this project ({error!r})"
    return page | {"status": "damaged", "problem": problem}


def rates_of(name: str, content: Figures) -> list[plots.Row]:
    """Rows of the plot of throughput: one process, without and with torch.compile."""
    figures, batch = content["figures"], content["settings"]["train"]["global_batch_size"]
    rows = [("not compiled (baseline)", figures["step_seconds"])] if name == "baseline" else []
    for mode, each in figures["modes"].items() if name == "compile" else ():
        rows.append((f"compiled, {COMPILED[mode]}", each["step_seconds"]))
        rows.append(("the same, not compiled", each["eager_step_seconds"]))
    ends = ("median", "p90", "p10")  # of seconds: the fewer, the more samples/s
    return [(label, *(batch / seconds[key] for key in ends)) for label, seconds in rows]


def pictures_of(name: str, figures: Figures) -> Iterator[plots.Picture]:
    """The plots of a stage."""
    if name == "profile":
        rows = []
        for operator in figures.get("operators", [])[:8]:
            full = operator["name"]
            # Both ends of a long name: operators and their backward differ in the last letters.
            short = full if len(full) <= 28 else f"{full[:17]}…{full[-10:]}"
            rows.append((short, 100 * operator["share"]))
        unit = "% of a step, self time"
        yield plots.picture("Operators by self time", plots.bars, rows, unit, "{:.3g}".format)
    elif name == "scale":
        records = figures.get("ranks", {})
        yield plots.picture("Throughput by processes", plots.scaling, records)
        rows = [(f"of {n}", record["memory"]["measured"] / 1e6) for n, record in records.items()]
        yield plots.picture("Memory of a rank", plots.bars, rows, "MB", "{:,.4g}".format)
    elif "interval_seconds" in figures:  # of a drill in which no process broke down
        blocked, published = (figures[key]["median"] for key in ("blocked_seconds", "save_seconds"))
        restart = figures["restart_seconds"]
        rows = [("blocked by a save", blocked), ("save, until published", published)]
        rows += [(f"restart: {what}", restart[part]) for part, what in RESTART.items()]
        rows.append(("verify and load", figures["restore_seconds"]))
        rows.append(("from a kill to the next step", restart["total"]))
        title = "What saving and restarting cost"
        yield plots.picture(title, plots.bars, rows, "seconds", plots.in_time)


def overview(sections: dict[str, Figures], records: list[Figures]) -> list[plots.Picture]:
    """The first plots."""
    rates = [row for each in sections.values() for row in each.get("rates", ())]
    if run := [r["samples_per_second"] for r in records if r.get("samples_per_second")]:
        rates.append(("training run", *(spread(run)[key] for key in ("median", "p10", "p90"))))
    what, drawn = "samples/s (median, p10 to p90)", list[plots.Picture]()
    for name in ["loss", *own_metrics(records)[:METRICS_DRAWN]]:
        title, both = name.replace("_", " "), {name: "training", f"validation_{name}": "validation"}
        title = title[:1].upper() + title[1:]
        drawn.append(plots.picture(title, plots.curves, records, name, both))
    drawn.append(plots.picture("Throughput by stage", plots.bars, rates, what, "{:,.0f}".format))
    return [*drawn, plots.picture("Memory of the run", plots.curves, records, "GB", plots.MEMORY)]


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
