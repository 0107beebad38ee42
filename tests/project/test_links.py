"""Links that somebody left in a run directory: no file that they lead to is changed."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import Project, project_fixture

VICTIM = '{"what": "nobody may change"}\n'


project = project_fixture("linked")


def leave_link(run: Path, name: str, where: str) -> Path:
    """A run directory with a link of that name, to a victim or to where there could be one."""
    victim, link = run.with_name("victim"), run / name
    if where == "a file":
        victim.write_text(VICTIM)
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    return victim


WORDS = ("--train.steps", "6", "--profile.every", "4", "--profile.warmup", "1")
WORDS += ("--profile.active", "1", "--train.validate-every", "0", "--checkpoint.every", "0")
TRAINING = [".lock", ".metrics.jsonl", "metrics.jsonl", "logs/train.log", "config.json"]
TRAINING += [
    "spec.json",
    "status.json",
    "tensorboard/logged.json",
    "traces/step_00000004_rank_0.json.gz",
]
REFUSED = (".lock", "logs/train.log")


CASES = [("train", name, "a file") for name in TRAINING]
CASES += [("train", name, "nowhere") for name in (*REFUSED, "metrics.jsonl")]
CASES += [("report", name, "a file") for name in ("report.html", ".report.html", ".lock")]
CASES += [("baseline", name, "a file") for name in ("workflow/baseline.json", ".lock")]


def refusal(project: Project, command: str, run: Path) -> str:
    """What a command says that refuses a run directory, "" if it does not."""
    errors = project.module("errors")
    words = {"train": (*project.settings, *WORDS), "report": (), "baseline": project.settings}
    try:
        with contextlib.chdir(project.folder):
            project.module("__main__").dispatch([command, "--run-dir", str(run), *words[command]])
    except (errors.UserError, errors.RankError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("command", "name", "where"), CASES)
def test_a_link_is_not_written_through(
    project: Project,
    tmp_path: Path,
    command: str,
    name: str,
    where: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is replaced by a file, or refused in one line that names it."""
    run = tmp_path / "run"
    victim = leave_link(run, name, where)
    if command == "report":
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    refused = refusal(project, command, run)
    assert victim.read_text() == VICTIM if where == "a file" else not victim.exists()
    link = run / name
    said = refused + caplog.text
    if command == "train" and name in REFUSED:
        assert f"{link} is a link or not a regular file" in refused and "\n" not in refused
    elif not name.startswith("."):
        assert not link.is_symlink() or f"{link} is a link or not a regular file" in said


def test_checkpoints_and_traces_may_be_on_another_disk(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("checkpoints", "traces"):
        (tmp_path / "large" / name).mkdir(parents=True)
        (run / name).symlink_to(tmp_path / "large" / name)
    caplog.set_level("INFO")
    for words in ((), ("--train.steps", "8")):
        project("train", "--run-dir", str(run), *project.settings, *WORDS, *words)
    assert "resuming from" in caplog.text
    assert {path.name for path in (tmp_path / "large/checkpoints").iterdir()} == {
        "step_00000006",
        "step_00000008",
    }
    assert len([*(tmp_path / "large/traces").iterdir()]) == 2


def test_a_copy_by_hard_links_goes_on_and_leaves_the_run_it_is_of(
    project: Project, tmp_path: Path
) -> None:
    """As `cp -al` makes one. A log is appended to, so the two share it, and so is the lock."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    words = ("train", *project.settings, *WORDS, "--run-dir")
    project(*words, str(run))
    before = contents(run)
    shutil.copytree(run, copy, copy_function=os.link)
    project(*words, str(copy), "--train.steps", "8")
    assert (copy / "checkpoints/step_00000008").exists()
    assert contents(run) == before
    assert {"status.json", "metrics.jsonl", "config.json"} < before.keys()


def contents(run: Path) -> dict[str, bytes]:
    """The files of a run, except its log, its lock and its tracker's notes."""
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    kept = {name: path for name, path in files.items() if path.name not in SHARED}
    return {name: path.read_bytes() for name, path in kept.items()}


SHARED = (".lock", "train.log", "logged.json")
