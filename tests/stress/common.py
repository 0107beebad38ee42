"""What all topics share: counting what was tried and what broke, results, the page.

Each topic is a program, `python -m tests.stress.TOPIC`, which writes results/TOPIC.json;
`--bounded` tries a part of it in seconds, as `make test` does. One violation makes it exit with 1.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import file_system, machine, versions

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"


@dataclass
class Tally:
    """One promise: how often it was put to the test, and how often it was broken."""

    promise: str
    unit: str
    """What was tried: "states", "kills", "flipped bits"."""
    tried: int = 0
    violations: list[str] = field(default_factory=list)
    """What happened instead, each with what it takes to see it again."""

    def count(self, problem: str | None = None) -> None:
        """One try; `problem` says what broke the promise, if anything did."""
        self.tried += 1
        if problem:
            self.violations.append(problem)
            print(f"VIOLATION of {self.promise!r}: {problem}", file=sys.stderr, flush=True)


@dataclass
class Findings:
    """What a topic has found: tallies by name, and figures that are no yes or no."""

    bounded: bool
    folder: Path
    """An empty folder to work in."""
    tallies: list[Tally] = field(default_factory=list)
    figures: dict[str, float | str] = field(default_factory=dict)

    def tally(self, promise: str, unit: str) -> Tally:
        """The tally of a promise, made when it is first asked for."""
        for tally in self.tallies:
            if tally.promise == promise:
                return tally
        self.tallies.append(Tally(promise, unit))
        return self.tallies[-1]


def run_topic(topic: str, attempt: Callable[[Findings], None]) -> None:
    """The command line of a topic: try everything in a temporary folder, write `<topic>.json`."""
    parser = argparse.ArgumentParser(f"python -m tests.stress.{topic}")
    parser.add_argument("--bounded", action="store_true", help="a part of it, in seconds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    parser.add_argument("--work", type=Path, help="folder on the disk to try (default: TMPDIR)")
    given = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="stress-", dir=given.work) as folder:
        findings = Findings(given.bounded, Path(folder))
        place = file_system(Path(folder))
        attempt(findings)
    result: dict[str, Any] = {
        "topic": topic,
        "command": f"python -m tests.stress.{topic}",
        "bounded": given.bounded,
        "seconds": round(time.perf_counter() - started),
        "machine": {**machine(), "file_system": place},
        "versions": versions("torch", "numpy"),
        "tallies": [vars(tally) for tally in findings.tallies],
        "figures": findings.figures,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{topic}.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    for tally in findings.tallies:
        print(f"{tally.promise}: {tally.tried:,} {tally.unit}, {len(tally.violations)} violations")
    for name, value in findings.figures.items():
        print(f"{name}: {value}")
    untried = [tally.promise for tally in findings.tallies if not tally.tried]
    sys.exit(int(bool(untried) or any(tally.violations for tally in findings.tallies)))
