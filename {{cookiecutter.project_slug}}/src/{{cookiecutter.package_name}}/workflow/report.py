"""report.html: what a run and the stages of the workflow have found, on one page."""

import base64
import json
import os
from collections.abc import Iterator
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
from .gates import PACKAGE, command, read_stage

Figures = dict[str, Any]


def publish_report(run_dir: Path) -> Path:
    """Write the report, and hand it to the tracker of a run that has trained."""
    path, settings = write_report(run_dir), run_dir / "config.json"
    if settings.exists():
        log_report(run_dir, load(settings), path)
    return path


def write_report(run_dir: Path) -> Path:
    """Write RUN_DIR/report.html from what is there; UserError when nothing is, or it is damaged."""
    stages = {name: read_stage(run_dir, name) for name in STAGES}
    records = read_metrics(run_dir / "metrics.jsonl")
    if not records and not any(stages.values()):
        raise UserError(
            f"there is nothing to report in {run_dir}: run `{command('workflow', run_dir)}` or "
            f"`{command('train', run_dir)}` first"
        )
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"picture": picture, "moment": moment, "prose": prose}
    try:
        page = environment.get_template("report.html").render(
            name=run_dir.name,
            package=PACKAGE,
            sections=[section(run_dir, name, content) for name, content in stages.items()],
            tiles=list(tiles(stages, records)),
            plots=list(overview(stages, records)),
            run=status_of(run_dir),
            origin=origin(stages),
            settings=settings_of(run_dir, stages),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"figures in {run_dir / 'workflow'} are damaged or of an older version of this project "
            f"({error!r}): measure again with `{command('workflow', run_dir)} --workflow.again`"
        ) from error
    path = run_dir / "report.html"
    temporary = path.with_name(".report.html")
    try:
        temporary.write_text(page, "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from None
    return path


def section(run_dir: Path, name: str, content: Figures | None) -> Figures:
    """What the page shows of a stage."""
    title = {"name": name, "about": STAGES[name].split(":")[0], "command": command(name, run_dir)}
    if content is None:
        return {**title, "status": "not_run", "checks": [], "advice": [], "plots": []}
    kept = ("status", "checks", "advice", "seconds", "measured_at")
    pictures = {"compile": of_compile, "profile": of_profile, "scale": of_scale}
    pictures["checkpoint"] = of_checkpoint
    shown = pictures.get(name, lambda figures: ())(content["figures"])
    return {
        **title,
        **{key: content[key] for key in kept},
        "plots": [(title, svg) for title, svg in shown if svg],
    }


def overview(stages: dict[str, Figures | None], records: list[Figures]) -> Iterator[tuple]:
    """The first plots: (title, SVG)."""
    baseline = figures_of(stages, "baseline")
    if svg := plots.loss_curve(records, baseline.get("losses", [])):
        yield ("Loss" if records else "Loss in the baseline's steps"), svg
    if svg := plots.throughput(list(throughputs(stages, records))):
        yield "Throughput by stage", svg


def throughputs(
    stages: dict[str, Figures | None], records: list[Figures]
) -> Iterator[tuple[str, float, float, float]]:
    """(what, samples/s, 10th percentile, 90th percentile)."""

    def row(stage: str, label: str, seconds: dict[str, float]) -> tuple[str, float, float, float]:
        batch = stages[stage]["settings"]["train"]["global_batch_size"]
        return label, *(batch / seconds[key] for key in ("median", "p90", "p10"))

    if seconds := figures_of(stages, "baseline").get("step_seconds"):
        yield row("baseline", "baseline, eager", seconds)
    for mode, found in figures_of(stages, "compile").get("modes", {}).items():
        if found.get("step_seconds"):
            yield row("compile", f"compiled, {mode}", found["step_seconds"])
    scale = figures_of(stages, "scale")
    each = " of 1 thread" if scale.get("threads") == 1 else ""  # the others had more
    for ranks, found in scale.get("strong", {}).items():
        processes = "process" if ranks == "1" else "processes"
        yield row("scale", f"scale, {ranks} {processes}{each}", found["step_seconds"])
    rates = [r["samples_per_second"] for r in records if r.get("samples_per_second")]
    if rates:
        p10, median, p90 = (float(x) for x in np.percentile(rates, [10, 50, 90]))
        yield "training run", median, p10, p90


def tiles(stages: dict[str, Figures | None], records: list[Figures]) -> Iterator[tuple[str, str]]:
    """The figures to see first: (what, value)."""
    baseline, compiled = figures_of(stages, "baseline"), figures_of(stages, "compile")
    scale, checkpoint = figures_of(stages, "scale"), figures_of(stages, "checkpoint")
    if validated := [r for r in records if r.get("validation_loss") is not None]:
        yield (
            f"validation loss, step {validated[-1]['step']}",
            f"{validated[-1]['validation_loss']:.4f}",
        )
    if baseline:
        yield "samples/s, eager", f"{baseline['samples_per_second']:,.0f}"
        if baseline.get("tokens_per_second"):
            yield "tokens/s, eager", f"{baseline['tokens_per_second']:,.0f}"
        if baseline.get("mfu"):
            yield "MFU, eager", f"{baseline['mfu']:.1%}"
    if found := compiled.get("modes", {}).get(compiled.get("best")):
        yield f"speedup, compiled {compiled['best']}", f"{found['speedup']['value']:.2f}x"
    if diagnosis := figures_of(stages, "profile").get("diagnosis"):
        yield "a step is", diagnosis
    judged = {it["name"]: it["status"] for it in (stages["scale"] or {}).get("checks", ())}
    for ranks, value in list(scale.get("strong_efficiency", {}).items())[-1:]:
        if judged.get("strong_efficiency") != "not_measured":
            yield f"strong efficiency, {ranks} ranks", f"{value:.0%}"
    if checkpoint:
        yield (
            "training held up by a save",
            plots.in_time(checkpoint["blocked_seconds"]["median"]),
        )
        yield "from kill to the next step", plots.in_time(checkpoint["restart_seconds"]["total"])
        yield "save every", plots.in_time(checkpoint["interval_seconds"])


def of_compile(figures: Figures) -> Iterator[tuple[str, str | None]]:
    """Seconds of compiling, cold and from the carried cache."""
    rows = [
        (f"{mode}, {how}", seconds)
        for mode, found in figures.get("modes", {}).items()
        for how, seconds in found.get("compile_seconds", {}).items()
    ]
    yield "Compiling, cold and with the cache that the run carries", plots.bars(rows, "seconds")


def of_profile(figures: Figures) -> Iterator[tuple[str, str | None]]:
    """Where a step's time goes, and in which operators."""
    yield "Where a step's time goes", plots.step_shares(figures.get("shares", {}))
    operators = figures.get("operators", [])[:8]
    rows = [(_in_short(op["name"]), 100 * op["share"]) for op in operators]
    yield "Operators by self time", plots.bars(rows, "% of a step, self time")


def _in_short(name: str) -> str:
    """Both ends of a long name: operators and their backward differ in the last letters."""
    return name if len(name) <= 28 else f"{name[:17]}…{name[-10:]}"


def of_scale(figures: Figures) -> Iterator[tuple[str, str | None]]:
    """Throughput and memory by the number of processes."""
    yield (
        "Throughput by processes",
        plots.scaling(figures.get("strong", {}), figures.get("weak", {})),
    )
    yield "Memory of a rank", plots.memory(figures.get("memory", {}))


def of_checkpoint(figures: Figures) -> Iterator[tuple[str, str | None]]:
    """What saving and failing cost, and what follows for the interval."""
    if not figures:
        return
    restart = figures["restart_seconds"]
    rows = [
        ("held up by a save", figures["blocked_seconds"]["median"]),
        ("save, until published", figures["save_seconds"]["median"]),
        ("restart: launch", restart["launch"]),
        ("restart: restore", restart["restore"]),
        ("restart: first step", restart["first_step"]),
    ]
    yield "What saving and restarting cost", plots.bars(rows, "seconds")
    failures = 3600 * figures["hours_between_failures"]
    yield (
        f"Time lost, at a failure every {figures['hours_between_failures']:g} h",
        plots.lost_time(
            figures["blocked_seconds"]["median"],
            restart["total"],
            failures,
            figures["interval_seconds"],
            figures["save_seconds"]["median"],
        ),
    )


def figures_of(stages: dict[str, Figures | None], name: str) -> Figures:
    """The figures of a stage, none if it was not run."""
    return (stages[name] or {}).get("figures", {})


def origin(stages: dict[str, Figures | None]) -> list[tuple[str, str]]:
    """On what the newest stage was measured: (what, value)."""
    found = [content for content in stages.values() if content]
    if not found:
        return []
    newest = max(found, key=lambda content: content["measured_at"])
    machine, versions = newest["machine"], newest["versions"]
    rows = [(name.replace("_gib", " (GiB)"), str(value)) for name, value in machine.items()]
    rows += [(name, str(value)) for name, value in versions.items()]
    peak = figures_of(stages, "baseline").get("peak_memory_bytes")
    return rows + ([("peak memory, baseline", in_units(peak))] if peak else [])


def settings_of(run_dir: Path, stages: dict[str, Figures | None]) -> list[tuple[str, str]]:
    """The settings, one by one: those of the run, else of the last stage."""
    path = run_dir / "config.json"
    found = [content["settings"] for content in stages.values() if content]
    try:
        chosen = json.loads(path.read_text("utf-8")) if path.exists() else found[-1]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): train again to have it anew") from None
    return [(name, json.dumps(value)) for name, value in flatten(chosen)]


def flatten(tree: Figures, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def status_of(run_dir: Path) -> Figures | None:
    """status.json, None if the run has not trained."""
    path = run_dir / "status.json"
    try:
        return json.loads(path.read_text("utf-8")) if path.exists() else None
    except (OSError, ValueError):
        return None


def read_metrics(path: Path) -> list[Figures]:
    """The lines of metrics.jsonl, but for a last one that is not whole."""
    if not path.exists():
        return []
    records = []
    lines = path.read_text("utf-8").split("\n")
    for number, line in enumerate(filter(None, lines), 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            if number < len(lines) - 1:
                raise UserError(f"{path}, line {number} is damaged ({error})") from None
    return records


def picture(svg: str) -> str:
    """An SVG as an address that holds all of it."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def moment(text: str) -> str:
    """A time of JSON as people write it."""
    return text.replace("T", " ").replace("Z", " UTC")


def prose(text: str) -> Markup:
    """Plain text with what stands between backticks as code."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts)
    )
