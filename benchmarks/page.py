"""Writes the pages of benchmarks and of scaling from results; no figure is typed by hand."""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from string import Template

from . import shards
from .common import RESULTS, ROOT, TASKS
from .goodput import GROUP, NETWORK
from .limits import limits
from .sharded_start import WAYS
from .tables import Series, number, tables

TEXT = Path(__file__).parent / "page.md"
PAGE = ROOT / "docs" / "evidence" / "benchmarks.md"
SCALING_TEXT = TEXT.with_name("scaling.md")
SCALING_PAGE = ROOT / "docs" / "explanation" / "scaling.md"
GOAL = "goal:"


def verdict(sentence: str, value: float, goal: float, unit: str, at_most: bool = True) -> str:
    """A sentence with what was measured in place of {}, its goal, and whether that was missed."""
    met = value <= goal if at_most else value >= goal
    word = "at most" if at_most else "at least"
    end = "" if met else f" **Missed by {number(abs(value - goal))} {unit}.**"
    shown = sentence.format(f"{number(value)} {unit}")
    return f"- {shown} ({GOAL} {word} {number(goal)} {unit}).{end}"


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
    for ranks in ("1 rank", "2 ranks"):
        seconds = {
            name.removeprefix(f"{ranks}: ").removesuffix(", blocked"): entry["median"]
            for name, entry in found.items()
            if name.startswith(ranks) and name.endswith(", blocked") and "first" not in name
        }
        mine, synchronous = seconds.pop("dcp_async"), seconds.pop("dcp")
        del seconds["dcp, again"]
        others = ", ".join(f"{100 * mine / s:.2g} % of {name}" for name, s in seconds.items())
        lost, slow, still = (
            found[f"{ranks}: dcp_async, {kind}"]["median"]
            for kind in ("lost", "slowdown", "slowdown without a save")
        )
        lines += [
            verdict(
                f"With {ranks}, `dcp_async` blocks training for {{}} of the time of `dcp`",
                100 * mine / synchronous,
                5,
                "%",
            ),
            f"- With {ranks}, the same time is {others}.",
            f"- With {ranks}, a step during the upload takes {number(slow)} times as long (without "
            f"a save {number(still)}, which is noise). With these slower steps, a save costs "
            f"{number(lost)} s: {100 * lost / synchronous:.0f} % of the time of `dcp`.",
        ]
    return lines


def restore(found: Series) -> list[str]:
    """Verifying and restoring."""
    raw = found["1 rank: sha256 alone, from memory"]["median"]
    one, each = "One rank", "Each of two ranks"
    lines = [
        verdict(
            f"{who} verifies a checkpoint at {{}}",
            found[f"{label}: dcp, verify"]["median"] / ranks,
            1,
            "GB/s",
            at_most=False,
        )
        for ranks, label, who in ((1, "1 rank", one), (2, "2 ranks", each))
    ]
    for label, who in (("1 rank", one), ("2 ranks", each)):
        load, whole = (found[f"{label}: dcp, {what}"]["median"] for what in ("load", "restore"))
        lines.append(
            f"- {who} then loads it with `dcp.load` at {number(load)} GB/s. The whole restore, "
            f"including the allocation of the optimizer state, runs at {number(whole)} GB/s."
        )
    one_file = found["1 rank: torch_save, load"]["median"]
    return [
        *lines,
        f"- A single file is memory-mapped and loaded at {number(one_file)} GB/s.",
        f"- For comparison, sha256 alone hashes memory at {number(raw)} GB/s on one core.",
    ]


def sampler(found: Series) -> list[str]:
    """The order of samples."""
    start, again, far, last = (
        found[f"ours, 10^12 samples, to {where}: seek"]["median"]
        for where in ("sample 0", "sample 0 again", "the last million", "the last sample")
    )
    lines = [
        f"- With 10^12 samples, a seek to the last million takes {number(far)} µs, and a seek to "
        f"sample 0 takes {number(start)} µs ({number(again)} µs when repeated). The goal was an "
        f"equal time. A seek to the very last sample takes {number(last)} µs, since it also "
        "starts the next epoch."
    ]
    if memory := found.get("ours, 10^12 samples: memory"):
        peer = found["DistributedSampler, 10^7 samples: memory"]["median"]
        lines.append(
            f"- With 10^12 samples, our sampler needs {number(memory['median'])} MB. With 10^7 "
            f"samples, torch's DistributedSampler needs {number(peer)} MB."
        )
    return lines


def optimizer(found: Series) -> list[str]:
    """Muon compared with AdamW."""
    name, lines = "Muon, 0.75 of the steps", []
    for sentence, kind, goal, unit in (
        (
            "With 75 % of AdamW's steps, Muon's loss minus AdamW's is {} for the worst seed",
            "bits per byte over AdamW's",
            0,
            "bits per byte",
        ),
        (
            "With 75 % of AdamW's steps, Muon's training takes {} AdamW's time for the worst seed",
            "training, of AdamW's",
            1,
            "times",
        ),
    ):
        worst = max(found[f"{name}: {kind}"]["values"])
        lines.append(verdict(sentence, worst, goal, unit))
    return lines


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
        verdict("The next step after `kill -9` of a rank ends after {}", killed, 2 * imported, "s"),
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
        lines.append(
            f"- Per {unit}, our recipe trains on {number(middle)} times as many tokens as "
            f"SFTTrainer ({number(ratios[0])} to {number(ratios[-1])} in the rounds).{end}"
        )
    for what, sentence in (
        ("host memory", "Our process needs {} MB of host memory, and SFTTrainer's {} MB."),
        ("a checkpoint", "Our checkpoint has {} MB, and SFTTrainer's {} MB."),
        (
            "from a start that resumes to its first step",
            "Our first step after a resume ends {} s after the start, and SFTTrainer's {} s.",
        ),
    ):
        ours, theirs = (found[f"{who}: {what}"]["median"] for who in ("ours", "SFTTrainer"))
        end = " **SFTTrainer needs less.**" if theirs < ours else ""
        lines.append(f"- {sentence.format(number(ours), number(theirs))}{end}")
    for name, who in (("ours", "our recipe"), ("SFTTrainer", "SFTTrainer")):
        counts = found[f"{name}: files that differ after a resume"]["values"]
        lines.append(
            f"- {counts.count(0)} of {len(counts)} resumed runs of {who} have the bits of the "
            "undisturbed run: the adapter and the state of the optimizer."
        )
    return lines


def busy(found: Series) -> list[str]:
    """Beside other work."""
    rate = {name: entry["median"] for name, entry in found.items()}
    alone, beside = (rate[f"as rendered, {where}"] for where in ("alone", "beside others"))
    slower = rate["slower by the bound, alone"]
    change = f"{number(abs(slower))} % {'slower' if slower > 0 else 'faster'}"
    end = "" if slower <= 3 else f" **Missed by {number(slower - 3)} %.**"
    return [
        f"- On an idle machine, bounded spinning makes training {change} ({GOAL} at most 3 % "
        f"slower).{end}",
        verdict(
            "With a busy process on each core, training takes {} as long as on an idle machine",
            alone / beside,
            3,
            "times",
        ),
    ]


def loss(found: Series) -> list[str]:
    """The output layer and its loss."""
    value = {name: entry["median"] for name, entry in found.items()}
    percent = 100 * value["as rendered, memory"] / value["at once, memory"]
    sentence = "Our loss needs {} of the memory that computing all logits at once needs"
    lines = [verdict(sentence, percent, 20, "%")]
    if rival := value.get("linear_cross_entropy"):
        size, times = value["linear_cross_entropy, memory"], rival / value["as rendered"]
        lines.append(
            f"- torch's `linear_cross_entropy` needs {number(size)} GiB, but takes "
            f"{number(times)} times as long as ours."
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
    return "\n".join(
        [
            *judge(result["series"]),
            "",
            *tables(judge.__name__, result["series"]),
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
    origin = result["origin"]
    series = {
        f"{name}: {what}": one
        for name, piece in result["pieces"].items()
        for what, one in piece["series"].items()
    }
    lines = [*gpu_in_short(series), *tables("gpu", series, "p10", "p90")]
    packages = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    on = f"{origin['device']}, driver {origin['driver']}, CUDA {origin['cuda']}"
    return "\n".join([*lines, "", f"`{result['command']}`. {on}. {packages}."])


def gpu_in_short(series: Series) -> list[str]:
    """Return how our GPT-2 compares with nanoGPT's, if both were measured."""
    lines = []
    for name, mode in (("compiled", "full"), ("eager", "none")):
        ours, theirs = (
            series.get(f"gpt2, round 1: {who}, {mode}: tokens/s") for who in ("ours", "nanoGPT")
        )
        if ours and theirs:
            percent = 100 * ours["median"] / theirs["median"]
            lines.append(f"- Our {name} GPT-2 reaches {percent:.0f} % of nanoGPT's tokens/s.")
    return [*lines, ""] if lines else []


def scaling(results: Path) -> str:
    """The page about many GPUs, with what was simulated filled in."""
    result = json.loads((results / "goodput.json").read_text("utf-8"))
    settings, ways = result["settings"], result["ways"]
    lines = [
        "| GPUs | hours between failures | synchronous: best interval, s | synchronous: goodput, % "
        "| asynchronous: best interval, s | asynchronous: goodput, % |",
        "|---|---|---|---|---|---|",
    ]
    for pair in zip(ways["synchronous"], ways["asynchronous"], strict=True):
        cells = [f"{pair[0]['gpus']:,}", number(pair[0]["hours_between_failures"])]
        for row in pair:
            seconds, percent = row["best_interval_seconds"], 100 * row["best_goodput"]
            cells += [f"{seconds:,.0f}", f"{percent:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    restarts = []
    for job in result["restarts"]:
        seconds, percent = [*job["parts"].values()], f"{100 * job['goodput']:.2f}"
        cells = [number(value) for value in (*seconds, sum(seconds))]
        name = f"{job['job']}, {job['gpus']:,} GPUs"
        restarts.append(f"| {' | '.join([name, *cells, percent])} |")
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
        save=number(settings["save"]),
        blocked=number(settings["blocked"]),
        restart=number(settings["restart"]),
        regret=f"{regret:.2%}",
        errors=f"{errors:.1f}",
        shape=bursts["shape"],
        even=f"{even['best_goodput']:.2%}",
        bursts=f"{bursts['best_goodput']:.2%}",
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
