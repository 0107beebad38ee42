"""Writes the pages of benchmarks and of scaling from results; no figure is typed by hand."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

from . import shards
from .common import RESULTS, ROOT, TASKS
from .goodput import GROUP, NETWORK
from .limits import limits
from .sharded_start import WAYS

TEXT = Path(__file__).parent / "page.md"
PAGE = ROOT / "docs" / "evidence" / "benchmarks.md"
SCALING_TEXT = TEXT.with_name("scaling.md")
SCALING_PAGE = ROOT / "docs" / "explanation" / "scaling.md"
Series = dict[str, dict[str, Any]]


def verdict(name: str, value: float, goal: float, unit: str, at_most: bool = True) -> str:
    """A goal, what was measured, and whether that is good enough."""
    met = value <= goal if at_most else value >= goal
    word = "at most" if at_most else "at least"
    end = "" if met else f": **missed by {_number(abs(value - goal))} {unit}**"
    return f"- {name}: {_number(value)} {unit} ({word} {_number(goal)} wanted){end}."


def loop(found: Series) -> list[str]:
    """The loop."""
    more = {name: entry["median"] for name, entry in found.items() if name.endswith(", more")}
    mine = more.pop("ours, more")
    noise = more.pop("hand-written, again, more")
    lines = [
        verdict("A step of our loop, over the hand-written one", mine, 20, "us"),
        f"- The hand-written loop over itself: {_number(noise)} us.",
    ]
    for name, value in more.items():
        place = "behind us" if value > mine else "**ahead of us**"
        lines.append(f"- {name.removesuffix(', more')}: {_number(value)} us more a step, {place}.")
    return lines


def save(found: Series) -> list[str]:
    """Saving."""
    lines = []
    for ranks in ("1 rank", "2 ranks"):
        seconds = {
            name.removeprefix(f"{ranks}: ").removesuffix(", blocked"): entry["median"]
            for name, entry in found.items()
            if name.startswith(ranks) and name.endswith(", blocked") and "first" not in name
        }
        mine = seconds.pop("dcp_async")
        lines.append(
            verdict(
                f"Blocked by an asynchronous save, of a synchronous one's time ({ranks})",
                100 * mine / seconds["dcp"],
                5,
                "%",
            )
        )
        shares = ", ".join(
            f"{100 * mine / s:.2g} % of {name}" for name, s in seconds.items() if name != "dcp"
        )
        lost, slow, still = (
            found[f"{ranks}: dcp_async, {kind}"]["median"]
            for kind in ("lost", "slowdown", "slowdown without a save")
        )
        lines.append(f"- {ranks}: that is also {shares}.")
        lines.append(
            f"- {ranks}: meanwhile a step takes {_number(slow)} times as long ({_number(still)} "
            "with no save, which is the noise); slower steps included, a save costs "
            f"{_number(lost)} s, {100 * lost / seconds['dcp']:.0f} % of dcp's."
        )
    return lines


def restore(found: Series) -> list[str]:
    """Verifying and restoring."""
    raw = found["1 rank: sha256 alone, from memory"]["median"]
    lines = [
        verdict(
            f"Verifying a checkpoint with {label}, each",
            found[f"{label}: dcp, verify"]["median"] / ranks,
            1,
            "GB/s",
            at_most=False,
        )
        for ranks, label in ((1, "1 rank"), (2, "2 ranks"))
    ]
    for label, who in (("1 rank", "One rank"), ("2 ranks", "Each of two ranks")):
        load, whole = (found[f"{label}: dcp, {what}"]["median"] for what in ("load", "restore"))
        lines.append(
            f"- {who} then loads at {_number(load)} GB/s: `dcp.load`. The whole restore, with the "
            f"optimizer's state allocated in between: {_number(whole)} GB/s."
        )
    one_file = found["1 rank: torch_save, load"]["median"]
    lines.append(f"- A single file is loaded, mapped, at {_number(one_file)} GB/s.")
    return [*lines, f"- sha256 itself, of memory, on one core here: {_number(raw)} GB/s."]


def sampler(found: Series) -> list[str]:
    """The order of samples."""
    start, again, far, last = (
        found[f"ours, 10^12 samples, to {where}: seek"]["median"]
        for where in ("sample 0", "sample 0 again", "the last million", "the last sample")
    )
    lines = [
        f"- Of 10^12 samples the last million was found in {_number(far)} us, sample 0 in "
        f"{_number(start)} us and, once more, in {_number(again)} us: the same time was wanted. "
        f"The very last, where the next epoch begins too, took {_number(last)} us."
    ]
    if memory := found.get("ours, 10^12 samples: memory"):
        peer = found["DistributedSampler, 10^7 samples: memory"]["median"]
        lines.append(
            f"- Memory at 10^12 samples: {_number(memory['median'])} MB; DistributedSampler at "
            f"10^7: {_number(peer)} MB."
        )
    return lines


def optimizer(found: Series) -> list[str]:
    """Muon beside AdamW."""
    name, lines = "Muon, 0.75 of the steps", []
    for what, kind, goal, unit in (
        ("bits per byte more than AdamW", "bits per byte over AdamW's", 0, "bits"),
        ("seconds, of AdamW's", "training, of AdamW's", 1, "x"),
    ):
        worst = max(found[f"{name}: {kind}"]["values"])
        lines.append(
            verdict(f"Muon in 75 % of AdamW's steps, worst seed: {what}", worst, goal, unit)
        )
    return lines


def startup(found: Series) -> list[str]:
    """Beginning."""
    return [
        verdict("Rendering a project", found["render"]["median"], 0.5, "s"),
        verdict(
            "From the start of a default project to its first step",
            found["first step"]["median"],
            5,
            "s",
        ),
    ]


def sharded_start(found: Series) -> list[str]:
    """Host memory at the start."""
    ours, whole, files, first = (found[f"4 ranks, {way}: together"]["median"] for way in WAYS)
    seconds, longer = (found[f"4 ranks, {way}: seconds"]["median"] for way in WAYS[2:])
    return [
        f"- The host memory that 4 ranks of FSDP start with: {_number(ours)} MB together, where "
        f"{_number(whole)} MB are needed if each builds the whole model of 1,208 MB.",
        f"- The same from a .safetensors file (--init-from): {_number(files)} MB in "
        f"{_number(seconds)} s; {_number(first)} MB in {_number(longer)} s if the values are built "
        "before they are read.",
    ]


def restart(found: Series) -> list[str]:
    """Back at work."""
    killed, plain, imported, needed = (
        found[name]["median"]
        for name in (
            *("a rank is killed", "a plain start resumes"),
            *("import of torch", "import of torch, dynamo and DCP"),
        )
    )
    return [
        verdict("From `kill -9` of a rank to the next step", killed, 2 * imported, "s"),
        verdict("A plain start, beyond importing torch", plain - imported, 1.3, "s"),
        "- What torch itself imports for an optimizer and for DCP, in its own process: "
        f"{_number(needed - imported)} s.",
    ]


def workflow(found: Series) -> list[str]:
    """The stages of the workflow."""
    lines = []
    measured = [task for task in TASKS if any(name.startswith(task) for name in found)]
    for task in measured:
        of_task = {n.removeprefix(f"{task}, "): s for n, s in found.items() if n.startswith(task)}
        total = of_task["all stages: duration"]["median"]
        lines.append(verdict(f"All five stages of `workflow`, {task}", total / 60, 5, "min"))
        for mode in ("blocks", "full"):
            ratio = of_task[f"compiled, {mode}: eager time / compiled time"]
            low, high = min(ratio["values"]), max(ratio["values"])
            cold, warm = (
                of_task[f"compiled, {mode}: compiling, {how}"]["median"] for how in ("cold", "warm")
            )
            lines.append(
                f"- {task}, compiled ({mode}): {_number(ratio['median'])} times as fast as eager, "
                f"in the rounds {_number(low)} to {_number(high)}; {_number(cold)} s to compile "
                f"with nothing cached, {_number(warm)} s at a restart with the compile cache."
            )
    return lines


def busy(found: Series) -> list[str]:
    """Beside other work."""
    rate = {name: entry["median"] for name, entry in found.items()}
    alone, beside = (rate[f"as rendered, {where}"] for where in ("alone", "beside others"))
    slower = rate["slower by the bound, alone"]
    change = f"{_number(abs(slower))} % {'slower' if slower > 0 else 'faster'}"
    end = "" if slower <= 3 else f": **missed by {_number(slower - 3)} %**"
    return [
        f"- Bounded spinning, idle machine: {change} (at most 3 % slower wanted){end}.",
        verdict(
            "Bounded spinning, a busy process on each core: of the time on an idle machine",
            alone / beside,
            3,
            "times",
        ),
    ]


def loss(found: Series) -> list[str]:
    """The output layer and its loss."""
    value = {name: entry["median"] for name, entry in found.items()}
    share = value["as rendered, memory"] / value["at once, memory"]
    lines = [verdict("Memory of the loss, of that with all logits at once", 100 * share, 20, "%")]
    if rival := value.get("linear_cross_entropy"):
        size, times = value["linear_cross_entropy, memory"], rival / value["as rendered"]
        lines.append(
            f"- torch's `linear_cross_entropy`: {_number(size)} GiB, in {_number(times)} times our "
            "seconds."
        )
    return lines


def roofline(found: Series) -> list[str]:
    """What bounds a step."""
    eager, compiled = (
        found[f"H200: {way} step, MFU at most"]["median"] for way in ("an eager", "a compiled")
    )
    on_h100 = found["H100: a compiled step, MFU at most"]["median"]
    return [
        f"- By this count our step reaches {_number(eager)} % MFU on an H200, and compiled "
        f"{_number(compiled)} %.",
        f"- A compiled step on an H100 reaches at most {_number(on_h100)} % MFU: a bound, not a "
        "measurement.",
    ]


def fit(found: Series) -> list[str]:
    """Whether a model fits, before there is a GPU."""
    seconds = found["seconds"]["median"]
    return [verdict("`fit` for 64 billion parameters on 64 ranks, on one core", seconds, 60, "s")]


TOPICS = (loop, save, restore, sampler, optimizer, startup, sharded_start, restart, busy, fit)
TOPICS += (loss, roofline, workflow)


def page(results: Path) -> str:
    """The whole page: the text beside this program, with verdicts and tables filled in."""
    text = Template(TEXT.read_text("utf-8"))
    sections = {judge.__name__: section(results, judge) for judge in TOPICS}
    lines = "\n".join(sections.values()).splitlines()
    short = "\n".join(line for line in lines if line.startswith("- ") and " wanted)" in line)
    return text.substitute(sections, gpu=gpu(results), short=short)


def section(results: Path, judge: Callable[[Series], list[str]]) -> str:
    """One topic: the verdicts, the table, and on what it was measured."""
    path = results / f"{judge.__name__}.json"
    if not path.exists():
        return "Not measured yet."
    result = json.loads(path.read_text("utf-8"))
    machine, settings = result["machine"], result["settings"]
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    chosen = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
    rows = [
        f"| {name} | {_number(s['median'])} | {_number(s['p10'])} … {_number(s['p90'])} "
        f"| {_number(s['low'])} … {_number(s['high'])} | {s['n']} | {s['unit']} |"
        for name, s in result["series"].items()
    ]
    return "\n".join(
        [
            *judge(result["series"]),
            "",
            "| what | median | p10 … p90 | 95 % of the median | n | |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"`{result['command']}`, {result['seconds']} s ({chosen}). {machine['cpu']}, "
            f"{machine['cores']} cores, {machine['memory_gb']} GiB, {machine['system']}, "
            f"{machine['file_system']}, load {machine['load_before']}. {packages}.",
        ]
    )


def gpu(results: Path) -> str:
    """What was measured on a GPU, if it was: one table of all pieces."""
    path = results / "gpu.json"
    result = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if not result or result["origin"]["smoke"]:
        return "Not measured yet."
    origin, lines = (
        result["origin"],
        ["| what | median | p10 … p90 | n | |", "|---|---|---|---|---|"],
    )
    for name, piece in result["pieces"].items():
        for what, s in piece["series"].items():
            middle, low, high = (_number(s[key]) for key in ("median", "p10", "p90"))
            lines.append(f"| {name}: {what} | {middle} | {low} … {high} | {s['n']} | {s['unit']} |")
    packages = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    on = f"{origin['device']}, driver {origin['driver']}, CUDA {origin['cuda']}"
    return "\n".join([*lines, "", f"`{result['command']}`. {on}. {packages}."])


def scaling(results: Path) -> str:
    """The page about many GPUs, with what was simulated filled in."""
    result = json.loads((results / "goodput.json").read_text("utf-8"))
    settings, ways = result["settings"], result["ways"]
    lines = [
        "| GPUs | hours between failures | synchronous: best, formula | goodput "
        "| asynchronous: best, formula | goodput |",
        "|---|---|---|---|---|---|",
    ]
    for pair in zip(ways["synchronous"], ways["asynchronous"], strict=True):
        cells = [f"{pair[0]['gpus']:,}", _number(pair[0]["hours_between_failures"])]
        for row in pair:
            seconds = (row["best_interval_seconds"], row["formula_interval_seconds"])
            cells += [", ".join(f"{s:,.0f} s" for s in seconds), f"{row['best_goodput']:.2%}"]
        lines.append(f"| {' | '.join(cells)} |")
    restarts = []
    for job in result["restarts"]:
        seconds, share = [*job["parts"].values()], f"{job['goodput']:.2%}"
        cells = [_number(value) for value in (*seconds, sum(seconds))]
        restarts.append(f"| {' | '.join([job['job'], format(job['gpus'], ','), *cells, share])} |")
    rows = [row for way in ways.values() for row in way]
    regret = max(row["best_goodput"] - row["formula_goodput"] for row in rows)
    errors = max(
        abs(row["formula_goodput"] - row["formula_goodput_expected"]) / row["formula_goodput_error"]
        for row in rows
    )
    bursts = result["bursts"]
    even = next(row for row in ways["asynchronous"] if row["gpus"] == bursts["gpus"])
    return Template(SCALING_TEXT.read_text("utf-8")).substitute(
        goodput="\n".join(lines),
        restarts="\n".join(restarts),
        group=GROUP,
        network=f"{NETWORK / 1e9:.0f}",
        command=result["command"],
        failures=f"{settings['failures']:,}",
        save=_number(settings["save"]),
        blocked=_number(settings["blocked"]),
        restart=_number(settings["restart"]),
        regret=f"{regret:.2%}",
        errors=f"{errors:.1f}",
        shape=bursts["shape"],
        even=f"{even['best_goodput']:.2%}",
        bursts=f"{bursts['best_goodput']:.2%}",
        **shards.table(results),
        **limits(results),
    )


def _number(value: float) -> str:
    """Three digits, no exponents."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):.6f}".rstrip("0").rstrip(".")


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser("python -m benchmarks.page", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--scaling", type=Path, default=SCALING_PAGE)
    given = parser.parse_args()
    given.page.write_text(page(given.results), "utf-8")
    given.scaling.write_text(scaling(given.results), "utf-8")


if __name__ == "__main__":
    main()
