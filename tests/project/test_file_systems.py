"""Runs on file systems without locks, without a sync of folders, or that cannot rename a folder."""

import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project, project_fixture

project = project_fixture(
    "on_file_systems", parallelism="single", checkpoint="torch_save", tracker="none"
)
store = project_fixture(
    "on_stores",
    parallelism="single",
    checkpoint="torch_save",
    tracker="none",
    storage="object_store",
)
tokens = project_fixture(
    "tokens_on_file_systems",
    parallelism="single",
    checkpoint="torch_save",
    tracker="none",
    text="tokenizer",
)
SAVING = ("--train.validate-every", "0", "--checkpoint.every", "2", "--checkpoint.keep", "2")


def train(project: Project, run: Path, steps: int, *options: str) -> None:
    words = (*project.settings, "--run-dir", str(run), "--train.steps", str(steps))
    project("train", *words, *SAVING, *options)


def names(run: Path) -> list[str]:
    """The checkpoints of a run, and what else is beside them."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks_is_named_and_can_be_used(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    def refuse(file: Any, how: int) -> None:
        raise OSError(number, os.strerror(number))

    run = tmp_path / "run"
    monkeypatch.setattr(fcntl, "lockf", refuse)
    line = project.refuses("train", *project.settings, "--run-dir", str(run))
    assert line.startswith(f"{run} is on a file system without locks ({os.strerror(number)})")
    assert line.endswith("or set WITHOUT_LOCKS=1 if no other job writes there")
    monkeypatch.setenv("WITHOUT_LOCKS", "1")
    train(project, run, 2)
    assert names(run) == ["step_00000002"]
    assert "take care that no other job writes there (WITHOUT_LOCKS=1)" in caplog.text
    # A lock that another process holds is none that is missing.
    monkeypatch.setattr(fcntl, "lockf", lambda *_: refuse_as_taken())
    line = project.refuses("train", *project.settings, "--run-dir", str(run))
    assert line.startswith(f"{run} is in use by process ")


def test_tokens_on_a_file_system_without_locks_are_refused_or_written(
    tokens: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The lock of the command is one of flock, which a file system may lack, too."""
    refusal = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def refuse(file: Any, how: int) -> None:
        raise refusal

    words = ("tokens", "--text", "text.txt", "--to", str(tmp_path / "t"), "--vocabulary", "300")
    partial = tmp_path / "t.partial"
    monkeypatch.setattr(fcntl, "flock", refuse)
    line = tokens.refuses(*words)
    assert line.startswith(f"{partial} is on a file system without locks (No locks available)")
    assert line.endswith("or set WITHOUT_LOCKS=1 if no other job writes there")
    monkeypatch.setenv("WITHOUT_LOCKS", "1")
    # A lock that another process holds is none that is missing.
    refusal = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    line = tokens.refuses(*words)
    assert line == f"another process is writing to {partial}: wait for it"
    assert not caplog.messages
    refusal = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    tokens(*words)
    assert (tmp_path / "t/tokens.json").exists() and not partial.exists()
    assert "take care that no other job writes there (WITHOUT_LOCKS=1)" in caplog.text


def test_a_restore_from_a_store_names_a_temporary_folder_without_locks(
    store: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TMPDIR may be on such a file system where the run directory is not."""
    lockf, temporary = fcntl.lockf, tmp_path / "temporary"
    temporary.mkdir()

    def refuse(file: Any, how: int) -> None:
        if Path(file.name).is_relative_to(temporary):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        lockf(file, how)

    url = ("--checkpoint.url", f"file://{tmp_path}/store")
    train(store, tmp_path / "run", 2, *url)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(fcntl, "lockf", refuse)
    words = (*store.settings, "--run-dir", str(tmp_path / "run"), "--train.steps", "4", *SAVING)
    line = store.refuses("train", *words, *url)
    no_locks = f"TMPDIR ({temporary}) is on a file system without locks"
    assert line.startswith(no_locks) and line.endswith("if no other job writes there")
    assert "\n" not in line
    monkeypatch.setenv("WITHOUT_LOCKS", "1")
    train(store, tmp_path / "run", 4, *url)
    assert no_locks in caplog.text
    store.module("checkpoint.paths").release_copies()
    assert not [*temporary.iterdir()]


def refuse_as_taken() -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_folders_that_cannot_be_synced_are_one_warning(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    monkeypatch.setattr(project.module("files"), "warned_of_sync", False)
    train(project, tmp_path / "run", 6)
    assert names(tmp_path / "run") == ["step_00000004", "step_00000006"]
    assert caplog.text.count("is on a file system that cannot sync folders") == 1
    monkeypatch.setattr(os, "fsync", lambda descriptor: refuse_with(errno.EIO))
    line = project.refuses("train", *project.settings, "--run-dir", str(tmp_path / "other"))
    assert os.strerror(errno.EIO) in line, "a disk that fails is no such file system"


def refuse_with(number: int) -> None:
    raise OSError(number, os.strerror(number))


@pytest.fixture(params=["fake", "overlay"])
def image(
    request: pytest.FixtureRequest,
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """A run directory whose folders were in a container's image: they cannot be renamed."""
    train(project, tmp_path / "lower/run", 4)
    if request.param == "fake":
        fixed = [path for path in tmp_path.rglob("*") if path.is_dir()]
        rename = os.rename

        def refuse(source: Any, target: Any) -> None:
            if Path(source) in fixed:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)
            rename(source, target)

        monkeypatch.setattr(os, "rename", refuse)
        yield tmp_path / "lower/run"
        return
    for name in ("upper", "work", "merged"):
        (tmp_path / "space" / name).mkdir(parents=True)
    space, merged = tmp_path / "space", tmp_path / "space/merged"
    layers = f"lowerdir={tmp_path}/lower,upperdir={space}/upper,workdir={space}/work"
    command = ["mount", "-t", "overlay", "overlay", "-o", f"{layers},redirect_dir=off", str(merged)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("an overlay cannot be mounted here")
    yield merged / "run"
    subprocess.run(["umount", str(merged)], check=True)


def test_a_run_in_an_image_goes_on_and_prunes(
    project: Project, image: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(project, image, 10)
    assert names(image) == ["step_00000008", "step_00000010"]
    assert "could not be removed" not in caplog.text


def test_a_damaged_checkpoint_in_an_image_is_set_aside(
    project: Project, image: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = image / "checkpoints/step_00000004"
    content = bytearray((newest / "state.pt").read_bytes())
    content[700] ^= 1
    (newest / "state.pt").write_bytes(content)
    train(project, image, 6)
    assert names(image) == ["step_00000004", "step_00000004.damaged-1", "step_00000006"]
    aside = newest.with_name("step_00000004.damaged-1")
    assert (aside / "state.pt").read_bytes() == bytes(content)
    assert (
        "cannot be renamed, since it is in a lower layer of an overlay file system" in caplog.text
    )


def test_a_fresh_run_sets_one_in_an_image_aside(project: Project, image: Path) -> None:
    before = json.loads((image / "config.json").read_text())
    train(project, image, 2, "--fresh")
    old = image.with_name("run.old-1")
    assert names(image) == ["step_00000002"]
    assert names(old) == ["step_00000002", "step_00000004"]
    assert json.loads((old / "config.json").read_text()) == before


def test_a_mount_is_named_where_it_would_be_renamed(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the run is moved, copied or removed."""
    run = tmp_path / "run"
    train(project, run, 2)
    monkeypatch.setattr(os, "rename", lambda *paths: refuse_with(errno.EBUSY))
    monkeypatch.setattr(shutil, "copytree", None)
    line = project.refuses("train", *project.settings, "--run-dir", str(run), "--fresh")
    assert line == (
        f"{run} cannot be renamed, since it is a mount point: mount its parent folder instead, "
        "or choose another name for the run"
    )
    assert names(run) == ["step_00000002"]
