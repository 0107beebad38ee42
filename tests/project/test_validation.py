"""Validation in batches of its own size, and where early stopping ends a run."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import Project, project_fixture

ANSWERS = {"parallelism": "single", "checkpoint": "torch_save", "tracker": "none"}
project = project_fixture("validation_batches", **ANSWERS)


def test_the_size_of_a_validation_batch_changes_no_metric(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the size of each forward, also above the global batch."""
    module = project.module("validation")
    compute_loss = module.compute_loss
    sizes: list[int] = []

    def noting(model: Any, batch: Any) -> Any:
        sizes.append(len(batch["tokens"]))
        return compute_loss(model, batch)

    monkeypatch.setattr(module, "compute_loss", noting)
    text = tmp_path / "text.txt"
    text.write_text("Was ever woman in this humour wooed? " * 1000)
    metrics: dict[int, dict[str, float]] = {}
    for size, expected in ((0, {4}), (1, {1}), (5, {4}), (13, {12, 13}), (100, {25})):
        sizes.clear()
        changes: dict[str, Any] = {
            "train__validate_batch_size": size,
            "train__validate_samples": 25,
        }
        changes["data__path"] = text
        config = project.config(**changes, train__global_batch_size=8, train__micro_batch_size=4)
        metrics[size] = module.validate(project.module("train").setup(config))
        assert sum(sizes) == 25, (size, sizes)
        assert max(sizes) == max(expected)
    for figures in metrics.values():
        assert figures == pytest.approx(metrics[0], rel=1e-6)


def test_no_sample_of_a_single_process_counts_as_padding(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else losses that compare samples would leave them out, also in the next step of training."""
    gathered, validation = project.module("gather").Gathered, project.module("validation")
    compute, found = validation.compute_loss, set[bool]()

    def recording(*given: Any) -> Any:
        found.add(bool(gathered.is_padding))
        return compute(*given)

    monkeypatch.setattr(validation, "compute_loss", recording)
    state = project.module("train").setup(project.config())
    validation.validate(state)
    assert found == {False} and gathered.is_padding is False


def test_a_run_that_a_callback_ends_has_its_last_checkpoint_validated(
    project: Project, tmp_path: Path
) -> None:
    def end(state: Any, figures: dict[str, float]) -> None:
        if state.step == 4:
            state.finish("good enough")

    changes = {"train__validate_every": 2, "train__steps": 8, "checkpoint__every": 3}
    config = project.config(run_dir=tmp_path, **changes)
    result = project.module("train").run(config, [SimpleNamespace(after_validation=end)])
    assert (result.status, result.step) == ("finished", 4)
    manifest = json.loads((tmp_path / "checkpoints/step_00000004/manifest.json").read_text())
    assert manifest["validation_loss"] == result.validation["validation_loss"]
    assert manifest["score"][1] == manifest["validation_loss"]
    assert json.loads((tmp_path / "status.json").read_text())["reason"] == "good enough"
    assert project.module("train").run(config).status == "already finished"


def test_the_best_checkpoint_is_exported_and_loaded(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the newest; without the figure there is no best one."""

    def score(state: Any, figures: dict[str, float]) -> None:
        figures["score"] = {2: 1.0, 4: 5.0, 6: 2.0}[state.step]

    changes = {"train__validate_every": 2, "train__steps": 6, "checkpoint__every": 2}
    changes |= {"checkpoint__best": "validation_score", "checkpoint__best_is": "max"}
    run = tmp_path / "run"
    config = project.config(run_dir=run, **changes)
    project.module("train").run(config, [SimpleNamespace(after_validation=score)])
    words = ("export", "--run-dir", str(run), "--to")
    project(*words, str(tmp_path / "best.safetensors"), "--step", "best")
    assert "step 4 from " in capsys.readouterr().out
    project(*words, str(tmp_path / "fourth.safetensors"), "--step", "4")
    project(*words, str(tmp_path / "newest.safetensors"))
    best, fourth, newest = (
        (tmp_path / f"{name}.safetensors").read_bytes() for name in ("best", "fourth", "newest")
    )
    assert best == fourth != newest
    load_trained = sys.modules[project.name].load_trained
    state, expected = (load_trained(run, "cpu", step)[0].state_dict() for step in ("best", 4))
    assert all(torch.equal(state[name], expected[name]) for name in expected)

    other = tmp_path / "other"
    # No validation has this figure.
    project.module("train").run(project.config(run_dir=other, **changes))
    no_number = "no validation had a number for validation_score"
    assert no_number in project.refuses("infer", "--run-dir", str(other), "--step", "best")

    def no_score(state: Any, figures: dict[str, float]) -> None:
        figures["score"] = math.nan

    absent = tmp_path / "absent"
    config = project.config(run_dir=absent, **changes)
    project.module("train").run(config, [SimpleNamespace(after_validation=no_score)])
    assert no_number in project.refuses("infer", "--run-dir", str(absent), "--step", "best")
