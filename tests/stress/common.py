"""What all topics share: counts of tries and violations, the command line, the result file.

Each topic is a program, `python -m tests.stress.TOPIC`, which writes results/TOPIC.json;
`--bounded` tries a part of it in seconds, as the tests do. One violation makes it exit with 1.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
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
    """The word for one try, in the plural: "states", "kills", "flipped bits"."""
    tried: int = 0
    violations: list[str] = field(default_factory=list)
    """A line for each violation, with what it takes to reproduce it."""

    def count(self, problem: str | None = None) -> None:
        """Count one try; `problem` says how it broke the promise, None that it did not."""
        self.tried += 1
        if problem:
            self.violations.append(problem)
            print(f"VIOLATION of {self.promise!r}: {problem}", file=sys.stderr, flush=True)


@dataclass
class Findings:
    """The findings of a topic: tallies, and figures that are not counts of tries."""

    bounded: bool
    folder: Path
    """An empty folder to work in."""
    tallies: list[Tally] = field(default_factory=list)
    figures: dict[str, float | str] = field(default_factory=dict)

    def tally(self, promise: str, unit: str) -> Tally:
        """The tally of a promise, made at the first call."""
        for tally in self.tallies:
            if tally.promise == promise:
                return tally
        self.tallies.append(Tally(promise, unit))
        return self.tallies[-1]

    def violated(self, promise: str) -> bool:
        """Whether a try has broken this promise."""
        return any(tally.violations for tally in self.tallies if tally.promise == promise)


def run_topic(topic: str, attempt: Callable[[Findings], None]) -> None:
    """Run a topic's command line: try everything in a temporary folder, write `<topic>.json`."""
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
        "date": datetime.now(UTC).date().isoformat(),
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
