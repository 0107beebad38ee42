"""Writes docs/evidence/reliability.md from the results, so that no count in it is typed by hand."""

import argparse
import json
import tomllib
from pathlib import Path
from string import Template
from typing import Any

from .common import RESULTS, ROOT

TEXT = Path(__file__).parent / "page.md"
SURVIVORS = Path(__file__).parent / "survivors.toml"
PAGE = ROOT / "docs" / "evidence" / "reliability.md"
TOPICS = ("crash_points", "kill_storm", "elastic", "damage", "hostile_files", "resources", "stops")
TOPICS += ("entrances", "store")
PLACES = 200  # that `make mutants` breaks


def page(results: Path) -> str:
    """The text beside this program, with the tables filled in."""
    found = {name: json.loads((results / f"{name}.json").read_text("utf-8")) for name in TOPICS}
    tables = {name: section(result) for name, result in found.items()}
    tallies = [tally for result in found.values() for tally in result["tallies"]]
    tables["tried"] = f"{sum(tally['tried'] for tally in tallies):,}"
    tables["violations"] = f"{sum(len(tally['violations']) for tally in tallies):,}"
    tables["short"] = "\n".join(map(in_short, found.values()))
    tables["matrix"] = matrix(json.loads((results / "matrix.json").read_text("utf-8")))
    tables["mutants"] = mutants(results / "mutants.jsonl")
    return Template(TEXT.read_text("utf-8")).substitute(tables)


def in_short(result: dict[str, Any]) -> str:
    """One topic in a row: how much was tried, and when."""
    tried = sum(tally["tried"] for tally in result["tallies"])
    violations = sum(len(tally["violations"]) for tally in result["tallies"])
    topic = result["topic"].replace("_", " ")
    return f"| {topic} | {tried:,} | {violations} | {result['date']} |"


def section(result: dict[str, Any]) -> str:
    """One topic: the counts, the figures, and on what it was tried."""
    lines = ["| promise | checked | violations |", "|---|---|---|"]
    for tally in result["tallies"]:
        broken = len(tally["violations"])
        broken = f"**{broken}**" if broken else "0"
        lines.append(f"| {tally['promise']} | {tally['tried']:,} {tally['unit']} | {broken} |")
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
    """A figure; thousands are separated by commas."""
    return f"{value:,}" if isinstance(value, int) else str(value)


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
        f"The tests noticed {noticed} of {len(results)} changes ({noticed / len(results):.1%}; "
        f"`make mutants`, {dates[-1]}). These were not noticed:",
        "",
        "| changed line | change | why no test notices it |",
        "|---|---|---|",
    ]
    for one in sorted(survivors, key=lambda one: (one["file"], one["line"])):
        code = one["before"].replace("|", "\\|")
        why = reasons[one["file"]][f"{one['kind']}: {one['before']}"]
        lines.append(f"| {one['file']}: `{code}` | {one['kind']} | {why} |")
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
