"""Writes docs/evidence/reliability.md from the results, so that no count in it is typed by hand."""

import argparse
import json
import re
import tomllib
from pathlib import Path
from string import Template
from typing import Any

from .common import RESULTS, ROOT

TEXT = Path(__file__).parent / "page.md"
SURVIVORS = Path(__file__).parent / "survivors.toml"
PAGE = ROOT / "docs" / "evidence" / "reliability.md"
TOPICS = ("crash_points", "kill_storm", "elastic", "damage", "hostile_files", "entrances")
TOPICS += ("resources", "stops", "store")
PLACES = 200  # that `make mutants` breaks
# How it breaks them (scripts/mutants.py), in words for the page.
CHANGES = {
    "comparison": "another comparison",
    "operator": "another operator",
    "constant": "a number doubled, or 1 for 0",
    "condition": "the condition negated",
    "removed": "the statement removed",
}


def page(results: Path) -> str:
    """The text beside this program, with the tables filled in."""
    found = {name: json.loads((results / f"{name}.json").read_text("utf-8")) for name in TOPICS}
    tables = {name: section(result) for name, result in found.items()}
    text = TEXT.read_text("utf-8")
    tallies = [tally for result in found.values() for tally in result["tallies"]]
    tried = sum(tally["tried"] for tally in tallies)
    bits = sum(tally["tried"] for tally in tallies if tally["promise"].endswith("a flipped bit"))
    tables["tried"], tables["bits"] = f"{tried:,}", f"{100 * bits / tried:.0f} %"
    kept = (it["tried"] for it in found["kill_storm"]["tallies"] if it["unit"] == "checkpoints")
    tables["kept"] = f"{sum(kept):,}"
    tables["violations"] = f"{sum(len(tally['violations']) for tally in tallies):,}"
    tables["short"] = "\n".join(in_short(result, text) for result in found.values())
    tables["matrix"] = matrix(json.loads((results / "matrix.json").read_text("utf-8")))
    tables["mutants"] = mutants(results / "mutants.jsonl")
    return Template(text).substitute(tables)


def in_short(result: dict[str, Any], text: str) -> str:
    """One topic in a row: its section in the text, how much was tried, and when."""
    tried = sum(tally["tried"] for tally in result["tallies"])
    violations = sum(len(tally["violations"]) for tally in result["tallies"])
    before = text.partition(f"\n${result['topic']}\n")[0]
    title = before.rpartition("\n## ")[2].partition("\n")[0]
    anchor = re.sub(r"[^\w ]", "", title.lower()).replace(" ", "-")
    return f"| [{title}](#{anchor}) | {tried:,} | {violations} | {result['date']} |"


def section(result: dict[str, Any]) -> str:
    """One topic: the counts, the figures, and on what it was tried."""
    lines = ["| promise | checked | violations |", "|---|---|---|"]
    for tally in result["tallies"]:
        broken = len(tally["violations"])
        broken = f"**{broken}**" if broken else "0"
        unit = tally["unit"].removesuffix("s") if tally["tried"] == 1 else tally["unit"]
        lines.append(f"| {tally['promise']} | {tally['tried']:,} {unit} | {broken} |")
    if result["figures"]:
        rows = (f"| {name} | {shown(value)} |" for name, value in result["figures"].items())
        lines += ["", "| details of the test | |", "|---|---|", *rows]
    machine, packages = result["machine"], result["versions"]
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    lines += [
        "",
        f"`{result['command']}`, {result['date']}, {result['seconds']} s. {machine['cpu']}, "
        f"{machine['cores']} cores, "
        f"{machine['system']}, {machine['file_system']}. {versions}.",
    ]
    return "\n".join(lines)


def shown(value: float | str) -> str:
    """A figure, with commas between thousands; without a detail that the result has in brackets."""
    return f"{value:,}" if isinstance(value, int) else str(value).partition(" (")[0]


def matrix(result: dict[str, Any]) -> str:
    """The count of combinations that were tried, and when."""
    return (
        f"{result['combinations']} combinations, {result['packages']} different packages, "
        f"{len(result['failures'])} failures. `make matrix`, {result['date']}, "
        f"{result['seconds']} s, torch {result['versions']['torch']}."
    )


def mutants(file: Path) -> str:
    """How many breakages were noticed, and the others, each with the reason that is given for it.

    KeyError for one without a reason.
    """
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    if len(lines) < PLACES:  # a run that goes on where it was
        return "Not tried in full yet (`make mutants`)."
    results = [json.loads(line) for line in lines]
    reasons = tomllib.loads(SURVIVORS.read_text("utf-8"))
    survivors = [result for result in results if result["noticed_by"] is None]
    noticed, dates = len(results) - len(survivors), sorted({result["date"] for result in results})
    lines = [
        f"The tests noticed {noticed} of {len(results)} changes "
        f"({100 * noticed / len(results):.1f} %; `make mutants`, {dates[-1]}). "
        "These were not noticed:",
        "",
        "| changed line | change | why no test notices it |",
        "|---|---|---|",
    ]
    for one in sorted(survivors, key=lambda one: (one["file"], one["line"])):
        code = one["before"].replace("|", "\\|")
        why = reasons[one["file"]][f"{one['kind']}: {one['before']}"]
        lines.append(f"| {one['file']}: `{code}` | {CHANGES[one['kind']]} | {why} |")
    return "\n".join(lines)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser("python -m tests.stress.page", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    given.page.write_text(page(given.results), "utf-8")


if __name__ == "__main__":
    main()
