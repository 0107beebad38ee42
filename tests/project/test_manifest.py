"""What a manifest may name, how it is published, and what that is told to take."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Project, project_fixture, records

project = project_fixture("of_manifests", parallelism="single", checkpoint="torch_save")


@pytest.mark.parametrize(
    "names",
    [
        *([name] for name in ("../x", "/etc/x", "a/b", ".", "..", "manifest.json", "x\n", "", "ä")),
        ["state.pt", "../x"],
        ["state.pt", ".."],
        [],
    ],
    ids=repr,
)
def test_a_manifest_names_plain_files_beside_it_alone(
    project: Project, tmp_path: Path, names: list[str]
) -> None:
    module, folder = project.module("checkpoint.manifest"), tmp_path / "step_00000003"
    entry = {"size": 1, "sha256": "0" * 64}
    folder.mkdir()

    def read(names: list[str]) -> dict[str, Any]:
        facts = {"format_version": 1, "step": 3, "files": dict.fromkeys(names, entry)}
        (folder / "manifest.json").write_bytes(module.sealed(facts))
        return module.read_manifest(folder)

    assert [*read(["state.pt"])["files"]] == ["state.pt"]
    error = project.module("checkpoint").CheckpointError
    with pytest.raises(error, match=r"names (a file outside its own directory|no file)"):
        read(names)


@pytest.mark.parametrize("version", ["1", None, 2])
def test_another_format_is_refused(project: Project, tmp_path: Path, version: Any) -> None:
    module, folder = project.module("checkpoint.manifest"), tmp_path / "step_00000003"
    folder.mkdir()
    files = {"state.pt": {"size": 1, "sha256": "0" * 64}}
    facts = {"format_version": version, "step": 3, "files": files}
    (folder / "manifest.json").write_bytes(module.sealed(facts))
    with pytest.raises(project.module("checkpoint").CheckpointError, match="has format"):
        module.read_manifest(folder)


@pytest.mark.parametrize("step", ["3", None, float("inf")])
def test_a_step_that_is_no_number_is_refused(project: Project, tmp_path: Path, step: Any) -> None:
    module, folder = project.module("checkpoint.manifest"), tmp_path / "step_00000003"
    folder.mkdir()
    files = {"state.pt": {"size": 1, "sha256": "0" * 64}}
    facts = {"format_version": 1, "step": step, "files": files}
    (folder / "manifest.json").write_bytes(module.sealed(facts))
    with pytest.raises(project.module("checkpoint").CheckpointError, match="is not a manifest"):
        module.read_manifest(folder)


def test_damaged_manifests_neither_count_nor_go(project: Project, tmp_path: Path) -> None:
    """Nor does what a person has removed."""
    module, directory = project.module("checkpoint.publish"), tmp_path / "checkpoints"
    group = project.module("distributed").Group()

    def publisher() -> Any:
        return module.Publisher(directory, module.RetentionConfig(keep=2), group)

    def save(by: Any, *steps: int) -> list[int]:
        for step in steps:
            by.publish(step, lambda folder: (folder / "a").write_bytes(b"x") and ["a"], {})
        return sorted(int(path.name[5:]) for path in directory.iterdir())

    assert save(publisher(), 1, 2, 3) == [2, 3]
    (directory / "step_00000003/manifest.json").write_text("{}")
    second = publisher()
    assert save(second, 4) == [2, 3, 4]
    assert save(second, 5) == [3, 4, 5]
    shutil.rmtree(directory / "step_00000005")
    assert save(second, 6) == [3, 4, 6]


def test_a_save_that_cannot_even_begin_removes_nothing(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: there is no directory to write into, so there is none to remove."""
    module, directory = project.module("checkpoint.publish"), tmp_path / "checkpoints"
    publisher = module.Publisher(
        directory, module.RetentionConfig(), project.module("distributed").Group()
    )

    def write(folder: Path) -> list[str]:
        (folder / "a").write_bytes(b"x")
        return ["a"]

    def refused(step: int) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    publisher.publish(1, write, {})
    monkeypatch.setattr(publisher, "reserve", refused)
    with pytest.raises(project.module("checkpoint").CheckpointError, match="step 2 was not saved"):
        publisher.publish(2, write, {})
    assert sorted(path.name for path in (directory / "step_00000001").iterdir()) == [
        "a",
        "manifest.json",
    ]


def test_all_that_a_name_hangs_on_is_synced_before_it(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = project.module("checkpoint.publish")
    retention, group = module.RetentionConfig(), project.module("distributed").Group()
    directory = tmp_path / "new/checkpoints"
    done: list[tuple[str, Path]] = []
    sync, rename = module.sync_directory, os.rename
    monkeypatch.setattr(
        module, "sync_directory", lambda path: (done.append(("sync", Path(path))), sync(path))
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(("rename", Path(b))), rename(a, b)))
    fsync = os.fsync

    def note(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_file():
            done.append(("fsync", path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)

    def write(folder: Path) -> list[str]:
        done.append(("write", folder))
        (folder / "part").write_bytes(b"x")
        return ["part"]

    path = module.Publisher(directory, retention, group).publish(1, write, {})
    ((_, reserved),) = [one for one in done if one[0] == "write"]
    parents = [("sync", tmp_path / "new"), ("sync", tmp_path)]
    assert [one for one in done if one in parents] == parents  # their names are new
    after = done[done.index(("write", reserved)) + 1 :]
    files = [("fsync", reserved / "part"), ("fsync", reserved / "manifest.json")]
    assert after == [*files, ("sync", reserved), ("rename", path), ("sync", directory)]


def test_the_time_that_saves_take_is_told_by_the_line_and_in_all(
    project: Project, tmp_path: Path
) -> None:
    settings = {"train.steps": 8, "train.log_every": 1, "checkpoint.every": 2}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    run = tmp_path / "run"
    project("train", *project.settings, "--run-dir", str(run), *words)
    each = [record["checkpoint_blocked_seconds"] for record in records(run)]
    status = json.loads((run / "status.json").read_text())
    assert 0 < sum(each) < status["checkpoint_blocked_seconds"]


def test_what_is_no_plain_file_is_refused_as_data(project: Project, tmp_path: Path) -> None:
    """A pipe, of which reading would wait for a writer."""
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    said = project.refuses("train", "--device", "cpu", "--data.path", str(tmp_path))
    assert re.search(r"b\.txt.* regular file", said)


def test_on_a_cpu_a_step_is_judged_by_plain_numbers(project: Project) -> None:
    """An operator on a scalar tensor costs ten times as much; elsewhere the host must not wait."""
    judge_step = project.module("loss").judge_step
    sums, norm = torch.tensor([6.0, 3.0]), torch.tensor(12.0)
    here = judge_step(sums, norm, 1, 2.0)
    assert here == (pytest.approx(1 / 6, rel=1e-6), 4.0, False)
    assert not any(isinstance(value, torch.Tensor) for value in here)
    there = judge_step(sums.to("meta"), norm.to("meta"), 1, 2.0)
    assert all(isinstance(value, torch.Tensor) for value in there)


def test_verifying_is_divided_evenly(project: Project) -> None:
    module = project.module("checkpoint.manifest")
    sizes = {f"{n}": {"size": n} for n in range(1, 9)}
    for ranks in range(1, 10):
        dealt = [module.files_of_rank({"files": sizes}, rank, ranks) for rank in range(ranks)]
        assert sorted(name for names in dealt for name in names) == sorted(sizes)
        if 8 % (2 * ranks) == 0:
            assert {sum(map(int, names)) for names in dealt} == {36 // ranks}
