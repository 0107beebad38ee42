"""Writes the pages of benchmarks and of scaling from results; no figure is typed by hand."""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

from . import shards
from .common import RESULTS, ROOT, TASKS
from .goodput import GROUP, LLAMA_GPUS, NETWORK, STATE
from .limits import limits
from .sharded_start import WAYS
from .tables import Series, number, tables

TEXT = Path(__file__).parent / "page.md"
PAGE = ROOT / "docs" / "evidence" / "benchmarks.md"
SCALING_TEXT = TEXT.with_name("scaling.md")
SCALING_PAGE = ROOT / "docs" / "explanation" / "scaling.md"
GOAL = "goal:"
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
# The memory of the loss with the chunks of 28 November 2026 (GiB), counted as the benchmark counts
# it. Typed by hand: remove this when the loss is measured again.
LOSS_NOW = 2.83


def verdict(
    sentence: str, value: float, goal: float, unit: str, at_most: bool = True, why: str = ""
) -> str:
    """A sentence with what was measured in place of {}, its goal, and whether that was missed.

    `why` explains the goal.
    """
    met = value <= goal if at_most else value >= goal
    word = "at most" if at_most else "at least"
    end = "" if met else f" **Missed by {number(abs(value - goal))} {unit}.**"
    shown = sentence.format(f"{number(value)} {unit}")
    return f"- {shown} ({GOAL} {word} {number(goal)} {unit}{why}).{end}"


def span(one: dict[str, Any]) -> str:
    """The interval of a median."""
    return f"{number(one['low'])} … {number(one['high'])}"


def loop(found: Series) -> list[str]:
    """The loop."""
    more = {name: entry["median"] for name, entry in found.items() if name.endswith(", more")}
    mine = more.pop("ours, more")
    noise = more.pop("hand-written, again, more")
    lines = [
        verdict("A step of our loop takes {} longer than a hand-written one", mine, 20, "µs"),
        f"- The hand-written loop, measured against itself, differs by {number(noise)} µs (noise).",
    ]
    for name, value in more.items():
        rank = "slower than ours" if value > mine else "**faster than ours**"
        lines.append(
            f"- A step of {name.removesuffix(', more')} takes {number(value)} µs longer than a "
            f"hand-written one: {rank}."
        )
    return lines


def save(found: Series) -> list[str]:
    """Saving."""
    lines = []
    for ranks in RANKS:
        blocked, lost, slow, still = (
            found[f"{ranks}: dcp_async, {kind}"]
            for kind in ("blocked", "lost", "slowdown", "slowdown without a save")
        )
        others = {name: found[f"{ranks}: {name}, blocked"] for name in OTHERS}
        synchronous = others["dcp"]["median"]
        sentence = (
            f"With {ranks}, an asynchronous save (`dcp_async`) blocks training for {{}} of the "
            "time that a synchronous one, `dcp`, takes"
        )
        percent = f"{100 * lost['median'] / synchronous:.0f} %"
        costs = [f"{OTHERS[name]} {number(one['median'])} s" for name, one in others.items()]
        cheaper = {n: one for n, one in others.items() if one["median"] < lost["median"]}
        end = ""
        if cheaper:
            end = f" **Cheaper than `dcp_async`: {' and '.join(OTHERS[n] for n in cheaper)}.**"
        if any(one["high"] > lost["low"] for one in cheaper.values()):
            end += " But the intervals overlap."
        lines += [
            f"{verdict(sentence, 100 * blocked['median'] / synchronous, 5, '%')} "
            f"Counting slower steps during the upload, it costs {percent} as much training time.",
            f"- With {ranks}, a step during the upload takes {number(slow['median'])} times as "
            f"long (without a save {number(still['median'])}, which is noise). So an asynchronous "
            f"save costs {number(lost['median'])} s ({span(lost)}) of training. The others cost "
            f"the time for which they block it: {', '.join(costs)}.{end}",
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


def restore(found: Series) -> list[str]:
    """Verifying and restoring."""
    raw = found["1 rank: sha256 alone, from memory"]["median"]
    alone, both = (found[f"{ranks}: dcp, verify"]["median"] for ranks in ("1 rank", "2 ranks"))
    together = (
        f"Two ranks with one core each verify a checkpoint at {number(both)} GB/s together, so "
        "each of them at {}"
    )
    lines = [
        verdict(
            "One rank with two cores verifies a checkpoint at {}", alone, 1, "GB/s", at_most=False
        ),
        verdict(together, both / 2, 1, "GB/s", at_most=False),
    ]
    for label, who in (
        ("1 rank", "One rank then loads it"),
        ("2 ranks", "Each of two ranks then loads all of it"),
    ):
        load, whole = (found[f"{label}: dcp, {what}"]["median"] for what in ("load", "restore"))
        lines.append(
            f"- {who} with `dcp.load` at {number(load)} GB/s. The whole restore, "
            f"including the allocation of the optimizer state, runs at {number(whole)} GB/s."
        )
    one_file = found["1 rank: torch_save, load"]["median"]
    return [
        *lines,
        f"- A single file (`torch_save`) is memory-mapped and loaded at {number(one_file)} GB/s.",
        f"- For comparison, sha256 alone hashes memory at {number(raw)} GB/s on one core.",
    ]


def sampler(found: Series) -> list[str]:
    """The order of samples."""
    start, again, far, last = (
        found[f"ours, 10^12 samples, to {where}: seek"]["median"]
        for where in ("sample 0", "sample 0 again", "the last million", "the last sample")
    )
    lines = [
        f"- With 10^12 samples, a seek to the start of the last million takes {number(far)} µs, "
        f"and a seek to sample 0 takes {number(start)} µs ({number(again)} µs when repeated). The "
        f"goal was an equal time. A seek to the very last sample takes {number(last)} µs, since it "
        "also starts the next epoch."
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


def optimizer(found: Series) -> list[str]:
    """Muon compared with AdamW."""
    name, on = "Muon, 0.75 of the steps", "On the default small language model"
    how = "with 75 % of AdamW's 300 steps"
    loss, time = (
        max(found[f"{name}: {kind}"]["values"])
        for kind in ("bits per byte over AdamW's", "training, of AdamW's")
    )
    return [
        verdict(
            f"{on}, Muon {how} reaches a loss that is {{}} lower than AdamW's, in the worst of "
            "three seeds",
            -loss,
            0,
            "bits per byte",
            at_most=False,
        ),
        verdict(
            f"{on}, Muon {how} takes {{}} AdamW's time, in the worst of three seeds",
            time,
            1,
            "times",
        ),
    ]


def startup(found: Series) -> list[str]:
    """Beginning."""
    return [
        verdict("Rendering a project takes {}", found["render"]["median"], 0.5, "s"),
        verdict(
            "A project with the default answers reaches its first step after {}",
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
        f"- With 4 ranks of FSDP, a start needs {number(ours)} MB of host memory in total. If each "
        f"rank built the whole model of 1,208 MB, it would need {number(whole)} MB.",
        f"- From a .safetensors file (`--init-from`), it needs {number(files)} MB and "
        f"{number(seconds)} s. If the values were built before they are read, it would need "
        f"{number(first)} MB and {number(longer)} s.",
    ]


def restart(found: Series) -> list[str]:
    """A killed rank."""
    killed, plain, imported, needed = (
        found[name]["median"]
        for name in (
            *("a rank is killed", "a plain start resumes"),
            *("import of torch", "import of torch, dynamo and DCP"),
        )
    )
    return [
        verdict(
            "The next step after `kill -9` of a rank ends after {}",
            killed,
            2 * imported,
            "s",
            why=", twice the import of torch",
        ),
        verdict(
            "A start that resumes takes {} in addition to the import of torch",
            plain - imported,
            1.3,
            "s",
        ),
        "- The modules that torch itself imports for an optimizer and for DCP take "
        f"{number(needed - imported)} s in a separate process.",
    ]


def workflow(found: Series) -> list[str]:
    """The stages of the workflow."""
    lines = []
    measured = [task for task in TASKS if any(name.startswith(task) for name in found)]
    for task in measured:
        of_task = {n.removeprefix(f"{task}, "): s for n, s in found.items() if n.startswith(task)}
        total = of_task["all stages: duration"]["median"]
        lines.append(
            verdict(f"All five stages take {{}} with `task={task}`", total / 60, 5, "minutes")
        )
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


def sft(found: Series) -> list[str]:
    """The chat recipe beside SFTTrainer."""
    lines: list[str] = []
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
            f"- {counts.count(0)} of {len(counts)} resumed runs of {who} have the bits of the "
            "undisturbed run: the adapter and the state of the optimizer."
        )
    return lines


def overlap(ours: list[float], theirs: list[float]) -> str:
    """A sentence for a difference that is smaller than the ranges of both."""
    apart = max(ours) < min(theirs) or max(theirs) < min(ours)
    return "" if apart else " The ranges overlap, so this difference may be noise."


def busy(found: Series) -> list[str]:
    """Beside other work."""
    rate = {name: entry["median"] for name, entry in found.items()}
    alone, beside = (rate[f"as rendered, {where}"] for where in ("alone", "beside others"))
    slower = found["slower by the bound, alone"]
    limit = "Without busy processes, our limit on OpenMP's spinning (`GOMP_SPINCOUNT`)"
    change = f"{limit} makes training slower by {{}}"
    if slower["low"] < 0 < slower["high"]:
        change = f"{limit} makes no measurable difference: the measured slowdown is {{}}"
    first = verdict(f"{change}, interval {span(slower)}", slower["median"], 3, "%")
    if slower["median"] <= 3 < slower["high"]:
        most = number(slower["high"])
        first += (
            " The median meets the goal, but the interval does not exclude a slowdown of up to "
            f"{most} %."
        )
    return [
        first,
        verdict(
            "With a busy process on each core, training takes {} as long as without",
            alone / beside,
            3,
            "times",
        ),
    ]


def loss(found: Series) -> list[str]:
    """The output layer and its loss."""
    value = {name: entry["median"] for name, entry in found.items()}
    measured, percent = (
        100 * size / value["at once, memory"] for size in (value["as rendered, memory"], LOSS_NOW)
    )
    sentence = "Our loss needs {} of the memory that computing all logits at once needs"
    lines = [
        f"{verdict(sentence, percent, 20, '%')} Until 28 November 2026, with smaller chunks, it "
        f"needed {number(measured)} % ([details](#the-loss))."
    ]
    if rival := value.get("linear_cross_entropy"):
        size, times = value["linear_cross_entropy, memory"], rival / value["as rendered"]
        lines.append(
            f"- torch's `linear_cross_entropy` needs {number(size)} GiB, but takes "
            f"{number(times)} times as long as ours (with the smaller chunks)."
        )
    return lines


def roofline(found: Series) -> list[str]:
    """The bounds of a step."""
    eager, compiled = (
        found[f"H200: {way} step, MFU at most"]["median"] for way in ("an eager", "a compiled")
    )
    on_h100 = found["H100: a compiled step, MFU at most"]["median"]
    return [
        f"- On an H200, the bound is {number(eager)} % MFU for an eager step, and "
        f"{number(compiled)} % for a compiled step.",
        f"- On an H100, the bound is {number(on_h100)} % MFU for a compiled step.",
    ]


def fit(found: Series) -> list[str]:
    """Whether a model fits, before there is a GPU."""
    seconds = found["seconds"]["median"]
    sentence = "`fit` takes {} for 64 billion parameters on 64 ranks, on one core"
    return [verdict(sentence, seconds, 60, "s")]


TOPICS = (loop, save, restore, sampler, optimizer, startup, sharded_start, restart, busy, fit)
TOPICS += (loss, roofline, workflow, sft)


def page(results: Path) -> str:
    """The whole page: the text beside this program, with verdicts and tables filled in."""
    text = Template(TEXT.read_text("utf-8"))
    sections = {judge.__name__: section(results, judge) for judge in TOPICS}
    lines = "\n".join(sections.values()).splitlines()
    short = "\n".join(line for line in lines if line.startswith("- ") and f"({GOAL}" in line)
    paths = [results / f"{judge.__name__}.json" for judge in TOPICS]
    found = [json.loads(path.read_text("utf-8")) for path in paths if path.exists()]
    disturbed = sum(result["machine"]["load_before"] > QUIET for result in found)
    return text.substitute(
        sections,
        compared=compared(results),
        loss_now=LOSS_NOW,
        gpu=gpu(results),
        short=short,
        quiet=QUIET,
        disturbed=disturbed,
        measured=len(found),
    )


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
        "- [Saving](#saving), with 1 and 2 ranks on two cores: an asynchronous save blocks "
        f"training for {blocked} ms. Counting slower steps during the upload, it costs {lost} ms "
        f"of training. Plain `torch.save`, which neither syncs nor hashes, costs {plain} ms.",
        "- [GPT-2 on an H200](#on-a-gpu-with-an-earlier-version): compiled, an earlier version "
        f"reached {compiled:.0f} % of nanoGPT's tokens/s, and eager {eager:.0f} %. A "
        "[later one](gpus.md#speed-of-a-training-step) reached 94 % and 71 %.",
    ]
    return "\n".join(lines)


def section(results: Path, judge: Callable[[Series], list[str]]) -> str:
    """One topic: the verdicts, the table, and on what it was measured."""
    path = results / f"{judge.__name__}.json"
    if not path.exists():
        return "Not measured yet."
    result = json.loads(path.read_text("utf-8"))
    machine, settings = result["machine"], result["settings"]
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    chosen = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
    return "\n".join(
        [
            *judge(result["series"]),
            "",
            *tables(judge.__name__, result["series"]),
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


def gpu_in_short(series: Series) -> list[str]:
    """Return how our GPT-2 compares with nanoGPT's, and our saves, as far as they were measured."""
    lines = []
    for name, mode in (("compiled", "full"), ("eager", "none")):
        ours, theirs = (
            series.get(f"gpt2, round 1: {who}, {mode}: tokens/s") for who in ("ours", "nanoGPT")
        )
        if ours and theirs:
            percent = 100 * ours["median"] / theirs["median"]
            lines.append(f"- Our {name} GPT-2 reaches {percent:.0f} % of nanoGPT's tokens/s.")
    saves = ("dcp_async", "dcp", "torch_save", "plain torch.save")
    names = [f"saves: {save}, blocked" for save in saves]
    if all(name in series for name in names):
        background, dcp, one_file, plain = (number(series[name]["median"]) for name in names)
        lines.append(
            f"- A save blocks training for {background} s with `dcp_async`, {dcp} s with `dcp`, "
            f"{one_file} s with `torch_save`, and {plain} s with plain torch.save."
        )
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
        cells.append("" if with_estimate is None else f"{with_estimate:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    restarts = []
    for job in result["restarts"]:
        seconds, percent = [*job["parts"].values()], f"{100 * job['goodput']:.2f}"
        cells = [number(value) for value in (*seconds, sum(seconds))]
        name = f"{job['job']}, {job['gpus']:,} GPUs"
        if "alone" in job["job"]:
            name += " (**not implemented**)"
        restarts.append(f"| {' | '.join([name, *cells, percent])} |")
    rows = [row for way in ways.values() for row in way]
    regret = max(row["best_goodput"] - row["formula_goodput"] for row in rows)
    errors = max(
        abs(row["formula_goodput"] - row["formula_goodput_expected"]) / row["formula_goodput_error"]
        for row in rows
    )
    bursts = result["bursts"]
    even = next(row for row in ways["asynchronous"] if row["gpus"] == bursts["gpus"])
    restarting = settings["restart"] / (3600 * even["hours_between_failures"])
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
    return Template(SCALING_TEXT.read_text("utf-8")).substitute(
        goodput="\n".join(lines),
        restarts="\n".join(restarts),
        group=GROUP,
        copies=f"{LLAMA_GPUS // GROUP}",
        share=f"{STATE / GROUP / 1e9:.0f}",
        gradients=f"{STATE / 3 / GROUP / 1e9:.0f}",
        network=f"{NETWORK / 1e9:.0f}",
        command=result["command"],
        failures=f"{settings['failures']:,}",
        save=number(settings["save"]),
        blocked=number(settings["blocked"]),
        restart=number(settings["restart"]),
        regret=f"{100 * regret:.2f}",
        restarting=f"{100 * restarting:.1f} %",
        **slower,
        errors=f"{errors:.1f}",
        shape=bursts["shape"],
        even=f"{100 * even['best_goodput']:.2f} %",
        bursts=f"{100 * bursts['best_goodput']:.2f} %",
        **shards.table(results),
        **limits(results),
    )


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
