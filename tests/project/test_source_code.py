"""The commit of the code, in the run directory, the checkpoints and the report."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Project

ANSWERS = {"parallelism": "single", "checkpoint": "torch_save", "tracker": "none"}
GIT = ("git", "-c", "user.name=A", "-c", "user.email=a@example.org")


@pytest.fixture
def git_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the user's."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)


def source_of(project: Project, run: str) -> dict[str, str]:
    """Train a run by the command, and return what its files say: all of them the same."""
    words = ("--preset", "tiny", "--device", "cpu", "--train.steps", "2", "--name", run)
    done = project.python("-m", project.name, "train", *words, "--data.path", "text.txt")
    assert done.returncode == 0, done.stderr
    folder = project.folder / "runs" / run
    status = json.loads((folder / "status.json").read_text())
    [manifest] = folder.glob("checkpoints/*/manifest.json")
    assert json.loads(manifest.read_text())["source"] == status["source"]
    return status["source"]


def test_a_run_says_which_code_it_was_started_with(git_env: None, tmp_path: Path) -> None:
    with Project.imported(tmp_path, "of_a_commit", **ANSWERS) as project:

        def git(*words: str) -> str:
            command = [*GIT, "-C", str(project.folder), *words]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        assert source_of(project, "without") == {}
        git("init", "--quiet")
        git("add", ".")
        git("commit", "--quiet", "--message", "Begin")
        commit = git("rev-parse", "HEAD").strip()
        assert source_of(project, "clean") == {"commit": commit}

        model = project.folder / "src/of_a_commit/model.py"
        code = model.read_text()
        model.write_text(code + "# changed\n")
        changed = source_of(project, "changed")
        assert changed["commit"] == commit and len(changed["changed"]) == 16
        project("report", "--name", "changed")
        page = (project.folder / "runs/changed/report.html").read_text()
        assert f"{commit[:12]}, changed since ({changed['changed']})" in page

        model.write_text(code)
        new_file = project.folder / "src/of_a_commit/more.py"
        new_file.write_text("A = 1\n" * 100)
        first = source_of(project, "new_file")
        new_file.write_text("A = 2\n" * 100)
        second = source_of(project, "other_file")
        digests = {each["changed"] for each in (changed, first, second)}
        assert len(digests) == 3

        # What cannot be read counts by its name; root can read everything but this.
        new_file.unlink()
        new_file.symlink_to("/proc/self/mem")
        assert source_of(project, "unreadable")["commit"] == commit
