"""What a dataset draws from the global random numbers is a function of (seed, position)."""

import itertools
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset

from benchmarks.common import free_ports
from tests.conftest import Project, bake, project_fixture, run_together

project = project_fixture(
    "of_draws", task="image_classifier", parallelism="single", checkpoint="torch_save"
)


def draw() -> list[float]:
    """A number of each generator that transforms use."""
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


class Augmented:
    """Samples of a dataset, with noise that depends on what is drawn."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        sample = {name: values[0] for name, values in self.samples.__getitems__([number]).items()}
        drawn = torch.tensor(draw())
        return {**sample, "images": sample["images"] + drawn.sum(), "drawn": drawn}


class AtOnce(Augmented):
    """The same, read as batches."""

    def __getitems__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        drawn = torch.tensor([draw() for _ in numbers])
        return {**self.samples.__getitems__(numbers), "drawn": drawn}


def set_up(project: Project, kind: type = Augmented, **changes: Any) -> Any:
    """A state whose training and validation data draw."""
    training = project.module("train")
    build = training.build_datasets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "build_datasets", lambda c: (*map(kind, build(c)[:2]), build(c)[2]))
        return training.setup(project.config(data__path=None, **changes))


def draws(
    project: Project, state: Any, step: int, micro_batch: int = 8, ranks: int = 1
) -> list[list[float]]:
    """What is drawn for the samples of a global batch of 8, divided so."""
    micro_batches = project.module("sampling").micro_batches
    plans = [micro_batches(8, micro_batch, rank, ranks) for rank in range(ranks)]
    batches = [batch for plan in plans for batch in state.loader.of(step, plan)]
    return torch.cat([batch["drawn"] for batch in batches]).tolist()


BATCH = {"train__global_batch_size": 8, "train__micro_batch_size": 8}


def test_each_position_has_its_own_on_any_number_of_ranks(project: Project) -> None:
    state = set_up(project, **BATCH)
    found = draws(project, state, 3)
    for generator in zip(*found, strict=True):
        assert len({*generator}) == 8
    for micro_batch, ranks in ((8, 1), (3, 1), (8, 2), (2, 2), (1, 8)):
        assert draws(project, state, 3, micro_batch, ranks) == found
    others = draws(project, state, 4), draws(project, set_up(project, train__seed=1, **BATCH), 3)
    assert all(not set(np.ravel(found)) & set(np.ravel(other)) for other in others)


def stacked(samples: Any) -> StackDataset:
    """Two datasets side by side, and one of them draws."""
    return StackDataset(drawing=Augmented(samples), plain=range(len(samples)))


# What projects put around a dataset that draws in `__getitem__`, as random_split does.
WRAPPED = {
    "subset": lambda samples: Subset(Augmented(samples), range(50)),
    "of a subset": lambda samples: Subset(Subset(Augmented(samples), range(60)), range(50)),
    "joined": lambda samples: ConcatDataset([Augmented(samples), Augmented(samples)]),
    "of joined": lambda samples: Subset(ConcatDataset([Augmented(samples)] * 2), range(50)),
    "stacked": stacked,
}


@pytest.mark.parametrize("overfit", [0, 2])
@pytest.mark.parametrize("name", WRAPPED)
def test_what_stands_around_a_dataset_changes_no_draws(
    project: Project, name: str, overfit: int
) -> None:
    """Subset of torch reads batches for one that cannot, and so does --train.overfit."""
    state = set_up(project, WRAPPED[name], train__overfit=overfit, **BATCH)

    def drawn(micro_batch: int, ranks: int) -> list[list[float]]:
        micro_batches = project.module("sampling").micro_batches
        plans = [micro_batches(8, micro_batch, rank, ranks) for rank in range(ranks)]
        batches = [batch for plan in plans for batch in state.loader.of(3, plan)]
        samples = [batch["drawing"] if name == "stacked" else batch for batch in batches]
        return torch.cat([batch["drawn"] for batch in samples]).tolist()

    found = drawn(8, 1)
    assert len(set(np.ravel(found))) == 24
    for division in ((4, 1), (3, 1), (8, 2), (2, 2)):
        assert drawn(*division) == found


def test_batches_have_their_own(project: Project) -> None:
    state = set_up(project, AtOnce, **BATCH)
    found = draws(project, state, 3)
    assert draws(project, state, 3) == found and len(set(np.ravel(found))) == 24
    assert draws(project, state, 3, ranks=2)[:4] == found[:4]
    assert not set(np.ravel(found)) & set(np.ravel(draws(project, state, 4)))


@pytest.mark.parametrize("kind", [Augmented, AtOnce])
def test_a_resume_and_loader_workers_draw_the_same(
    project: Project, tmp_path: Path, kind: type
) -> None:
    """Validation, too: the weights and all figures are the same to the bit."""
    training = project.module("train")
    build, run = training.build_datasets, training.run
    settings = {"data__path": None, "train__steps": 9, "train__validate_every": 3, **BATCH}
    settings |= {"checkpoint__every": 1, "checkpoint__keep": 9}

    def train(name: str, workers: int) -> Any:
        changes = settings | {"run_dir": tmp_path / name, "train__loader_workers": workers}
        return run(project.config(**changes)).validation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "build_datasets", lambda c: (*map(kind, build(c)[:2]), build(c)[2]))
        figures = train("whole", 0)
        wanted = project.tensors(tmp_path / "whole")
        for workers in (0, 2):
            name = f"resumed_{workers}"
            shutil.copytree(tmp_path / "whole", tmp_path / name)
            for step in range(5, 10):
                shutil.rmtree(tmp_path / name / f"checkpoints/step_{step:08}")
            assert train(name, workers) == figures
            found = project.tensors(tmp_path / name)
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_datasets_are_built_alike(project: Project) -> None:
    """A split that is drawn in build_datasets is the same on each rank, and after a resume."""
    training, found = project.module("train"), []
    build = training.build_datasets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "build_datasets", lambda c: (found.append(draw()), build(c))[1])
        for seed in (0, 0, 1):
            training.setup(project.config(data__path=None, train__seed=seed, **BATCH))
    assert found[0] == found[1] and not {*found[0]} & {*found[2]}


def test_micro_batches_are_near_equal(project: Project) -> None:
    """A micro-batch of one sample that is left over would be the end of batch statistics."""
    micro_batches = project.module("sampling").micro_batches

    def sizes(*division: int) -> list[int]:
        return [s.indices.stop - s.indices.start for s in micro_batches(*division) if s.weight]

    assert sizes(9, 8, 0, 1) == [5, 4] and sizes(60, 16, 0, 1) == [15] * 4
    for batch, micro_batch, ranks in itertools.product(range(1, 30), range(1, 20), range(1, 6)):
        plans = [micro_batches(batch, micro_batch, rank, ranks) for rank in range(ranks)]
        assert len({*map(len, plans)}) == 1
        places = [n for p in plans for s in p if s.weight for n in range(batch)[s.indices]]
        assert places == list(range(batch))
        for rank in range(ranks):
            if found := sizes(batch, micro_batch, rank, ranks):
                assert found[0] == max(found) <= min(micro_batch, min(found) + 1)


DRAWING = """

import os
import random

import numpy

_build_datasets = build_datasets


class _Drawing:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        numbers = torch.rand(()).item(), numpy.random.random(), random.random()
        with open(f"{os.environ['DRAWS']}-{os.environ.get('RANK', '0')}", "a") as file:
            print(number, *numbers, file=file)
        return {name: values[0] for name, values in self.samples.__getitems__([number]).items()}


def build_datasets(config):
    train, validation, spec = _build_datasets(config)
    return _Drawing(train), validation, spec
"""


def test_commands_draw_the_same_on_ranks_in_workers_and_after_a_resume(tmp_path: Path) -> None:
    """Processes of their own: nothing of a test's process can help them."""
    project = bake(tmp_path / "drawing", package_name="of_drawing", task="image_classifier")
    with (project / "src/of_drawing/data.py").open("a") as file:
        file.write(DRAWING)
    with (project / "src/of_drawing/model.py").open("a") as file:
        # A new run would try the first samples on all ranks.
        file.write("\nADDS_UP = False\n")
    (port,) = free_ports(1)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}

    def train(run: str, draws: str, *options: str, ranks: int = 1) -> list[set[str]]:
        """The samples that each rank reads, with what is drawn for each."""
        words = f"-m of_drawing train --preset tiny --device cpu --run-dir {tmp_path / run}"
        words += " --train.global-batch-size 8 --train.micro-batch-size 4 --train.validate-every 0"
        each = [{"WORLD_SIZE": str(ranks), "RANK": str(r), "LOCAL_RANK": str(r)} for r in (0, 1)]
        fixed = {"PYTHONPATH": str(project / "src"), "DRAWS": str(tmp_path / draws)}
        environments = [fixed | meeting | it for it in each] if ranks > 1 else [fixed]
        run_together([sys.executable, *words.split(), *options], 300, environments)
        files = [tmp_path / f"{draws}-{rank}" for rank in range(ranks)]
        return [{*path.read_text().splitlines()} for path in files]

    (whole,) = train("a", "whole", "--train.steps", "8")
    assert len(whole) == 64 and len({line.split()[1] for line in whole}) == 64
    (first,) = train("b", "first", "--train.steps", "5")
    (rest,) = train("b", "rest", "--train.steps", "8", "--train.loader-workers", "2")
    assert len(first) == 40 and first < whole and whole - first <= rest
    one, two = train("c", "ranks", "--train.steps", "8", ranks=2)
    assert one | two == whole and not one & two
    (others,) = train("d", "others", "--train.steps", "8", "--train.seed", "1")
    assert not {n for line in whole for n in line.split()[1:]} & {
        n for line in others for n in line.split()[1:]
    }


class Reading(Augmented):
    """Says which process reads a sample."""

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(number), "process": torch.tensor(os.getpid())}


def test_before_the_workers_start_no_sample_is_read_in_this_process(project: Project) -> None:
    """A file that a dataset opens at its first sample would be shared by all workers."""
    state = set_up(project, Reading, train__loader_workers=1)
    (batch,) = state.loader.of(0, state.plan[:1])
    assert os.getpid() not in batch["process"]
    trained = state.loader.next()
    # Now they are there.
    (again,) = state.loader.of(0, state.plan[:1])
    state.loader.close()
    assert {*again["process"].tolist()} == {os.getpid()}
    for read in (trained[0], again):
        assert torch.equal(batch["images"], read["images"])


def test_an_attribute_named_order_is_the_users_own(project: Project) -> None:
    class Ordered(Augmented):
        order = "random"

    state = set_up(project, Ordered)
    assert len(state.loader.next()) == len(state.plan)
