"""`compare` tells a change from noise; `--workflow.expect` holds the code to a team's figures."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Project, project_fixture

project = project_fixture("compared", workflow="full")


def result(project: Project, folder: Path, seconds: float = 0.1, **changes: Any) -> Path:
    """A baseline's result of this median of the seconds per step."""
    stage = project.module("workflow.stage").Stage("baseline", project.config(run_dir=folder))
    steps = {"median": seconds, "p10": 0.98 * seconds, "p90": 1.02 * seconds, "n": 80}
    stage.figures |= {"step_seconds": steps, "peak_memory_bytes": 10**9, "losses": [3.0, 2.0, 1.0]}
    stage.check("c", True, measured="so", wanted="such")
    stage.close()
    content = json.loads(stage.file.read_text())
    content["machine"]["load"] = 0.1
    for name, value in changes.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    stage.file.write_text(json.dumps(content))
    return stage.file


def verdicts(project: Project, a: Path, b: Path) -> dict[str, str]:
    """The last word on each figure."""
    compare = project.module("workflow.compare")
    both = [next(iter(compare.contents(path).values())) for path in (a, b)]
    return {line.split()[0]: verdict for line, verdict in compare.verdicts(*both)}


def test_a_change_is_told_from_noise(project: Project, tmp_path: Path, capsys) -> None:
    before = result(project, tmp_path / "a")
    for seconds, word in ((0.2, "worse"), (0.05, "better"), (0.102, "within noise")):
        after = result(project, tmp_path / "b", seconds)
        found = verdicts(project, before, after)
        assert found["step_seconds"] == word
        assert found["losses"] == "the same to the bit"
        assert found["peak_memory_bytes"] == "within noise"
    after = result(project, tmp_path / "b", 0.2, figures={"peak_memory_bytes": 2 * 10**9})
    capsys.readouterr()
    project("compare", str(before.parents[1]), str(after))
    shown = capsys.readouterr().out
    assert "FAIL step_seconds 0.1 s -> 0.2 s, 2 (1.83 to 2.19) times: worse" in shown
    assert "FAIL peak_memory_bytes 1 GB -> 2 GB" in shown and "2 metrics worse" in shown
    words = ["compare", str(before), str(after), "--fail-on-regression"]
    assert project.module("__main__").dispatch(words) == 1
    assert project.module("__main__").dispatch(["compare", str(after), *words[1:2]]) == 0


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(1, 1.5), st.floats(1, 1.5))
def test_the_other_way_round_says_the_opposite(
    project: Project, a: float, b: float, wide: float, wider: float
) -> None:
    compare = project.module("workflow.compare")
    one, two = ({"value": x, "low": x / w, "high": x * w} for x, w in ((a, wide), (b, wider)))
    contents = [
        {"settings": {}, "figures": {"step_seconds": it}, "machine": {}, "versions": {}}
        for it in (one, two)
    ]
    for content in contents:
        content["machine"] = dict.fromkeys(compare.OF_MACHINE, 1) | {"load": 0}
        content["versions"] = {"torch": "2"}
    ((_, there),) = compare.verdicts(*contents)
    ((_, back),) = compare.verdicts(*reversed(contents))
    opposite = {"better": "worse", "worse": "better", "within noise": "within noise"}
    times = compare.ratio(*(compare.Interval(*one.values()) for one in (one, two)), 0.0)
    # Near the limits, the change up and the one back down differ in their last digits.
    if min(abs(math.log(times.low)), abs(math.log(times.high))) > 1e-9 and min(wide, wider) > 1:
        assert back == opposite[there]
    assert there == "within noise" or not times.low <= 1 <= times.high


@pytest.mark.parametrize("of_a_step", [0.02, 0.08])
@pytest.mark.parametrize("noise", [0.02, 0.03])
@pytest.mark.parametrize("count", [5, 15, 80])
def test_how_often_it_is_wrong(
    project: Project, noise: float, of_a_step: float, count: int
) -> None:
    """Of pairs whose measurements differ by their noise, and of those that are 20 % apart."""
    compare, timing = project.module("workflow.compare"), project.module("workflow.timing")
    random, same = np.random.default_rng(0), dict.fromkeys(compare.OF_MACHINE, 1) | {"load": 0}

    def word(change: float) -> str:
        contents = []
        for seconds in (1.0, 1.0 + change):
            hour = seconds * np.exp(noise * random.standard_normal())
            steps = hour * np.exp(of_a_step * random.standard_normal(count))
            figures = {"step_seconds": timing.spread(steps)}
            contents.append({"settings": {}, "figures": figures, "machine": same})
            contents[-1]["versions"] = {"torch": "2"}
        ((_, verdict),) = compare.verdicts(*contents)
        return verdict

    words = [word(0.0) for _ in range(1000)]
    assert words.count("within noise") >= 950
    if of_a_step < 0.05 or count > 40:  # else medians of so few steps say less
        assert [word(0.2) for _ in range(1000)].count("worse") >= 950


def test_a_wait_whose_median_is_almost_0_is_compared(project: Project, tmp_path: Path) -> None:
    """As with loader workers, which bring several batches at once."""
    waits = {"wait_seconds": {"median": 4e-5, "p10": 2e-5, "p90": 0.9, "n": 70}}
    one, two = (result(project, tmp_path / name, figures=waits) for name in "ab")
    assert verdicts(project, one, two)["wait_seconds"] == "within noise"


def test_a_fraction_of_a_step_is_shown_without_a_verdict(project: Project, tmp_path: Path) -> None:
    """It grows when all else gets faster. Bytes have a name for each size, and are no times."""
    before = {"data_wait": {"median": 0.004, "p10": 0.004, "p90": 0.004, "n": 80}}
    after = {"data_wait": {"median": 0.0066, "p10": 0.0066, "p90": 0.0066, "n": 80}}
    before["micro_batch"] = {"peak_memory_bytes": {"8": 400_000_000}}
    after["micro_batch"] = {"peak_memory_bytes": {"8": 440_000_000}}
    one = result(project, tmp_path / "a", 0.1, figures=before)
    two = result(project, tmp_path / "b", 0.06, figures=after)
    compare = project.module("workflow.compare")
    both = [next(iter(compare.contents(path).values())) for path in (one, two)]
    lines = {line.split()[0]: (line, verdict) for line, verdict in compare.verdicts(*both)}
    assert lines["data_wait"] == ("data_wait 0.004 -> 0.0066", "")
    line, verdict = lines["micro_batch.peak_memory_bytes.8"]
    assert "400 MB -> 440 MB" in line and verdict == "worse"


def test_a_run_that_is_not_there_is_named(project: Project, tmp_path: Path) -> None:
    before = result(project, tmp_path / "a")
    line = project.refuses("compare", str(before), str(tmp_path / "none"))
    assert (
        line
        == f"{tmp_path / 'none'} does not exist: give a run directory, or the result of a stage"
    )


def test_what_cannot_be_compared_is_no_regression(project: Project, tmp_path: Path) -> None:
    before = result(project, tmp_path / "a")
    for changes, reason in (
        ({"machine": {"cpu": "another"}}, "not comparable: cpu "),
        ({"machine": {"cores": 99}}, "not comparable: cores "),
        ({"machine": {"load": 1000.0}}, "not comparable: a load of 1000.0 on "),
        ({"versions": {"torch": "1.0"}}, "not comparable: torch "),
        ({"machine": {"device": "NVIDIA"}}, "not comparable: device "),
    ):
        after = result(project, tmp_path / "b", 0.2, **changes)
        assert verdicts(project, before, after)["step_seconds"].startswith(reason), changes
        assert (
            project.module("__main__").dispatch(
                ["compare", str(before), str(after), "--fail-on-regression"]
            )
            == 0
        )
    # Bytes do not depend on what else the machine does.
    busy = result(project, tmp_path / "b", machine={"load": 1000.0})
    assert verdicts(project, before, busy)["peak_memory_bytes"] == "within noise"


def test_a_result_of_another_project_is_refused(project: Project, tmp_path: Path) -> None:
    before, after = result(project, tmp_path / "a", stage="other"), result(project, tmp_path / "b")
    problem = "is not a result of a stage: baseline or compile"
    assert problem in project.refuses("compare", str(before), str(after))


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (lambda loss: loss, "the same to the bit"),
        (lambda loss: loss * (1 + 1e-6), "within noise"),  # as sums in another order give
        (lambda loss: loss + 0.1, "worse"),
        (lambda loss: loss - 0.1, "better"),
        (lambda loss: loss if abs(loss) > 2 else None, "worse"),
    ],
)
@pytest.mark.parametrize("count", [4, 45])
@pytest.mark.parametrize("sign", [1, -1])
def test_losses_are_compared_step_by_step(
    project: Project, tmp_path: Path, after: Any, verdict: str, count: int, sign: int
) -> None:
    first = [sign * (3 - 2 * step / count) for step in range(count)]
    one = result(project, tmp_path / "a", figures={"losses": first})
    two = result(project, tmp_path / "b", figures={"losses": [after(loss) for loss in first]})
    assert verdicts(project, one, two)["losses"] == verdict


def test_what_each_stage_measured_is_compared(project: Project) -> None:
    compare = project.module("workflow.compare")
    figures = {
        "strong_efficiency": {"2": 0.9},
        "restart_seconds": {"total": 4.0},
        "interval_seconds": 100.0,
        "modes": {"full": {"speedup": {"value": 1.2, "low": 1.1, "high": 1.3}, "hits": 3}},
    }
    assert set(dict(compare.measured(figures))) == {
        "strong_efficiency.2",
        "restart_seconds.total",
        "modes.full.speedup",
    }


def test_runs_are_compared_by_what_they_wrote(project: Project, tmp_path: Path, capsys) -> None:
    options = ("--train.steps", "24", "--train.log-every", "1", "--train.validate-every", "0")
    runs = {"a": (), "b": (), "c": ("--optim.learning-rate", "1e-6")}
    for name, more in runs.items():
        project("train", *project.settings, *options, "--run-dir", str(tmp_path / name), *more)
    capsys.readouterr()
    project("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    shown = capsys.readouterr().out
    assert "losses at step 24" in shown and "the same to the bit" in shown
    assert "samples_per_second" in shown
    assert re.search(r"^     bits_per_byte ([\d.]+) -> \1 \(last values\)$", shown, re.M)
    assert "is unknown" not in shown  # each run says on what it ran
    odd = shutil.copytree(tmp_path / "b", tmp_path / "odd")
    text = (odd / "metrics.jsonl").read_text().replace("bits_per_byte", "bits\\u001b[2J")
    (odd / "metrics.jsonl").write_text(text)
    project("compare", str(odd), str(odd))
    shown = capsys.readouterr().out
    assert "bits\\x1b[2J" in shown and "\x1b" not in shown
    for name, change in (("b", {"ranks": 2}), ("few", {})):
        folder = shutil.copytree(tmp_path / "b", tmp_path / f"changed_{name}")
        status = json.loads((folder / "status.json").read_text())
        assert status["ranks"] == 1
        (folder / "status.json").write_text(json.dumps(status | change))
        if name == "few":
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            (folder / "metrics.jsonl").write_text("\n".join([*lines[:3], ""]))
        project("compare", str(tmp_path / "a"), str(folder))
        reason = "1 and 2 ranks" if change else "fewer than 5 records"
        (line,) = (it for it in capsys.readouterr().out.splitlines() if " samples_per_second" in it)
        assert line.endswith(f"not comparable: {reason}")
    assert (
        project.module("__main__").dispatch(
            ["compare", str(tmp_path / "a"), str(tmp_path / "c"), "--fail-on-regression"]
        )
        == 1
    )
    shown = capsys.readouterr().out
    assert "optim.learning_rate: " in shown and "-> 1e-06" in shown
    (line,) = [line for line in shown.splitlines() if "FAIL losses" in line]
    assert line.endswith("worse")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.with_name("none"), "none does not exist"),
        (lambda p: p.write_text("{}") and p, "is not a result of a stage"),
        (lambda p: p.parents[2], "there is nothing to compare"),
        (
            lambda p: p.write_text(p.read_text().replace('"p10": ', '"p10": [], "x": ')) and p,
            "baseline: the results are damaged",
        ),
    ],
)
def test_what_is_no_result_is_refused(
    project: Project, tmp_path: Path, make: Any, message: str
) -> None:
    whole, other = result(project, tmp_path / "a"), result(project, tmp_path / "b" / "c")
    assert message in project.refuses("compare", str(whole), str(make(other)))


def test_the_baseline_is_held_to_what_a_team_expects(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr(project.module("workflow.interleaved"), "SECONDS", 0.01)
    monkeypatch.setattr(project.module("workflow.interleaved"), "WINDOW", 0.001)
    file = tmp_path / "expected.toml"
    words = ["baseline", *project.settings, "--run-dir", str(tmp_path), "--workflow.expect"]
    dispatch = project.module("__main__").dispatch
    assert dispatch([*words, str(file)]) == 1
    assert f"expected: {file} does not exist (wanted: a file)" in capsys.readouterr().out
    shutil.copy(tmp_path / "workflow/expected.toml", file)
    assert dispatch([*words, str(file)]) == 0
    assert "ok   expected_losses" in capsys.readouterr().out


def test_an_expectation_is_checked_each_time(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file, or other figures in it, change no setting that a measurement follows from."""
    chain, config = project.module("workflow.chain"), project.config(run_dir=tmp_path)
    held = project.config(run_dir=tmp_path, workflow__expect=tmp_path / "expected.toml")
    assert chain.with_effect(project.module("workflow.stage").origin(held)) == chain.with_effect(
        project.module("workflow.stage").origin(config)
    )
    measured: list[str] = []

    def run_stage(config: Any, name: str, arguments: list[str]) -> dict[str, Any]:
        measured.append(name)
        return {"status": "crashed"}

    dispatch = project.module("__main__").dispatch
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr(chain, "run_stage", run_stage)
    # As if measured before, with the same settings and code.
    monkeypatch.setattr(chain, "reusable_result", lambda _, name: {"status": "pass", "figures": {}})
    monkeypatch.setattr(chain, "measure_together", lambda *_: "pass")
    words = ("workflow", *project.settings, "--run-dir", str(tmp_path))
    assert dispatch([*words]) == 0 and measured == []
    assert dispatch([*words, "--workflow.expect", str(tmp_path / "expected.toml")]) == 1
    assert measured == ["baseline"]


def test_a_workflow_that_is_refused_removes_no_baseline(project: Project, tmp_path: Path) -> None:
    """With a file that holds no expectations, or while another workflow of the run is under way."""
    baseline = result(project, tmp_path)
    before = baseline.read_bytes()
    file = tmp_path / "expected.toml"
    words = ("workflow", *project.settings, "--run-dir", str(tmp_path))
    words = (*words, "--workflow.expect", str(file))
    file.write_text("loss = 3")
    assert f"{file} is not a file of expected losses" in project.refuses(*words)
    assert baseline.read_bytes() == before
    file.write_text("[losses]\n2 = 3.0")
    # The lock of another process: locks of one process do not keep each other out.
    hold = (
        "import sys; from pathlib import Path\n"
        f"from {project.name}.workflow.stage import lock_stage\n"
        "lock = lock_stage(Path(sys.argv[1]), 'workflow'); print('locked', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(project.folder / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        assert "workflow.json is in use by process" in project.refuses(*words)
    assert baseline.read_bytes() == before


def test_what_falls_short_of_the_expected_fails(project: Project, tmp_path: Path) -> None:
    expected, config = project.module("workflow.expected"), project.config(run_dir=tmp_path)
    file = tmp_path / "expected.toml"

    def statuses(text: str) -> dict[str, str]:
        file.write_text(text)
        stage = project.module("workflow.stage").Stage("baseline", config)
        stage.figures |= {"losses": [3.0, 2.0]}
        expected.hold_to(stage, file, expected.read_expected(file))
        return {check["name"].removeprefix("expected_"): check["status"] for check in stage.checks}

    assert statuses("[losses]\n2 = 2.01") == {"losses": "pass"}
    assert statuses("[losses]\n2 = 2.1") == {"losses": "fail"}
    assert statuses("tolerance = 0.2\n[losses]\n2 = 2.1") == {"losses": "pass"}
    assert statuses("[losses]\n9 = 2.1") == {"at_later_steps": "not_measured"}
    for text in (
        "",
        "[losses]",
        "losses = 3",
        '[losses]\n2 = 2.1\n[samples_per_second]\n"a machine" = 1',
        "[losses]\nx = 3",
        "[losses]\n0 = 3",
        "loss = 3",
        "[losses]\n1 = 'a'",
        "\0",
        "[",
    ):
        file.write_text(text)
        refused = project.refuses(
            "baseline",
            *project.settings,
            "--run-dir",
            str(tmp_path),
            "--workflow.expect",
            str(file),
        )
        assert str(file) in refused and "\n" not in refused
