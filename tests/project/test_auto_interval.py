"""`--checkpoint.every auto` saves as often as a share of the time allows, on all ranks alike."""

import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Project, drill, project_fixture

project = project_fixture("auto_interval", parallelism="single", checkpoint="dcp_async")
STEPS = 40


def saved(project: Project, run_dir: Path, **settings: Any) -> list[int]:
    """The steps that a run saves."""
    own = {"checkpoint__every": "auto", "train__validate_every": 0, "checkpoint__keep": 2 * STEPS}
    config = project.config(run_dir=run_dir, **{"train__steps": STEPS} | own | settings)
    project.module("train").run(config)
    return sorted(int(path.name[5:]) for path in run_dir.glob("checkpoints/step_*"))


def test_what_is_saved_follows_from_the_settings(project: Project, tmp_path: Path) -> None:
    steps = saved(project, tmp_path / "often", checkpoint__auto_share=1.0)
    gaps = [later - step for step, later in itertools.pairwise(steps)]
    assert len(steps) > 3 and steps[0] == 2 and steps[-1] == STEPS and min(gaps[:-1]) > 1
    assert saved(project, tmp_path / "dear", checkpoint__auto_share=1e-9) == [2, STEPS]
    dear = {"checkpoint__auto_share": 1e-9}
    bounded = saved(project, tmp_path / "bounded", checkpoint__auto_longest=9, **dear)
    assert bounded == [2, 11, 20, 29, 38, STEPS]
    more = {"checkpoint__keep_every": 15, "train__validate_every": 20}
    assert saved(project, tmp_path / "more", **more, **dear) == [2, 15, 20, 30, STEPS]
    steps = saved(project, tmp_path / "often", checkpoint__auto_share=1.0, train__steps=STEPS + 9)
    assert steps[-1] == STEPS + 9 and STEPS + 1 not in steps  # it has just been saved


@given(
    st.floats(0.001, 1),  # seconds of a step
    st.lists(st.floats(0.001, 20), min_size=1, max_size=5),  # of saves, one after the other
    st.floats(0.0005, 0.3),
    st.integers(0, 30),  # steps until a save is durable
)
def test_saves_cost_the_share_neither_more_nor_less(
    project: Project, step_seconds: float, costs: list[float], share: float, flight: int
) -> None:
    """Once time has paid for the first, whose cost nobody knows before."""
    checkpointer = project.module("checkpoint.checkpointer")
    settings = project.module("checkpoint.writer").CheckpointConfig(every="auto", auto_share=share)
    run = checkpointer.Checkpointer.__new__(checkpointer.Checkpointer)
    run.config, run.writer = settings, SimpleNamespace(busy=False, seconds_beside=0.0)
    run.blocked_seconds, run.began, run.spent_before, run.last_tried = 0.0, None, math.inf, 0
    now, saves, last = 1000.0, 0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer.time, "perf_counter", lambda: now)
        for step in range(1, 2001):
            run.writer.busy = saves > 0 and step - last <= flight
            waits = run.waits
            now += step_seconds
            if run.due(step, False, waits):
                assert not run.writer.busy and step - last > 1
                cost = costs[saves % len(costs)]
                run.spent_before, run.last_tried, last = run.blocked_seconds, step, step
                run.blocked_seconds, saves, now = run.blocked_seconds + cost, saves + 1, now + cost
    elapsed, spent = now - 1000.0, run.blocked_seconds
    off = max(costs) - min(costs)  # what the next costs is only foretold by the last
    assert spent <= max(share * elapsed, costs[0]) + off + 1e-6
    assert 2000 - last <= flight + 2 or spent + max(costs) >= share * (elapsed - 3 * step_seconds)


def test_ranks_agree_on_when(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("was ever woman in this humour wooed? " * 200)
    answers = {"parallelism": "ddp", "checkpoint": "dcp_async"}
    with Project.imported(tmp_path, "auto_ranks", **answers) as project:
        sources = {project.name: project.folder / "src"}
        output = drill("auto_interval.py", (2, str(tmp_path), project.name), sources=sources)
    steps = json.loads(re.findall(r"^auto: (.*)$", output, re.MULTILINE)[0])
    assert {9, 18, 27, 36, 40} <= {*steps} and len(steps) > 5, output


@pytest.mark.parametrize(
    ("setting", "value"), [("auto_share", "0"), ("auto_longest", "-1"), ("every", "often")]
)
def test_bad_settings_are_told(
    project: Project, setting: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = f"--checkpoint.{setting.replace('_', '-')}"
    with pytest.raises(SystemExit) as refused:
        project("train", *project.settings, option, value)
    said = "".join(capsys.readouterr())
    assert refused.value.code == 2 and setting.replace("_", "-") in said
