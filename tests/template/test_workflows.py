"""The workflows of this repository and of a render: pinned, bounded, and of targets that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import conftest
from tests.conftest import ROOT, bake
from tests.stress import page

FOLDER = ROOT / ".github/workflows"
WORKFLOWS = sorted(path.name for path in FOLDER.iterdir())


def assert_pinned_and_bounded(path: Path) -> dict[str, Any]:
    """What holds for every workflow; returns it."""
    text = path.read_text("utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 180
    uses = re.findall(r"uses: (.*)", text)
    assert uses
    for used in uses:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), used
    return workflow


def versions(path: Path) -> set[str]:
    """The actions that a workflow uses, with their versions."""
    return {*re.findall(r"uses: (.*)", path.read_text("utf-8"))}


def targets() -> set[str]:
    """The targets of the Makefile."""
    return {*re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_runs_targets_of_the_makefile(name: str) -> None:
    workflow = assert_pinned_and_bounded(FOLDER / name)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    made = {m[1] for it in steps if (m := re.match(r"make (\w+)", it.get("run", "")))}
    nightly = {"torture", "matrix", "compat", "tutorial"}
    wanted = {"ci.yml": {"quick", "test", "slow"}, "nightly.yml": nightly, "site.yml": {"site"}}
    assert made == wanted[name] and made < targets()
    assert versions(FOLDER / name) >= versions(FOLDER / "ci.yml")


def test_a_tag_publishes_the_site_and_nothing_else_does() -> None:
    workflow = yaml.safe_load((FOLDER / "site.yml").read_text("utf-8"))
    assert workflow[True]["push"]["tags"] == ["v*"]  # YAML 1.1 reads `on` so
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    for step in (build["steps"][-1], publish):
        assert step["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert build["steps"][-1]["with"]["path"] == "build/site"
    assert publish["needs"] == "build"


def test_each_night_every_topic_is_tried_with_the_newest_torch() -> None:
    workflow = yaml.safe_load((FOLDER / "nightly.yml").read_text("utf-8"))
    on = workflow[True]  # YAML 1.1 reads `on` so
    assert on.keys() == {"schedule", "workflow_dispatch"}
    assert re.fullmatch(r"\d+ \d+ \* \* \*", on["schedule"][0]["cron"])
    makefile = (ROOT / "Makefile").read_text("utf-8")
    told = re.search(r"^TORTURE \?= (.*)$", makefile, re.MULTILINE)
    assert told
    topics = workflow["jobs"]["torture"]["strategy"]["matrix"]["topic"]
    assert topics == told[1].split() and {*topics} == {*page.TOPICS}
    assert workflow["jobs"]["compat"]["steps"][-1]["run"] == "make compat TORCH=newest"
    questions = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
    for question, answers in workflow["jobs"]["matrix"]["strategy"]["matrix"].items():
        assert answers == questions[question]


def test_the_lists_of_slow_and_long_tests_name_tests_that_exist() -> None:
    """Or a test that was renamed would be slow, or late, in `make test`."""
    for name in (*conftest.SLOW, *conftest.LONG):
        file, _, function = name.partition("::")
        files = [path for path in ROOT.glob("tests/**/test_*.py") if file in path.as_posix()]
        start = f"\ndef {function.partition('[')[0]}"
        assert any(start in path.read_text("utf-8") for path in files), name


def test_the_workflow_of_a_render(tmp_path: Path) -> None:
    project = bake(tmp_path)
    assert_pinned_and_bounded(project / ".github/workflows/ci.yml")
    assert versions(project / ".github/workflows/ci.yml") == versions(FOLDER / "ci.yml")


def test_contributing_says_when_to_run_each_target() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    told = {*re.findall(r"make (\w+)", text)}
    assert targets() - {"clean", "demo"} <= told <= targets()
