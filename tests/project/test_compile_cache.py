"""Compiled code is kept for the next start: outside of every run, for its owner alone."""

import os
import stat
from pathlib import Path

import pytest

from tests.conftest import Project, project_fixture

NAME = "TORCHINDUCTOR_CACHE_DIR"


project = project_fixture("kept_code", parallelism="single", checkpoint="torch_save")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, with nothing set that says where compiled code goes."""
    monkeypatch.setenv(NAME, "")  # so that the variable is restored whatever the test does
    monkeypatch.delenv(NAME)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_run_that_compiles_has_a_private_cache_outside_of_it(
    project: Project, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changes = {"compile__mode": "full", "compile__backend": "aot_eager", "train__steps": 2}
    run_dir = tmp_path / "run"
    project.module("train").run(project.config(run_dir=run_dir, **changes))
    folder = Path(os.environ[NAME])
    assert folder.is_relative_to(home) and not folder.is_relative_to(run_dir)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(run_dir.rglob("*.so")) and not list(run_dir.rglob("*.py"))
    assert "graphs in" in caplog.text and "graph breaks: 0" in caplog.text


def test_each_kind_of_machine_has_its_own_and_a_users_setting_wins(
    project: Project, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, folders = project.module("compile"), set()
    for cpu in ("one", "other", "one"):
        monkeypatch.delenv(NAME, raising=False)
        monkeypatch.setattr(module, "cpu_name", lambda cpu=cpu: cpu)
        module.use_compile_cache()
        folders.add(os.environ[NAME])
    assert len(folders) == 2
    monkeypatch.setenv(NAME, str(tmp_path / "own"))
    module.use_compile_cache()
    assert os.environ[NAME] == str(tmp_path / "own")


def test_a_cache_that_cannot_be_kept_ends_nothing(
    project: Project, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home.write_text("in the way")
    project.module("compile").use_compile_cache()
    assert NAME not in os.environ and "not kept" in caplog.text
