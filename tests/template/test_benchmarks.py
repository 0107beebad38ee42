"""The benchmarks run, at a size that says nothing; their page is what they wrote."""

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import gpu, page
from benchmarks.goodput import Costs, expected, lives_of, simulate, young_daly
from benchmarks.planning import chunk, extrapolated, growth, plans
from tests.conftest import ROOT, run_module

TOPICS = ("loop", "save", "restore", "sampler", "shards", "optimizer", "startup")
TOPICS += ("sharded_start", "restart", "busy", "fit", "loss", "roofline", "workflow", "sft")


@pytest.mark.parametrize("topic", TOPICS)
def test_a_benchmark_measures_everything(topic: str, tmp_path: Path) -> None:
    """Each series of the committed result but the peers', whole and finite."""
    run_module(f"benchmarks.{topic}", "--smoke", "--out", str(tmp_path), "--work", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [f"{topic}.json"]  # nothing left over
    result = json.loads((tmp_path / f"{topic}.json").read_text("utf-8"))
    path = ROOT / "benchmarks" / "results" / f"{topic}.json"
    if not path.exists():
        pytest.skip("no result is committed yet: run the benchmark on a quiet machine")
    committed = json.loads(path.read_text("utf-8"))
    assert result["smoke"] and not committed["smoke"]
    assert result.keys() == committed.keys()
    for name, series in result["series"].items():
        assert name in committed["series"], name
        assert len(series["values"]) == series["n"] > 0
        values = [series[key] for key in ("median", "p10", "p90", "low", "high")]
        assert all(map(math.isfinite, values + series["values"])), name


def test_a_gpus_figures_are_measured_piece_by_piece(tmp_path: Path) -> None:
    """On a CPU, whose figures mean nothing; what is there is not measured again."""
    words = ("--smoke", "--out", str(tmp_path), "--work", str(tmp_path))
    run_module("benchmarks.gpu", *words, "--only", "restart")
    first = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert [*first["pieces"]] == ["restart"]
    run_module("benchmarks.gpu", *words)
    found = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert found["pieces"].keys() == gpu.PIECES.keys()
    assert found["pieces"]["restart"] == first["pieces"]["restart"]
    for piece in found["pieces"].values():
        for name, series in piece["series"].items():
            assert series["n"] and all(map(math.isfinite, series["values"])), name
    assert page.gpu(tmp_path) == page.gpu(tmp_path / "none") == "Not measured yet."
    found["origin"]["smoke"] = False
    (tmp_path / "gpu.json").write_text(json.dumps(found), "utf-8")
    assert "| restart: from the start to the first step, resumed |" in page.gpu(tmp_path)


def test_the_page_is_what_the_results_say(tmp_path: Path) -> None:
    pages = {"benchmarks.md": page.PAGE, "scaling.md": page.SCALING_PAGE}
    options = ["--page", str(tmp_path / "benchmarks.md"), "--scaling", str(tmp_path / "scaling.md")]
    run_module("benchmarks.page", *options)
    for name, shown in pages.items():
        written = (tmp_path / name).read_text("utf-8")
        assert written == shown.read_text("utf-8"), "not written by `make benchmark`"


def test_goodput_is_computed_anew(tmp_path: Path) -> None:
    run_module("benchmarks.goodput", "--out", str(tmp_path))
    committed = (ROOT / "benchmarks" / "results" / "goodput.json").read_text("utf-8")
    assert json.loads((tmp_path / "goodput.json").read_text("utf-8")) == json.loads(committed)


seconds = st.floats(0.01, 1000)


@given(seconds, st.floats(0, 1000), seconds, st.floats(0.05, 20), st.integers(0, 1000))
def test_simulated_failures_agree_with_theory(
    blocked: float, upload: float, restart: float, factor: float, seed: int
) -> None:
    """Daly's closed form for any costs; and no interval is much better than the formula's."""
    costs, mean_life = Costs(blocked, upload, restart), 20_000.0
    interval = factor * young_daly(costs, mean_life)
    lives = lives_of(20_000, 1.0, np.random.default_rng(seed)) * mean_life
    goodput, error = simulate(costs, interval, lives)
    assert abs(goodput - expected(costs, interval, mean_life)) < 6 * error + 1e-9
    by_formula = expected(costs, young_daly(costs, mean_life), mean_life)
    assert expected(costs, interval, mean_life) < by_formula + 0.02


def test_lives_that_never_last_keep_nothing_and_endless_ones_all() -> None:
    costs = Costs(blocked=1.0, upload=10.0, restart=100.0)
    assert simulate(costs, 99.0, np.full(10, 209.0)) == (0.0, 0.0)  # durable at 210 s
    assert simulate(costs, 99.0, np.full(10, 210.0))[0] == pytest.approx(99 / 210)
    assert simulate(costs, 99.0, np.full(1, 1e9))[0] == pytest.approx(0.99, abs=1e-6)


@given(st.floats(-1, 3), st.floats(1e-3, 1e3), st.integers(3, 6))
def test_a_law_of_growth_is_found(power: float, first: float, sizes: int) -> None:
    """Whatever the small sizes are like: there, what does not grow hides what does."""
    rows = [{"ranks": 8**k, "cost": first * (8**k) ** power} for k in range(1, sizes + 1)]
    if sizes > 3:
        rows[0]["cost"] += 1000
    assert growth(rows, "cost") == pytest.approx(power, abs=1e-6)
    far = extrapolated(rows, "cost", 8.0**9)
    assert far == pytest.approx(first * 8.0 ** (9 * power), rel=1e-5)


@given(st.integers(1, 200), st.integers(1, 40))
def test_simulated_parts_make_up_the_whole(rows: int, pieces: int) -> None:
    parts = [chunk((rows, 3), place, pieces) for place in range(pieces)]
    cuts = [(part.offsets[0], part.offsets[0] + part.sizes[0]) for part in parts]
    assert [row for cut in cuts for row in range(*cut)] == list(range(rows))


def test_a_group_of_ranks_saves_each_part_once() -> None:
    """Of 8 ranks in groups of 4 each part is some rank's, and no two ranks'."""
    found = [(item.index.fqn, item.index.offset) for plan in plans(8, 4, 1) for item in plan.items]
    assert len(found) == len(set(found)) == 4 * 27


def test_costs_of_many_ranks_are_measured(tmp_path: Path) -> None:
    """At a size that says nothing, all that the page is made of, by the project's own code."""
    small = ("--ranks", "4", "8", "--blocks", "1", "2", "--repeats", "1")
    run_module("benchmarks.planning", *small, "--out", str(tmp_path))
    few = ("--clients", "8", "16", "--ranks", "4", "12", "--repeats", "1")
    run_module("benchmarks.meeting", *few, "--out", str(tmp_path))
    for name in ("planning", "meeting"):
        result, committed = (
            json.loads((folder / f"{name}.json").read_text("utf-8"))
            for folder in (tmp_path, ROOT / "benchmarks" / "results")
        )
        assert result.keys() == committed.keys()
    few_ranks = json.loads((tmp_path / "planning.json").read_text("utf-8"))["ways"]["FSDP"]
    assert [row["chunks"] for row in few_ranks] == [27 * 4, 27 * 8]
    by_way = json.loads((tmp_path / "meeting.json").read_text("utf-8"))["groups"]
    all_at_once, as_needed = (rows[-1]["connections"] for rows in by_way.values())
    assert as_needed < all_at_once >= 11


def test_make_benchmark_runs_all_of_them() -> None:
    command = ["make", "--dry-run", "--always-make", "benchmark"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stderr
    assert " ".join(TOPICS) in outcome.stdout
    assert "-c benchmarks/constraints.txt" in outcome.stdout
