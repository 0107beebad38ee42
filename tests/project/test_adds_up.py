"""A new run that divides its batches tries whether the sums of compute_loss add up, and warns."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import free_ports
from tests.conftest import Project, project_fixture, run_together

project = project_fixture("of_sums", parallelism="single", checkpoint="torch_save", tracker="none")
sharded = project_fixture("of_sharded_sums", parallelism="fsdp", tracker="none")
copied = project_fixture("of_copied_sums", parallelism="ddp", tracker="none")
DIVIDED = {"train__global_batch_size": 8, "train__micro_batch_size": 4, "train__steps": 2}


def warnings_of(
    project: Project, run_dir: Path, patch: Any, log: Any, compute: Any, **changes: Any
) -> list[str]:
    """The warnings of a run with another compute_loss."""
    for module in ("train", "adds_up", "validation"):
        patch.setattr(project.module(module), "compute_loss", compute)
    log.clear()
    with log.at_level(logging.WARNING):
        project.module("train").run(project.config(run_dir=run_dir, **DIVIDED | changes))
    return [r.getMessage() for r in log.records if "does not add up" in r.getMessage()]


def changing(project: Project, change: Any) -> Any:
    """The render's compute_loss with another result."""
    compute = project.module("model").compute_loss
    return lambda model, batch: change(compute(model, batch), batch, model)


def contrastive(loss: Any, batch: Any, model: Any) -> Any:
    """Grows with the square of the batch."""
    return loss._replace(total=loss.total * len(batch["tokens"]), metrics={})


def test_a_metric_that_is_not_a_number_does_not_hide_a_random_model(project: Project) -> None:
    module = project.module("adds_up")
    sums = torch.tensor([[2.0, 4.0], [1.0, 2.0], [1.0, 2.0]]).repeat(2, 1, 1)
    sums = torch.cat([sums, torch.full((2, 3, 1), torch.nan)], dim=2)
    names = ["loss", "count", "metric"]
    assert not module.compare(module.Evaluation(sums, names), 2).is_random
    sums[1, 0, 0] = 3.0
    random = module.compare(module.Evaluation(sums, names), 2)
    assert random.is_random and random.is_too_random


def test_the_advice_for_a_metric_follows_its_own_count(project: Project) -> None:
    """Its values are means over other counts than those of the loss."""
    module = project.module("adds_up")
    whole, first, second = [4.0, 4.0, 2.5, 8.0], [2.0, 2.0, 1.0, 2.0], [2.0, 2.0, 3.0, 6.0]
    sums = torch.tensor([[whole, first, second]])
    names = ["loss", "count", "metric", "count of metric"]
    comparison = module.compare(module.Evaluation(sums, names), 4)
    assert comparison.wrong == [2] and "means" in comparison.advice(2)


def test_a_new_run_warns(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, where batches are divided; not at a resume, nor where model.py declares it."""
    given = (monkeypatch, caplog, changing(project, contrastive))
    (said,) = warnings_of(project, tmp_path / "run", *given)
    assert "loss of 4 samples" in said and "in parts" in said and "\n" not in said
    assert "it compares samples of a batch" in said and "ADDS_UP = False" in said
    assert warnings_of(project, tmp_path / "run", *given, train__steps=4) == []
    assert warnings_of(project, tmp_path / "whole", *given, train__micro_batch_size=8) == []
    # One sample has no halves, so two are tried.
    (said,) = warnings_of(project, tmp_path / "single", *given, train__micro_batch_size=1)
    assert "loss of 2 samples" in said
    monkeypatch.setattr(project.module("model"), "ADDS_UP", False, raising=False)
    assert warnings_of(project, tmp_path / "declared", *given) == []


# Losses, and the name in the warning; "" for no warning.
LOSSES: dict[str, tuple[Any, str]] = {
    "sums": (lambda loss, batch, model: loss, ""),
    "a mean": (lambda loss, batch, model: loss._replace(total=loss.total / loss.count), "loss"),
    "a constant count": (lambda loss, batch, model: loss._replace(count=1), "count"),
    "a mean as a metric": (
        lambda loss, batch, model: loss._replace(
            metrics={"first": (batch["tokens"][:, 0] < 110).float().mean() + 0.3}
        ),
        "first",
    ),
    "random in evaluation": (
        lambda loss, batch, model: loss._replace(total=loss.total * (1 + torch.randn(()) / 4)),
        "",
    ),
    "random and compared": (
        lambda loss, batch, model: loss._replace(
            total=loss.total * len(batch["tokens"]) * (1 + torch.randn(()) / 100)
        ),
        "loss",
    ),
    "a rounded count": (
        lambda loss, batch, model: loss._replace(metrics={"right": float(len(batch) > 0)}),
        "",
    ),
    "nan": (lambda loss, batch, model: loss._replace(metrics={"x": float("nan")}), ""),
}


@pytest.mark.parametrize("name", LOSSES)
def test_it_warns_of_what_is_wrong_alone(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    change, told = LOSSES[name]
    compute = changing(project, change)
    said = warnings_of(project, tmp_path / "run", monkeypatch, caplog, compute)
    assert len(said) == bool(told)
    assert not told or f"add up: {told} of 4 samples" in said[0]


def test_a_loss_that_cannot_be_tried_is_trained(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one that is written for one size of batches, which it has in training."""
    for size in (1, 4):

        def of_size(loss: Any, batch: Any, model: Any, size: int = size) -> Any:
            assert len(batch["tokens"]) == size
            return loss

        options = {"train__micro_batch_size": size, "train__validate_samples": size}
        given = (monkeypatch, caplog, changing(project, of_size))
        assert warnings_of(project, tmp_path / f"run_{size}", *given, **options) == []


def test_loader_workers_read_what_is_tried(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is open here already would be shared by the workers, with its position."""
    chunks = project.module("data").Chunks
    read, here = chunks.__getitems__, os.getpid()
    pids: set[int] = set()

    def noted(self: Any, ids: Any) -> Any:
        if "train" in vars(self):
            pids.add(os.getpid())
        return read(self, ids)

    monkeypatch.setattr(chunks, "__getitems__", noted)
    training = project.module("train")
    build = training.build_datasets

    def marked(config: Any) -> Any:
        datasets = build(config)
        object.__setattr__(datasets[0], "train", True)
        return datasets

    monkeypatch.setattr(training, "build_datasets", marked)
    settings = {"run_dir": tmp_path / "run", "train__loader_workers": 1}
    training.run(project.config(**DIVIDED | settings))
    assert here not in pids
    training.run(project.config(**DIVIDED | {"run_dir": tmp_path / "here"}))
    assert here in pids


# A contrastive loss of a model with a buffer that each forward writes, dropout, and numbers drawn
# by numpy in the training alone.
MODEL = """

_build_model, _compute_loss = build_model, compute_loss


def build_model(config, spec):
    model = _build_model(config, spec)
    model.register_buffer("seen", torch.zeros(()))
    model.register_buffer("cache", torch.zeros(()), persistent=False)
    return model


def compute_loss(model, batch):
    import numpy

    loss = _compute_loss(model, batch)
    model.seen += len(batch["tokens"])
    model.cache = model.cache + 1
    total = loss.total * len(batch["tokens"]) + 0 * model.cache
    if model.training:
        noise = 1 + torch.rand(()).item() / 9 + numpy.random.rand() / 9 + float(model.cache) / 99
        total = total * noise
    return LossSum(total, loss.count, {})
"""


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp"])
def test_the_run_is_the_same_to_the_bit(
    kind: str, project: Project, copied: Project, sharded: Project, tmp_path: Path
) -> None:
    """Commands of their own, with the check and without it, on one process and on two ranks."""
    of_kind = {"single": project, "ddp": copied, "fsdp": sharded}[kind]
    ranks = 1 if kind == "single" else 2
    model = of_kind.folder / f"src/{of_kind.name}/model.py"
    original = model.read_text()
    tensors, lines = [], []
    try:
        for declared in ("", "\nADDS_UP = False\n"):
            model.write_text(original + MODEL + declared)
            run_dir = tmp_path / f"run{len(tensors)}"
            words = f"-m {of_kind.name} train --run-dir {run_dir} --train.steps 5"
            words += " --train.global-batch-size 8 --train.micro-batch-size 4"
            (port,) = free_ports(1)
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            meeting |= {"LOCAL_WORLD_SIZE": str(ranks), "WORLD_SIZE": str(ranks)}
            fixed = {"PYTHONPATH": str(of_kind.folder / "src")}
            environments = [fixed]
            if ranks > 1:
                environments = []
                for rank in ("0", "1"):
                    environments.append(fixed | meeting | {"RANK": rank, "LOCAL_RANK": rank})
            data = ("--preset", "tiny", "--device", "cpu")
            data += ("--data.path", str(of_kind.folder / "text.txt"))
            run_together([sys.executable, *words.split(), *data], 300, environments)
            tensors.append(of_kind.tensors(run_dir))
            logs = [*run_dir.glob("*.log"), *run_dir.glob("logs/*")]
            text = "".join(path.read_text() for path in logs)
            lines.append(text.count("compute_loss does not add up: loss of 4 samples"))
    finally:
        model.write_text(original)
    assert lines == [1, 0]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[1])
    assert float(tensors[0]["model.seen"]) > 0
