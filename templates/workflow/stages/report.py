"""Write report.html, with the results of a run and of the workflow's stages on one page."""

import base64
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import ChainableUndefined, Environment, Template

from ..checkpoint.manifest import reading
from ..errors import UserError, command_for, printable
from ..files import flatten, read_json, replace_file
from ..run.hardware import in_units
from ..run.journal import METRICS, finite, parsed
from ..run.samples import samples_of
from . import STAGES, plots
from .chain import RECOMMENDED, read_stage, user_metrics
from .processes import named
from .recovery import RESTART
from .stage import PACKAGE
from .timing import spread

JsonObject = dict[str, Any]
# Curves of long runs are reduced to about this many points.
POINTS = 2000
# The maximum numbers of samples, of the user's metrics, and of operators on the page.
SAMPLES = 4
METRICS_DRAWN = 6
OPERATORS_DRAWN = 8
# Descriptions of the modes of --compile.mode.
COMPILED = {"blocks": "block by block", "full": "as a whole"}


class Sample(NamedTuple):
    """A sample of the model's output: text, or an image as a data: URL."""

    title: str
    text: str = ""
    image: str = ""


def publish_report(run_dir: Path) -> Path:
    """Write RUN_DIR/report.html and return its path.

    Raises UserError if there is nothing to report, RankError if the page cannot be rendered.
    """
    notes: list[str] = []
    sections = {name: section(run_dir, name) for name in STAGES}
    records = read_metrics(run_dir / METRICS, notes)
    run = read(run_dir / "status.json", notes)
    settings = read(run_dir / "config.json", notes)
    measured = any(each["status"] != "not_run" for each in sections.values())
    if not (records or notes or run or measured):
        first = command_for("train", run_dir)
        raise UserError(f"there is nothing to report in {run_dir}: run `{first}` first")
    template = page_template()
    newest = max(sections.values(), key=lambda each: each.get("measured_at", ""))
    # If no stage has a result, show the machine of the run.
    measured_on = newest if "machine" in newest else run
    # Damage to a file may show only when the page is rendered, and cause any kind of error.
    # `reading` converts the error to a RankError that names the run directory.
    with reading(run_dir):
        page = template.render(
            name=run_dir.resolve().name,
            package=PACKAGE,
            run=last_status(run, records),
            notes=notes,
            recommended=section(run_dir, RECOMMENDED),
            validated=last_validation(records),
            sections=sections,
            compiled=COMPILED,
            plots=overview(sections, records),
            samples=shown_samples(run_dir),
            origin=origin_of(measured_on, run.get("source", {})),
            settings=flatten(settings or newest.get("settings", {})),
        )
    path = run_dir / "report.html"
    replace_file(path, page)
    return path


def page_template() -> Template:
    """Load the template of the page, with the filters that it uses."""
    # If a result lacks `a` or `b`, ChainableUndefined makes `a.b.c` empty instead of an error.
    environment = Environment(autoescape=True, undefined=ChainableUndefined)
    environment.filters["in_time"] = plots.in_time
    environment.filters["in_units"] = in_units
    text = Path(__file__).with_name("report.html").read_text("utf-8")
    return environment.from_string(text)


def read(path: Path, notes: list[str]) -> JsonObject:
    """Read a JSON file; return {} if it is missing or damaged. Damage is added to `notes`."""
    # For a broken link, `exists` would be False, but `lexists` is True. So it counts as damage.
    if not os.path.lexists(path):
        return {}
    try:
        return read_json(path)
    except UserError as error:
        notes.append(str(error))
        return {}


def last_status(run: JsonObject, records: list[JsonObject]) -> JsonObject:
    """Return the status to show, from the content of status.json (`run`) and the metrics.

    A run that is "running" in status.json may have been killed: show the step of its last record.
    """
    if run.get("status") == "running" and records:
        # status.json has only the step at which the run started or resumed.
        return {"status": "running or killed, last record", "step": records[-1]["step"]}
    return run


def last_validation(records: list[JsonObject]) -> list[JsonObject]:
    """Return the last record that has a validation, in a list, or [] if there is none."""
    validated = [record for record in records if "validation_loss" in record]
    return validated[-1:]


def origin_of(result: JsonObject, source: JsonObject) -> list[tuple[str, Any]]:
    """Return names and values that tell where a result of a stage or run comes from.

    These are the machine and the versions in `result`, and the commit in `source`, the run's code.
    """
    machine = result.get("machine", {})
    versions = result.get("versions", {})
    rows = [*machine.items(), *versions.items()]
    if "commit" in source:
        commit = str(source["commit"])[:12]
        if "changed" in source:
            commit += f", changed since ({source['changed']})"
        rows.append(("commit", commit))
    return rows


def shown_samples(run_dir: Path) -> list[Sample]:
    """Read at most `SAMPLES` samples: the newest and evenly spaced earlier ones, oldest first."""
    newest_first = samples_of(run_dir)[::-1]
    interval = max(1, math.ceil(len(newest_first) / SAMPLES))
    chosen = newest_first[::interval]
    return [read_sample(path) for path in reversed(chosen)]


def read_sample(path: Path) -> Sample:
    """Read a sample from its file, such as step_00000100.txt or step_00000100.png."""
    # Remove leading zeros, but keep one digit for step 0.
    step = path.stem.removeprefix("step_").lstrip("0") or "0"
    title = f"Sample, step {step}"
    content = path.read_bytes()
    if path.suffix == ".png":
        encoded = base64.b64encode(content).decode()
        return Sample(title, image=f"data:image/png;base64,{encoded}")
    return Sample(title, text=printable(content.decode(errors="replace")))


def section(run_dir: Path, name: str) -> JsonObject:
    """Return the page's content for a stage, even if its file is missing or damaged."""
    # The help of a stage is "SUMMARY: DETAILS.", and the page shows only the summary. RECOMMENDED
    # is not a stage and has no help, but its file has the form of a stage's results.
    about, _, _ = STAGES.get(name, "").partition(":")
    page = {"about": about, "command": command_for(name, run_dir)}
    try:
        content = read_stage(run_dir, name)
        if content is None:
            return page | {"status": "not_run"}
        # Draw here rather than in the template, so that an error affects only this section.
        pictures = pictures_of(name, content["figures"])
        rates = rates_of(name, content)
    except UserError as error:
        # Remove the command at the end of the message, since the page itself shows this command.
        problem, _, _ = str(error).partition(": measure again")
        return page | {"status": "damaged", "problem": problem}
    except Exception as error:
        # The file is complete, but its values may be invalid.
        problem = f"its results are damaged or from an older version of this project ({error!r})"
        return page | {"status": "damaged", "problem": problem}
    return page | content | {"rates": rates, "pictures": pictures}


def rates_of(name: str, content: JsonObject) -> list[plots.Bar]:
    """Return the throughputs that the stage baseline or compile measured; [] for other stages."""
    figures = content["figures"]
    batch = content["settings"]["train"]["global_batch_size"]
    rates: list[plots.Bar] = []
    if name == "baseline":
        rates.append(rate("not compiled (baseline)", batch, figures["step_seconds"]))
    if name == "compile":
        for mode, measured in figures["modes"].items():
            compiled = f"compiled, {COMPILED[mode]}"
            rates.append(rate(compiled, batch, measured["step_seconds"]))
            rates.append(rate("the same, not compiled", batch, measured["eager_step_seconds"]))
    return rates


def rate(label: str, batch: int, seconds: JsonObject) -> plots.Bar:
    """Return a bar of samples/s, from the batch size and a spread of seconds per step."""
    # Long steps have a low rate, so the 90th percentile of the seconds gives the low end.
    return plots.Bar(
        label,
        value=batch / seconds["median"],
        low=batch / seconds["p90"],
        high=batch / seconds["p10"],
    )


def pictures_of(name: str, figures: JsonObject) -> list[plots.Picture]:
    """Draw the plots of a stage."""
    if name == "profile":
        return [operators_picture(figures)]
    if name == "scale":
        return scale_pictures(figures)
    # The checkpoint stage has nothing to draw if one of its processes failed early.
    if name == "checkpoint" and "interval_seconds" in figures:
        return [recovery_picture(figures)]
    return []


def operators_picture(figures: JsonObject) -> plots.Picture:
    """Draw the operators with the most self time."""
    rows: list[plots.Bar] = []
    for operator in figures.get("operators", [])[:OPERATORS_DRAWN]:
        label = operator["name"]
        if len(label) > 28:
            # Keep both ends of a long name, since the name of a backward may differ only at its
            # end.
            label = f"{label[:17]}…{label[-10:]}"
        rows.append(plots.Bar(label, 100 * operator["share"]))
    unit = "% of a step, self time"
    return plots.picture("Operators by self time", plots.bars, rows, unit, plots.three_digits)


def scale_pictures(figures: JsonObject) -> list[plots.Picture]:
    """Draw throughput and memory by the number of processes."""
    records = figures.get("ranks", {})
    throughput = plots.picture("Throughput by processes", plots.scaling, records)
    rows: list[plots.Bar] = []
    for count, record in records.items():
        megabytes = record["memory"]["measured"] / 1e6
        # This continues the title "Memory of a rank", which is above all bars.
        rows.append(plots.Bar(f"of {count}", megabytes))
    memory = plots.picture("Memory of a rank", plots.bars, rows, "MB", plots.four_digits)
    return [throughput, memory]


def recovery_picture(figures: JsonObject) -> plots.Picture:
    """Draw the times of saves and restarts."""
    restart = figures["restart_seconds"]
    rows = [
        plots.Bar("blocked by a save", figures["blocked_seconds"]["median"]),
        plots.Bar("save, until published", figures["save_seconds"]["median"]),
    ]
    # Results of earlier releases do not have this figure.
    if "cost_seconds" in figures:
        rows.insert(1, plots.Bar("training time per save", figures["cost_seconds"]["median"]))
    for phase, description in RESTART.items():
        rows.append(plots.Bar(f"restart: {description}", restart[phase]))
    rows.append(plots.Bar("verify and load", figures["restore_seconds"]))
    rows.append(plots.Bar("from a kill to the next step", restart["total"]))
    title = "Time of saves and restarts"
    return plots.picture(title, plots.bars, rows, "seconds", plots.in_time)


def overview(sections: dict[str, JsonObject], records: list[JsonObject]) -> list[plots.Picture]:
    """Draw the plots at the top of the page: metrics, throughput and memory of the run."""
    names = ["loss", *user_metrics(records)[:METRICS_DRAWN]]
    pictures = [metric_picture(name, records) for name in names]
    rates: list[plots.Bar] = []
    for each in sections.values():
        rates += each.get("rates", [])
    rates += run_rate(records)
    unit = "samples/s (median, p10 to p90)"
    pictures.append(
        plots.picture("Throughput by stage", plots.bars, rates, unit, plots.whole_number)
    )
    pictures.append(plots.picture("Memory of the run", plots.memory, records))
    return pictures


def metric_picture(name: str, records: list[JsonObject]) -> plots.Picture:
    """Draw a metric by step, with one curve for training and one for validation."""
    words = name.replace("_", " ")
    title = words[:1].upper() + words[1:]
    names = {name: "training", f"validation_{name}": "validation"}
    return plots.picture(title, plots.curves, records, name, names)


def run_rate(records: list[JsonObject]) -> list[plots.Bar]:
    """Return a bar with the throughput of the training run, in a list; [] if no record has it."""
    rates: list[float] = []
    for record in records:
        # Skip records without a rate, or with a rate of 0.
        if record.get("samples_per_second"):
            rates.append(record["samples_per_second"])
    if not rates:
        return []
    run = spread(rates)
    return [plots.Bar("training run", run["median"], low=run["p10"], high=run["p90"])]


def read_metrics(path: Path, notes: list[str]) -> list[JsonObject]:
    """Read the records in metrics.jsonl, sorted by step; a long file is reduced.

    The file is divided into `POINTS` slices. From each slice, the last record with a validation and
    the last record without one are kept. Damaged lines and losses that are not finite are noted in
    `notes`.
    """
    if not path.is_file():
        return []
    # A key is whether the record has a validation, and the slice in which the record's line ends.
    kept: dict[tuple[bool, int], JsonObject] = {}
    damaged = 0
    # The steps at which the loss is not finite.
    without_loss: list[int] = []
    with open(path, "rb") as lines:
        size = os.fstat(lines.fileno()).st_size
        for line in lines:
            record = parsed(line)
            if record:
                # Keep only finite numbers. The file has null instead of NaN and infinity.
                values = {metric: value for metric, value in record.items() if finite(value)}
                if "loss" in record and "loss" not in values:
                    without_loss.append(record["step"])
                validated = "validation_loss" in values
                # A later record with the same key replaces the earlier one.
                slice_index = POINTS * lines.tell() // size
                kept[validated, slice_index] = values
            elif line.endswith(b"\n"):
                # A last line without a newline is not counted: the run may still be writing it.
                damaged += 1
    if damaged:
        notes.append(f"{path.name}: {named(damaged, 'damaged line')} left out")
    if without_loss:
        count = named(len(without_loss), "log line")
        notes.append(f"the loss is not finite in {count}, first at step {min(without_loss)}")
    return sorted(kept.values(), key=lambda record: record["step"])
