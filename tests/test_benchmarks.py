"""The benchmarks run, at a size that says nothing; their page is what they wrote."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

TOPICS = ("loop", "save", "restore", "sampler", "startup", "workflow")


def run(*arguments: str) -> None:
    command = [sys.executable, "-m", *arguments]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.parametrize("topic", TOPICS)
def test_a_benchmark_measures_everything(topic: str, tmp_path: Path) -> None:
    """Each series of the committed result but the peers', whole and finite."""
    run(f"benchmarks.{topic}", "--smoke", "--out", str(tmp_path), "--work", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [f"{topic}.json"]  # nothing left over
    result = json.loads((tmp_path / f"{topic}.json").read_text("utf-8"))
    committed = json.loads((ROOT / "benchmarks" / "results" / f"{topic}.json").read_text("utf-8"))
    assert result["smoke"] and not committed["smoke"]
    assert result.keys() == committed.keys()
    for name, series in result["series"].items():
        assert name in committed["series"], name
        assert len(series["values"]) == series["n"] > 0
        values = [series[key] for key in ("median", "p10", "p90", "low", "high")]
        assert all(map(math.isfinite, values + series["values"])), name


def test_the_page_is_what_the_results_say(tmp_path: Path) -> None:
    run("benchmarks.page", "--page", str(tmp_path / "page.md"))
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert (tmp_path / "page.md").read_text("utf-8") == page, "not written by `make benchmark`"


def test_make_benchmark_runs_all_of_them() -> None:
    command = ["make", "--dry-run", "--always-make", "benchmark"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert outcome.returncode == 0, outcome.stderr
    assert " ".join(TOPICS) in outcome.stdout
    assert "-c benchmarks/constraints.txt" in outcome.stdout
