"""Checkpoints of earlier releases load and are gone on from: those in parts where parts are saved.

`fixtures/` holds what version 0.1.0 wrote at ed90adf with each answer, on one rank and on two,
`fixtures/73d225d/` and `fixtures/1ec93ac/` the same of those commits (with Muon, an average of the
weights, and in the former one run that saved at intervals of its own choice), and the sha256 of
each tensor, as those versions read it.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Project, records

FIXTURES = Path(__file__).parent / "fixtures"
TENSORS = json.loads((FIXTURES / "tensors.json").read_text())


@pytest.fixture(scope="module", params=["torch_save", "dcp", "dcp_async"])
def project(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    name, answers = f"later_{request.param}", {"checkpoint": request.param, "tracker": "none"}
    with Project.imported(tmp_path_factory.mktemp("later"), name, **answers) as project:
        yield project


@pytest.mark.parametrize("written", TENSORS)
def test_an_old_checkpoint_is_read_and_gone_on_from(
    project: Project, written: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / written, run)
    # The settings of another release: those that are none any more are named, in one line.
    words = ("--config", str(run / "config.json"), "--data.path", str(FIXTURES / "text.txt"))
    more = ("--run-dir", str(run), "--train.steps", "8")
    if project.name == "later_torch_save" and not [*run.glob("checkpoints/*/state.pt")]:
        line = project.refuses("train", *words, *more)
        assert "is a sharded checkpoint" in line and "`export` it to a .pt file" in line
        return
    tensors = project.tensors(run)
    found = {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in tensors.items()}
    assert found == TENSORS[written]
    project("train", *words, *more)
    assert f"resuming from {run / 'checkpoints/step_00000006'}" in caplog.text
    left_out = [
        line
        for line in caplog.text.splitlines()
        if "ignored settings that this project does not have: " in line
    ]
    assert len(left_out) <= 1
    if is_oldest := "/" not in written:
        assert "checkpoint.url" in left_out[0]
    assert [record["step"] for record in records(run)] == [7, 8]
    name = "adamw" if is_oldest else "muon"  # an old run has no name; the presets' is another now
    assert project.module("config").load(run).optim.name == name
    project("verify", "--run-dir", str(run))


def test_the_oldest_run_keeps_its_optimizer(project: Project, tmp_path: Path) -> None:
    """It has no `optim.name`, since there was only AdamW. The same command resumes it."""
    written = "torch_save-1" if project.name == "later_torch_save" else "dcp-1"
    shutil.copytree(FIXTURES / written, tmp_path / "run")
    words = ("--data.path", str(FIXTURES / "text.txt"), "--device", "cpu", "--train.steps", "7")
    project("train", "--run-dir", str(tmp_path / "run"), *words)
    assert project.module("config").load(tmp_path / "run").optim.name == "adamw"
    assert records(tmp_path / "run")[-1]["step"] == 7


def test_an_old_address_in_an_object_store_is_named(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a run that had its checkpoints in an object store, of which this project knows nothing."""
    caplog.set_level(logging.INFO)
    settings = json.loads((FIXTURES / "dcp-1/config.json").read_text())
    settings["checkpoint"]["url"] = "s3://bucket/run"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    project.module("config").load(tmp_path / "config.json")
    assert re.search("ignored settings that .*: .*checkpoint.url", caplog.text)
    words = ("--data.path", str(FIXTURES / "text.txt"), "--preset", "tiny", "--device", "cpu")
    for refused in (
        ("train", *words, "--run-dir", str(tmp_path)),
        ("train", *words, "--run-dir", "s3://bucket/run"),
        ("train", *words, "--name", "new", "--init-from", "s3://bucket/run"),
        ("verify", "--run-dir", str(tmp_path)),
        ("verify", "--run-dir", "s3://bucket/run"),
        ("export", "--source", "s3://bucket/run", "--to", str(tmp_path / "all.pt")),
    ):
        line = project.refuses(*refused)
        assert "storage=object_store" in line and "\n" not in line, refused
