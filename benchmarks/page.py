"""Writes the pages of benchmarks and of scaling: their texts, filled with measured results.

Results that are typed by hand: LATER, and a few rounded ones in scaling.md.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import Template

from . import shards
from .common import RESULTS, ROOT, TASKS
from .goodput import GROUP, LLAMA_GPUS, NETWORK, STATE, Costs, expected
from .limits import CPU, SHOWN, figure, limits, load
from .planning import extrapolated
from .sharded_start import WAYS
from .tables import Series, number, tables

TEXT = Path(__file__).parent / "page.md"
PAGE = ROOT / "docs" / "evidence" / "benchmarks.md"
SCALING_TEXT = TEXT.with_name("scaling.md")
SCALING_PAGE = ROOT / "docs" / "explanation" / "scaling.md"
QUIET = 0.2  # processes before a measurement; with more, it may have been disturbed
PLAIN = "plain torch.save"
# The ways to save that `dcp_async` is compared with, by their names in the results.
OTHERS = {
    PLAIN: "plain `torch.save`",
    "Accelerate": "Accelerate",
    "Lightning Fabric": "Lightning Fabric",
    "dcp": "`dcp`",
    "torch_save": "`torch_save`",
}
RANKS = ("1 rank", "2 ranks")
SAMPLERS = ("ours", "DistributedSampler")
# Percent of nanoGPT's tokens/s that a later version reached, compiled and eager. Typed by hand,
# from docs/evidence/gpus.md.
LATER = (94, 71)
# The section of each topic that has goals.
SECTIONS = {
    "loop": "the-loop",
    "save": "saving",
    "restore": "verifying-and-restoring",
    "optimizer": "the-optimizer",
    "startup": "start-up",
    "restart": "a-killed-rank",
    "busy": "on-a-busy-machine",
    "loss": "the-loss",
    "fit": "duration-of-fit",
    "workflow": "the-workflow",
}
# The size of a job for which the text says what slower steps cost.
SLOWED_GPUS = 4096
# The parts of a restart that are extrapolated, from fewer ranks or from a part of the model.
EXTRAPOLATED = ("met", "index")


@dataclass
class Goal:
    """A row of the table of goals."""

    what: str
    wanted: str
    measured: str
    met: str

    def row(self, section: str) -> str:
        """The row in Markdown, with a link to its section."""
        return f"| [{self.what}](#{section}) | {self.wanted} | {self.measured} | {self.met} |"


def goal(
    what: str, value: float, limit: float, unit: str, at_most: bool = True, why: str = ""
) -> Goal:
    """Compare what was measured with its goal; `why` explains the goal."""
    met = value <= limit if at_most else value >= limit
    word = "at most" if at_most else "at least"
    points = "percentage points" if unit == "%" else unit
    missed = f"**no**, by {number(abs(value - limit))} {points}"
    return Goal(
        what=what,
        wanted=f"{word} {number(limit)} {unit}{why}",
        measured=f"{number(value)} {unit}",
        met="yes" if met else missed,
    )


def loop(found: Series) -> list[str | Goal]:
    """The loop."""
    more = {name: entry["median"] for name, entry in found.items() if name.endswith(", more")}
    mine = more.pop("ours, more")
    noise = more.pop("hand-written, again, more")
    lines: list[str | Goal] = [
        goal("Additional time of a step of our loop, beyond a hand-written one", mine, 20, "µs"),
        f"The hand-written loop, measured against itself, differs by {number(noise)} µs, which is "
        "noise.",
    ]
    for name, value in more.items():
        if value <= mine:
            lines.append(f"**{name.removesuffix(', more')} is faster than ours.**")
    return lines


def save(found: Series) -> list[str | Goal]:
    """Saving."""
    lines: list[str | Goal] = []
    for ranks in RANKS:
        blocked, lost, slow, still = (
            found[f"{ranks}: dcp_async, {kind}"]
            for kind in ("blocked", "lost", "slowdown", "slowdown without a save")
        )
        others = {name: found[f"{ranks}: {name}, blocked"] for name in OTHERS}
        synchronous = others["dcp"]["median"]
        what = (
            f"Time that a save with `dcp_async` blocks training, in percent of `dcp`'s ({ranks}, "
            "slower steps not counted)"
        )
        percent = f"{100 * lost['median'] / synchronous:.0f} %"
        costs = [f"{OTHERS[name]} {number(one['median'])} s" for name, one in others.items()]
        cheaper = {n: one for n, one in others.items() if one["median"] < lost["median"]}
        end = ""
        if cheaper:
            end = f" **Cheaper than `dcp_async`: {' and '.join(OTHERS[n] for n in cheaper)}.**"
        if any(one["high"] > lost["low"] for one in cheaper.values()):
            end += " But the intervals overlap."
        doubt = ", so possibly noise" if slow["low"] < 1 else ""
        lines += [
            goal(what, 100 * blocked["median"] / synchronous, 5, "%"),
            f"- With {ranks}, a step during the upload takes {number(slow['median'])} times as "
            f"long ({slow['low']:.2f} to {slow['high']:.2f}{doubt}). The same comparison without a "
            f"save gives {number(still['median'])}. A save with "
            f"`dcp_async` costs {lost['median']:.2f} s ({lost['low']:.2f} … {lost['high']:.2f}) of "
            f"training, {percent} of what `dcp` costs. The others cost the time for which they "
            f"block it: {', '.join(costs)}.{end}",
        ]
    ratios = [
        found[f"{ranks}: {name}, blocked"]["median"] / found[f"{ranks}: {PLAIN}, blocked"]["median"]
        for ranks in RANKS
        for name in ("dcp", "torch_save")
    ]
    lines.append(
        f"- Our synchronous saves block training for {min(ratios):.1f} to {max(ratios):.1f} times "
        "as long as plain `torch.save`: they also sync and hash."
    )
    return lines


def restore(found: Series) -> list[str | Goal]:
    """Verifying and restoring."""
    raw = found["1 rank: sha256 alone, from memory"]["median"]
    alone, both = (found[f"{ranks}: dcp, verify"]["median"] for ranks in ("1 rank", "2 ranks"))
    lines: list[str | Goal] = [
        goal(
            "Speed of one rank with two cores that verifies a checkpoint",
            alone,
            1,
            "GB/s",
            at_most=False,
        ),
        goal(
            "Speed of each of two ranks with one core that verify a checkpoint",
            both / 2,
            1,
            "GB/s",
            at_most=False,
        ),
    ]
    for label, who in (
        ("1 rank", "After the check, one rank loads a checkpoint"),
        ("2 ranks", "Each of two ranks loads all of it"),
    ):
        load, whole = (found[f"{label}: dcp, {what}"]["median"] for what in ("load", "restore"))
        lines.append(
            f"- {who} with `dcp.load` at {number(load)} GB/s. The whole restore, "
            f"including the allocation of the optimizer state, runs at {number(whole)} GB/s."
        )
    one_file = found["1 rank: torch_save, load"]["median"]
    return [
        *lines,
        f"- Each of two ranks verifies at {number(both / 2)} GB/s, half of the "
        f"{number(both)} GB/s of both.",
        f"- A single file (`torch_save`) is memory-mapped and loaded at {number(one_file)} GB/s.",
        f"- For comparison, sha256 alone hashes memory at {number(raw)} GB/s on one core.",
    ]


def sampler(found: Series) -> list[str | Goal]:
    """The order of samples."""
    start, again, far, last = (
        found[f"ours, 10^12 samples, to {where}: seek"]["median"]
        for where in ("sample 0", "sample 0 again", "the last million", "the last sample")
    )
    lines: list[str | Goal] = [
        f"- With 10^12 samples, a seek to the start of the last million takes {number(far)} µs, "
        f"and a seek to sample 0 takes {number(start)} µs ({number(again)} µs when repeated). "
        f"A seek to the very last sample takes {number(last)} µs, since it also starts the next "
        "epoch."
    ]
    if memory := found.get("ours, 10^12 samples: memory"):
        peer = found["DistributedSampler, 10^7 samples: memory"]["median"]
        lines.append(
            f"- With 10^12 samples, our sampler needs {number(memory['median'])} MB. With 10^7 "
            f"samples, torch's DistributedSampler needs {number(peer)} MB."
        )
    each, its = (found[f"{who}, 10^6 samples: an id"]["median"] for who in SAMPLERS)
    seek, its_seek = (found[f"{who}, 10^3 samples: seek"]["median"] for who in SAMPLERS)
    lines += [
        "- **DistributedSampler is faster per id**: with 10^6 samples, our sampler needs "
        f"{number(each)} ns per id, DistributedSampler {number(its)} ns. For a batch of 1,000 "
        f"samples, this is a difference of {number((each - its) / 1000)} ms.",
        f"- **DistributedSampler seeks faster in small data**: with 10^3 samples, our seek takes "
        f"{number(seek)} µs, its seek {number(its_seek)} µs.",
    ]
    return lines


def optimizer(found: Series) -> list[str | Goal]:
    """Muon compared with AdamW."""
    name, how = "Muon, 0.75 of the steps", "Muon with 75 % of AdamW's steps (worst of three seeds)"
    loss, time = (
        max(found[f"{name}: {kind}"]["values"])
        for kind in ("bits per byte over AdamW's", "training, of AdamW's")
    )
    return [
        goal(f"{how}: how far below AdamW's loss", -loss, 0, "bits per byte", at_most=False),
        goal(f"{how}: time, in percent of AdamW's", 100 * time, 100, "%"),
    ]


def startup(found: Series) -> list[str | Goal]:
    """Beginning."""
    first = found["first step"]["median"]
    return [
        goal("Time to render a project", found["render"]["median"], 0.5, "s"),
        goal("Time to the first step of a project with the default answers", first, 5, "s"),
    ]


def sharded_start(found: Series) -> list[str | Goal]:
    """Host memory at the start."""
    ours, whole, files, first = (found[f"4 ranks, {way}: together"]["median"] for way in WAYS)
    seconds, longer = (found[f"4 ranks, {way}: seconds"]["median"] for way in WAYS[2:])
    return [
        f"- With 4 ranks of FSDP, a start needs {number(ours)} MB of host memory in total. If each "
        f"rank built the whole model of 1,208 MB, it would need {number(whole)} MB.",
        f"- From a .safetensors file (`--init-from`), it needs {number(files)} MB and "
        f"{number(seconds)} s. If the values were built before they are read, it would need "
        f"{number(first)} MB and {number(longer)} s.",
    ]


def restart(found: Series) -> list[str | Goal]:
    """A killed rank."""
    killed, plain, imported, needed = (
        found[name]["median"]
        for name in (
            *("a rank is killed", "a plain start resumes"),
            *("import of torch", "import of torch, dynamo and DCP"),
        )
    )
    lines: list[str | Goal] = [
        goal(
            "Time from `kill -9` of a rank to the end of the next step",
            killed,
            2 * imported,
            "s",
            why=" (twice the import of torch)",
        ),
        goal(
            "Time of a start that resumes, without the import of torch", plain - imported, 1.3, "s"
        ),
        f"- *From a start to the next step* takes {number(plain - imported)} s without the import "
        f"of torch: {number(plain)} s less {number(imported)} s.",
        "- The modules that torch itself imports for an optimizer and for DCP take "
        f"{number(needed - imported)} s in a separate process.",
    ]
    if killed < needed:
        lines.append(
            f"- *From a kill to the next step* ({number(killed)} s) is shorter than the separately "
            f"timed imports ({number(needed)} s), although it contains them: a restart turns "
            "garbage collection off while it imports, which is faster. Other work also made all "
            "times vary."
        )
    return lines


def workflow(found: Series) -> list[str | Goal]:
    """The stages of the workflow."""
    lines: list[str | Goal] = []
    measured = [task for task in TASKS if any(name.startswith(task) for name in found)]
    for task in measured:
        of_task = {n.removeprefix(f"{task}, "): s for n, s in found.items() if n.startswith(task)}
        total = of_task["all stages: duration"]["median"]
        lines.append(goal(f"Time of all five stages, `task={task}`", total / 60, 5, "minutes"))
        for mode in ("blocks", "full"):
            ratio = of_task[f"compiled, {mode}: eager time / compiled time"]
            low, high = min(ratio["values"]), max(ratio["values"])
            cold, warm = (
                of_task[f"compiled, {mode}: compiling, {how}"]["median"] for how in ("cold", "warm")
            )
            lines.append(
                f"- `task={task}`, `--compile.mode {mode}`: {number(ratio['median'])} times as "
                f"fast as eager ({number(low)} to {number(high)} in the rounds). Compilation takes "
                f"{number(cold)} s with an empty cache, and {number(warm)} s with a warm one."
            )
    return lines


def sft(found: Series) -> list[str | Goal]:
    """The chat recipe beside SFTTrainer."""
    lines: list[str | Goal] = []
    for unit, what in (
        ("second of CPU time", "tokens per second of CPU time"),
        ("second", "tokens per second"),
    ):
        ours, theirs = (found[f"{who}: {what}"]["values"] for who in ("ours", "SFTTrainer"))
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        middle = statistics.median(ratios)
        end = "" if middle >= 1 else " **SFTTrainer is faster.**"
        end += overlap(ours, theirs)
        lines.append(
            f"- Per {unit}, our recipe trains on {number(middle)} times as many tokens as "
            f"SFTTrainer. This is the median of the ratios in the rounds, {number(ratios[0])} to "
            f"{number(ratios[-1])}.{end}"
        )
    for what, sentence in (
        ("host memory", "Our process needs {} MB of host memory, and SFTTrainer's {} MB."),
        ("a checkpoint", "Our checkpoint has {} MB, and SFTTrainer's {} MB."),
        (
            "from a start that resumes to its first step",
            "Our first step after a resume ends {} s after the start, and SFTTrainer's {} s.",
        ),
    ):
        ours, theirs = (found[f"{who}: {what}"] for who in ("ours", "SFTTrainer"))
        end = " **SFTTrainer needs less.**" if theirs["median"] < ours["median"] else ""
        end += overlap(ours["values"], theirs["values"])
        medians = (number(one["median"]) for one in (ours, theirs))
        lines.append(f"- {sentence.format(*medians)}{end}")
    for name, who in (("ours", "our recipe"), ("SFTTrainer", "SFTTrainer")):
        counts = found[f"{name}: files that differ after a resume"]["values"]
        lines.append(
            f"- {counts.count(0)} of {len(counts)} resumed runs of {who} are bit-for-bit identical "
            "to the undisturbed run, in the adapter and in the state of the optimizer."
        )
    return lines


def overlap(ours: list[float], theirs: list[float]) -> str:
    """A sentence for a difference that is smaller than the ranges of both."""
    apart = max(ours) < min(theirs) or max(theirs) < min(ours)
    return "" if apart else " The ranges overlap, so this difference may be noise."


def busy(found: Series) -> list[str | Goal]:
    """Beside other work."""
    rate = {name: entry["median"] for name, entry in found.items()}
    alone, beside = (rate[f"as rendered, {where}"] for where in ("alone", "beside others"))
    slower = found["slower by the bound, alone"]
    lines: list[str | Goal] = [
        goal(
            "Slowdown by our limit on OpenMP's spinning, without busy processes",
            slower["median"],
            3,
            "%",
        ),
        goal("Slowdown by a busy process on each core", alone / beside, 3, "times"),
    ]
    if slower["low"] < 3 < slower["high"]:
        faster = ""
        if slower["low"] < 0:
            faster = f"{number(-slower['low'])} % faster and "
        lines.append(
            "The goal without busy processes (at most 3 % slower) is inside the interval: with "
            f"the limit, training is between {faster}{number(slower['high'])} % slower."
        )
    return lines


def loss(found: Series) -> list[str | Goal]:
    """The output layer and its loss."""
    value = {name: entry["median"] for name, entry in found.items()}
    percent = 100 * value["as rendered, memory"] / value["at once, memory"]
    lines: list[str | Goal] = [
        goal("Memory of our loss, in percent of a loss with all logits at once", percent, 20, "%"),
    ]
    if rival := value.get("linear_cross_entropy"):
        size, times = value["linear_cross_entropy, memory"], rival / value["as rendered"]
        lines.append(
            f"- torch's `linear_cross_entropy` needs {number(size)} GiB, but takes "
            f"{number(times)} times as long as ours."
        )
    return lines


def fit(found: Series) -> list[str | Goal]:
    """Whether a model fits, before there is a GPU."""
    seconds = found["seconds"]["median"]
    return [
        goal("Time of `fit` for 64 billion parameters on 64 ranks, on one core", seconds, 60, "s")
    ]


TOPICS = (loop, save, restore, sampler, optimizer, startup, sharded_start, restart, busy, fit)
TOPICS += (loss, workflow, sft)


def page(results: Path) -> str:
    """The whole page: the text beside this program, with goals and results filled in."""
    text = Template(TEXT.read_text("utf-8"))
    sections = {judge.__name__: section(results, judge) for judge in TOPICS}
    paths = [results / f"{judge.__name__}.json" for judge in TOPICS]
    found = [json.loads(path.read_text("utf-8")) for path in paths if path.exists()]
    disturbed = sum(result["machine"]["load_before"] > QUIET for result in found)
    return text.substitute(
        sections,
        compared=compared(results),
        goals=goals(results),
        gpu=gpu(results),
        **roofline(results),
        state_mb=state_mb(results),
        quiet=QUIET,
        disturbed=disturbed,
        measured=len(found),
    )


def goals(results: Path) -> str:
    """The table of all goals, those first that are not met."""
    rows = ["| goal | wanted | measured | met |", "|---|---|---|---|"]
    found: list[tuple[str, Goal]] = []
    for judge in TOPICS:
        path = results / f"{judge.__name__}.json"
        if path.exists():
            series = json.loads(path.read_text("utf-8"))["series"]
            goals_of_topic = [line for line in judge(series) if isinstance(line, Goal)]
            found += [(SECTIONS[judge.__name__], one) for one in goals_of_topic]
    order = ("**no**", "yes")
    found.sort(key=lambda pair: order.index(pair[1].met.partition(",")[0]))
    rows += [one.row(section) for section, one in found]
    return "\n".join(rows)


def compared(results: Path) -> str:
    """How the template compares with others, with links to the sections."""
    paths = [results / f"{name}.json" for name in ("loop", "save", "gpu")]
    if not all(path.exists() for path in paths):
        return "Not measured yet."
    steps, saves, on_gpu = (json.loads(path.read_text("utf-8")) for path in paths)
    by_hand = steps["series"]["hand-written"]["median"]
    ours, fabric, accelerate, trainer = (
        steps["series"][f"{name}, more"]["median"]
        for name in ("ours", "Lightning Fabric", "Accelerate", "Lightning Trainer")
    )
    blocked, lost, plain = (
        " and ".join(number(1000 * saves["series"][f"{n}: {name}"]["median"]) for n in RANKS)
        for name in ("dcp_async, blocked", "dcp_async, lost", f"{PLAIN}, blocked")
    )
    rates = on_gpu["pieces"]["gpt2, round 1"]["series"]
    compiled, eager = (
        100
        * rates[f"ours, {mode}: tokens/s"]["median"]
        / rates[f"nanoGPT, {mode}: tokens/s"]["median"]
        for mode in ("full", "none")
    )
    lines = [
        f"- [The loop](#the-loop): our step takes {number(ours)} µs longer than a hand-written "
        f"one, which is {100 * ours / by_hand:.0f} % of its {number(by_hand)} µs. Lightning "
        f"Fabric's takes {number(fabric)} µs longer, Accelerate's {number(accelerate)} µs, and "
        f"Lightning Trainer's {number(trainer)} µs.",
        "- [Saving](#saving), with 1 and 2 ranks on two cores: an asynchronous save of "
        f"{state_mb(results)} MB blocks training for {blocked} ms. Counting slower steps during "
        "the *upload* (writing the files in the background, to disk or to a store), it costs "
        f"{lost} ms of training. Plain `torch.save`, which neither syncs nor "
        f"hashes, costs {plain} ms.",
        "- [GPT-2 on an H200](#on-a-gpu-with-an-earlier-version): compiled, an earlier version "
        f"reached {compiled:.0f} % of nanoGPT's tokens/s, and eager {eager:.0f} %. A "
        f"[later one](gpus.md#speed-of-a-training-step) reached {LATER[0]} % and {LATER[1]} %. The "
        "present version has not been measured on a GPU.",
    ]
    return "\n".join(lines)


def section(results: Path, judge: Callable[[Series], list[str | Goal]]) -> str:
    """One topic: conclusions without the goals, the table, and on what it was measured."""
    path = results / f"{judge.__name__}.json"
    if not path.exists():
        return "Not measured yet."
    result = json.loads(path.read_text("utf-8"))
    machine, settings = result["machine"], result["settings"]
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    chosen = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
    series = result["series"]
    lines = [line for line in judge(series) if isinstance(line, str)]
    if lines:
        lines.append("")
    return "\n".join(
        [
            *lines,
            *tables(judge.__name__, series),
            "",
            f"`{result['command']}`, {result['date']}, {result['seconds']} s ({chosen}). "
            f"{machine['cpu']}, "
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
    origin = result["origin"]
    series = {
        f"{name}: {what}": one
        for name, piece in result["pieces"].items()
        for what, one in piece["series"].items()
    }
    lines = [*gpu_in_short(series), *tables("gpu", series, "p10", "p90")]
    packages = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    on = f"{origin['device']}, driver {origin['driver']}, CUDA {origin['cuda']}"
    end = f"`{result['command']}`, {result['date']}. {on}. {packages}."
    return "\n".join([*lines, "", end])


def state_mb(results: Path) -> str:
    """The megabytes that a save writes."""
    settings = json.loads((results / "save.json").read_text("utf-8"))["settings"]
    return f"{settings['state_mb']:.0f}"


def roofline(results: Path) -> dict[str, str]:
    """The estimates of a step on an H200."""
    result = json.loads((results / "roofline.json").read_text("utf-8"))
    found: dict[str, str] = {"roofline_date": result["date"]}
    for way in ("eager", "compiled"):
        name = f"H200: {'an' if way == 'eager' else 'a'} {way} step"
        found[f"{way}_step"] = number(result["series"][name]["median"])
        found[f"{way}_mfu"] = number(result["series"][f"{name}, MFU at most"]["median"])
    return found


def gpu_in_short(series: Series) -> list[str]:
    """Return how our GPT-2 compares with nanoGPT's, and our saves, as far as they were measured."""
    lines = []
    for name, mode in (("compiled", "full"), ("eager", "none")):
        ours, theirs = (
            series.get(f"gpt2, round 1: {who}, {mode}: tokens/s") for who in ("ours", "nanoGPT")
        )
        if ours and theirs:
            percent = 100 * ours["median"] / theirs["median"]
            lines.append(f"- Our {name} GPT-2 reached {percent:.0f} % of nanoGPT's tokens/s.")
    blocked, first, lost = (
        series.get(f"saves: dcp_async, {what}")
        for what in ("blocked", "first save, blocked", "lost")
    )
    if blocked and first and lost:
        costs = [
            f"{shown} {number(series[f'saves: {name}, blocked']['median'])} s"
            for name, shown in OTHERS.items()
            if f"saves: {name}, blocked" in series
        ]
        lines += [
            f"- A save with `dcp_async` blocked training for {number(blocked['median'])} s, the "
            f"first one for {number(first['median'])} s. Counting slower steps during the upload, "
            f"a save cost {number(lost['median'])} s of training ({number(lost['p10'])} … "
            f"{number(lost['p90'])}).",
            f"- The others cost the time for which they blocked training: {', '.join(costs)}.",
        ]
    return [*lines, ""] if lines else []


def scaling(results: Path) -> str:
    """The page about many GPUs, with what was simulated filled in."""
    result = json.loads((results / "goodput.json").read_text("utf-8"))
    settings, ways = result["settings"], result["ways"]
    lines = [
        "| GPUs | hours between failures | synchronous: best interval, s | synchronous: goodput, % "
        "| asynchronous: best interval, s | asynchronous: goodput, % "
        "| asynchronous, with our estimate of a restart: goodput, % |",
        "|---|---|---|---|---|---|---|",
    ]
    estimated: dict[int, float] = {}
    for job in result["restarts"]:
        # The first job of a size is one that exists; in a later one, a group restarts alone.
        estimated.setdefault(job["gpus"], 100 * job["goodput"])
    for pair in zip(ways["synchronous"], ways["asynchronous"], strict=True):
        cells = [f"{pair[0]['gpus']:,}", number(pair[0]["hours_between_failures"])]
        for row in pair:
            seconds, percent = row["best_interval_seconds"], 100 * row["best_goodput"]
            cells += [f"{seconds:,.0f}", f"{percent:.2f}"]
        with_estimate = estimated.get(pair[0]["gpus"])
        cells.append("" if with_estimate is None else f"*{with_estimate:.2f}*")
        lines.append(f"| {' | '.join(cells)} |")
    restarts = []
    for job in result["restarts"]:
        parts, percent = job["parts"], f"{100 * job['goodput']:.2f}"
        shown = {part: number(seconds) for part, seconds in parts.items()}
        total = number(sum(parts.values()))
        name = f"{job['job']}, {job['gpus']:,} GPUs"
        if "alone" in job["job"]:
            name += " (**not implemented**)"
        else:
            shown |= {part: f"*{shown[part]}*" for part in EXTRAPOLATED}
            total, percent = f"*{total}*", f"*{percent}*"
        restarts.append(f"| {' | '.join([name, *shown.values(), total, percent])} |")
    rows = [row for way in ways.values() for row in way]
    regret = max(row["best_goodput"] - row["formula_goodput"] for row in rows)
    errors = max(
        abs(row["formula_goodput"] - row["formula_goodput_expected"]) / row["formula_goodput_error"]
        for row in rows
    )
    bursts = result["bursts"]
    even = next(row for row in ways["asynchronous"] if row["gpus"] == bursts["gpus"])
    restarting = settings["restart"] / (3600 * even["hours_between_failures"])
    upload = settings["save"] - settings["blocked"]
    uploading = {
        row["gpus"]: f"{100 * upload / (row['best_interval_seconds'] + settings['blocked']):.0f} %"
        for row in ways["asynchronous"]
    }
    saves = json.loads((results / "save.json").read_text("utf-8"))["series"]
    on_gpu = json.loads((results / "gpu.json").read_text("utf-8"))["pieces"]["saves"]["series"]
    slower = {
        name: f"{100 * (one['median'] - 1):.0f} %"
        for name, one in (
            ("slower_on_gpu", on_gpu["dcp_async, slowdown"]),
            ("slower_1", saves["1 rank: dcp_async, slowdown"]),
            ("slower_2", saves["2 ranks: dcp_async, slowdown"]),
        )
    }
    cost_on_gpu = on_gpu["dcp_async, lost"]["median"]
    planning, meeting = load(results, "planning"), load(results, "meeting")
    gather = {
        gpus: figure(extrapolated(meeting["groups"]["as needed"], "gather" + CPU, gpus), "")
        for gpus in (SHOWN[-1], LLAMA_GPUS)
    }
    # Bytes a second that a rank reads, by the column "verify and read".
    fsdp, hsdp, largest, *_ = result["restarts"]
    rate = STATE / fsdp["gpus"] / fsdp["parts"]["read"]
    return Template(SCALING_TEXT.read_text("utf-8")).substitute(
        goodput="\n".join(lines),
        restarts="\n".join(restarts),
        group=GROUP,
        copies=f"{LLAMA_GPUS // GROUP}",
        share=f"{STATE / GROUP / 1e9:.0f}",
        gradients=f"{STATE / 3 / GROUP / 1e9:.0f}",
        storage_rank=number(rate / 1e9),
        storage_fsdp=f"{rate * fsdp['gpus'] / 1e12:.1f}",
        storage_hsdp=f"{rate * hsdp['gpus'] / 1e12:.1f}",
        storage_largest=f"{rate * largest['gpus'] / 1e12:.0f}",
        storage_minutes=f"{hsdp['gpus'] / GROUP * STATE / 1e12 / 60:.0f}",
        read_fsdp=f"{STATE / 1e12:.1f}",
        copies_10=f"{SHOWN[-1] // GROUP}",
        read_hsdp=f"{SHOWN[-1] // GROUP * STATE / 1e12:.0f}",
        most_generated=f"{planning['ways']['FSDP'][-1]['ranks']:,}",
        most_real=f"{meeting['groups']['as needed'][-1]['ranks']:,}",
        gather_10=gather[SHOWN[-1]],
        gather_llama=gather[LLAMA_GPUS],
        storage_slow=number(hsdp["gpus"] / GROUP * STATE / 1e12),
        network=f"{NETWORK / 1e9:.0f}",
        command=result["command"],
        failures=f"{settings['failures']:,}",
        save=number(settings["save"]),
        blocked=number(settings["blocked"]),
        restart=number(settings["restart"]),
        regret=f"{100 * regret:.2f}",
        restarting=f"{100 * restarting:.1f} %",
        uploading_1=uploading[1024],
        uploading_4=uploading[4096],
        cost_on_gpu=f"{cost_on_gpu:.2f}",
        longer=f"{math.sqrt(cost_on_gpu / settings['blocked']):.1f}",
        **slower,
        **slowed(settings, ways["asynchronous"], saves["2 ranks: dcp_async, slowdown"]["median"]),
        cost_on_gpu_high=f"{on_gpu['dcp_async, lost']['p90']:.2f}",
        errors=f"{errors:.1f}",
        shape=bursts["shape"],
        even=f"{100 * even['best_goodput']:.2f} %",
        bursts=f"{100 * bursts['best_goodput']:.2f} %",
        **shards.table(results),
        **limits(results),
    )


def slowed(
    settings: dict[str, float], rows: list[dict[str, float]], times: float
) -> dict[str, str]:
    """Goodput, if steps take `times` as long during an upload, at two intervals between saves."""
    row = next(row for row in rows if row["gpus"] == SLOWED_GPUS)
    mean_life = 3600 * row["hours_between_failures"]
    upload = settings["save"] - settings["blocked"]
    # Count the lost time as if training were blocked for it.
    blocked = settings["blocked"] + upload * (1 - 1 / times)
    costs = Costs(blocked, settings["save"] - blocked, settings["restart"])
    often = row["best_interval_seconds"] + settings["blocked"]
    rarely = max(range(60, 3600, 10), key=lambda each: expected(costs, each, mean_life))
    percents = [expected(costs, each, mean_life) for each in (often - blocked, float(rarely))]
    return {
        "often": f"{often:.0f}",
        "rarely": f"{rarely}",
        "unslowed": f"{100 * row['best_goodput']:.0f}",
        "slowed_often": f"{100 * percents[0]:.0f}",
        "slowed_rarely": f"{100 * percents[1]:.0f}",
    }


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
