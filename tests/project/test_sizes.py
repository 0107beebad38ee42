"""Data sets of one sample, of none, smaller than a batch or than the number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset

from tests.conftest import Project, drill, project_fixture

project = project_fixture("of_sizes", task="image_classifier", parallelism="ddp", tracker="none")


def few(project: Project, patch: pytest.MonkeyPatch, training: int, validation: int) -> None:
    """Cut the data of all runs to so many samples."""
    loop = project.module("train")
    build = loop.build_datasets

    def built(config: Any) -> Any:
        first, second, spec = build(config)
        return Subset(first, range(training)), Subset(second, range(validation)), spec

    patch.setattr(loop, "build_datasets", built)


def test_a_few_samples_have_the_same_losses_on_more_ranks(project: Project, tmp_path: Path) -> None:
    """Three ranks with one sample, with two, and with seven that no batch divides."""
    sources = {"of_sizes": project.folder / "src"}
    jobs = [(ranks, str(tmp_path), "of_sizes") for ranks in (1, 3)]
    drill("sizes.py", *jobs, sources=sources)
    alone, together = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 3))
    assert set(alone) == {"1", "2", "7"}
    for count, losses in alone.items():
        assert len(losses) == 6
        assert together[count] == pytest.approx(losses, abs=1e-5), count


@pytest.mark.parametrize(("training", "validation"), [(0, 8), (8, 0)])
def test_no_samples_are_one_line(
    project: Project, monkeypatch: pytest.MonkeyPatch, training: int, validation: int
) -> None:
    few(project, monkeypatch, training, validation)
    said = project.refuses("train", "--preset", "tiny", "--device", "cpu", "--name", "none")
    name = "validation" if training else "training"
    assert said == f"the {name} data (build_datasets in data.py) is empty: check its path"


def test_data_that_grow_between_two_runs_are_named(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of samples depends on their number, so a resume would see some of them twice."""
    command = ("train", "--preset", "tiny", "--device", "cpu", "--name", "grown", "--train.steps")
    few(project, monkeypatch, 100, 8)
    project(*command, "3")
    monkeypatch.undo()
    few(project, monkeypatch, 101, 8)
    said = project.refuses(*command, "6")
    assert "100 saved, 101 now" in said
