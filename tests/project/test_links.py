"""Links that somebody left in a run directory: no file that they lead to is changed."""

import contextlib
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
TRAINING += ["status.json", "tensorboard/logged.json", "traces/step_00000004_rank_0.json.gz"]
REFUSED = (".lock", "logs/train.log")


CASES = [("train", name, "a file") for name in TRAINING]
CASES += [("train", name, "nowhere") for name in (*REFUSED, "metrics.jsonl")]
CASES += [("report", name, "a file") for name in ("report.html", ".report.html", ".lock")]
CASES += [("baseline", name, "a file") for name in ("workflow/baseline.json", ".lock")]


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
    errors = project.module("errors")
    words = {"train": (*project.settings, *WORDS), "report": (), "baseline": project.settings}
    if command == "report":
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    refused = ""
    try:
        with contextlib.chdir(project.folder):
            project.module("__main__").dispatch([command, "--run-dir", str(run), *words[command]])
    except (errors.UserError, errors.RankError) as error:
        refused = str(error)
    assert victim.read_text() == VICTIM if where == "a file" else not victim.exists()
    link = run / name
    said = refused + caplog.text
    if command == "train" and (name in REFUSED or where == "nowhere"):
        assert f"{link} is a link or no plain file" in refused and "\n" not in refused
    elif not name.startswith("."):
        assert not link.is_symlink() or f"{link} is a link or no plain file" in said
