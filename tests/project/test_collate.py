"""Samples become a batch, with and without loader workers; what cannot is told in one line."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, random_split

from tests.conftest import Project, project_fixture

project = project_fixture(
    "of_collate", parallelism="single", checkpoint="torch_save", tracker="none"
)
LENGTH = 33


def tokens(number: int, length: int = LENGTH) -> torch.Tensor:
    return (torch.arange(length) * (number + 3) % 100).to(torch.uint8)


class Samples(Dataset):
    """Samples that a function makes from their number."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> Any:
        return self.make(number)


@dataclass(frozen=True)
class Sample:
    """As many projects have it; the model of the render reads it as a dictionary."""

    tokens: Any
    note: Any = "a"

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def picture(number: int) -> dict[str, Any]:
    return {"tokens": tokens(number), "x": {"inner": Image.new("L", (8, 8))}}


# What the dataset returns for a sample, and what is told of it.
ODD = {
    "none": (
        lambda n: None if n % 10 == 7 else {"tokens": tokens(n)},
        r"sample \d*7 is None\. ",
    ),
    "picture": (picture, r"'x\.inner' of sample \d+ is of type PIL\.Image\.Image\. "),
    "ragged list": (
        lambda n: {"tokens": tokens(n), "boxes": [1.0] * (1 + n % 2)},
        r"'boxes' of sample \d+ has [12] values, that of sample \d+ has [12]\. ",
    ),
    "ragged tensors": (
        lambda n: (tokens(n), torch.zeros(3 + n % 2)),
        r"'\[1\]' of sample \d+ has the shape \([34],\), that of sample \d+ has \([34],\)\. ",
    ),
    "another kind": (
        lambda n: {"tokens": tokens(n)} if n % 2 else (tokens(n),),
        r"sample \d+ is of type (dict|tuple), sample \d+ of type (dict|tuple)\. ",
    ),
    "a key missing": (
        lambda n: {"tokens": tokens(n), "mask": 1} if n % 2 else {"mask": 1},
        r"sample \d+ has no 'tokens', sample \d+ has\. ",
    ),
    "a dataclass of None": (
        lambda n: Sample(tokens(n), None if n % 2 else 0.5),
        r"'note' of sample \d*[13579] is None\. ",
    ),
    "a type of one's own": (
        lambda n: {"tokens": object()},
        r"'tokens' of sample \d+ is of type object\. ",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_samples_that_cannot_be_stacked_are_one_line(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, told = ODD[name]
    project.train_on(monkeypatch, Samples(make))
    for workers in ("0", "1") if name in ("none", "picture") else "0":
        words = (*project.settings, "--run-dir", str(tmp_path / f"run{workers}"))
        said = project.refuses("train", *words, "--train.loader-workers", workers)
        assert "\n" not in said
        assert re.match(
            f"the samples of a batch cannot be stacked: {told}In data.py, return tensors, "
            ".*__getitems__",
            said,
        ), said


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_may_be_dataclasses(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    sampling, training = project.module("sampling"), project.module("train")
    project.train_on(monkeypatch, Samples(lambda n: Sample(tokens(n))))
    settings = {"run_dir": tmp_path / "run", "train__loader_workers": workers, "train__steps": 2}
    assert training.run(project.config(**settings)).step == 2
    loader = training.setup(project.config(**settings)).loader
    (batch,) = loader.of(0, sampling.micro_batches(4, 4, 0, 1))
    assert type(batch) is Sample and batch.note == ["a"] * 4
    ids = loader.source.order.ids(0)[:4].tolist()
    assert torch.equal(batch.tokens, torch.stack([tokens(number) for number in ids]))


class Padded(Samples):
    """Sequences of different lengths with draws, padded by a method of the dataset's own."""

    def __init__(self) -> None:
        super().__init__(lambda n: {"tokens": tokens(n, 20 + n % 13)})

    def __getitem__(self, number: int) -> Any:
        return {**super().__getitem__(number), "drawn": torch.rand(())}

    def collate(self, samples: list[Any]) -> Any:
        batch = torch.zeros(len(samples), LENGTH, dtype=torch.uint8)
        for row, sample in zip(batch, samples, strict=True):
            row[: len(sample["tokens"])] = sample["tokens"]
        return {"tokens": batch, "drawn": torch.stack([sample["drawn"] for sample in samples])}


@pytest.mark.parametrize("overfit", [0, 1])
@pytest.mark.parametrize("joined", [False, True], ids=["", "joined"])
def test_a_dataset_may_collate_its_samples(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overfit: int,
    joined: bool,
) -> None:
    """After what each sample draws, which no division changes; also what torch has wrapped."""
    sampling, training = project.module("sampling"), project.module("train")
    project.train_on(monkeypatch, ConcatDataset([Padded(), Padded()]) if joined else Padded())
    settings = {"run_dir": tmp_path / "run", "train__overfit": overfit, "train__steps": 2}
    settings |= {"train__global_batch_size": 8, "train__micro_batch_size": 8}
    assert training.run(project.config(**settings, train__loader_workers=1)).step == 2
    loader = training.setup(project.config(**settings)).loader
    batches = []
    for size in (8, 2):
        parts = loader.of(3, sampling.micro_batches(8, size, 0, 1))
        batches.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    assert len(set(batches[0]["drawn"].tolist())) == 8
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in ("tokens", "drawn"))


class Marked(Padded):
    """With an `augment`, too, which notes the keys that it is given."""

    def augment(self, batch: Any, keys: Any) -> Any:
        return {**batch, "keys": torch.from_numpy(keys.view("int64"))}


class Doubled(Subset):
    """A subset whose own method reads batches, as lists of samples."""

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        samples = [self.dataset[self.indices[number]] for number in numbers]
        return [{**sample, "drawn": sample["drawn"] + 5} for sample in samples]


class Named(Subset):
    """A subset with a sample and a collate of its own."""

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]

    def __getitem__(self, number: Any) -> Any:
        return {**super().__getitem__(number), "number": number}

    def collate(self, samples: list[Any]) -> Any:
        numbers = torch.tensor([sample["number"] for sample in samples])
        return {**self.dataset.collate(samples), "number": numbers}


WRAPPED = {
    "random_split": lambda: random_split(Marked(), [60, 40])[0],
    "subset of a subset": lambda: Subset(Subset(Marked(), range(90)), range(80)),
    "joined": lambda: ConcatDataset([Marked(), Subset(Marked(), range(50))]),
    "own __getitems__": lambda: Doubled(Marked(), range(60)),
    "own collate": lambda: Named(Marked(), range(60)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_torch_has_wrapped_keeps_its_augment_and_its_collate(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And a subclass of Subset is asked for what it has itself."""
    sampling, training = project.module("sampling"), project.module("train")
    project.train_on(monkeypatch, WRAPPED[name]())
    settings = {"run_dir": tmp_path / "run", "train__steps": 2}
    settings |= {"train__global_batch_size": 8, "train__micro_batch_size": 8}
    assert training.run(project.config(**settings, train__loader_workers=1)).step == 2
    loader = training.setup(project.config(**settings)).loader
    (batch,) = loader.of(3, sampling.micro_batches(8, 8, 0, 1))
    order = loader.source.order
    keys = sampling.sample_keys(order.seed, order.positions(3)).view("int64")
    assert batch["keys"].tolist() == keys.tolist()
    if name == "own __getitems__":
        assert batch["drawn"].min() >= 5
    if name == "own collate":
        assert batch["number"].tolist() == order.ids(3).tolist()
    few = training.setup(project.config(**settings, train__overfit=1)).loader
    (plain,) = few.of(3, sampling.micro_batches(8, 8, 0, 1))
    assert "keys" not in plain, "--train.overfit augments nothing"


@pytest.mark.parametrize(
    ("dataset", "method", "names"),
    [
        (
            lambda: StackDataset(a=Marked(), b=range(100)),
            "augment",
            "StackDataset (of Marked, range)",
        ),
        (
            lambda: ConcatDataset([Padded(), Marked()]),
            "augment",
            "ConcatDataset (of Padded, Marked)",
        ),
        (
            lambda: ConcatDataset([Padded(), Samples(lambda n: {"tokens": tokens(n)})]),
            "collate",
            "ConcatDataset (of Padded, Samples)",
        ),
    ],
    ids=["stacked", "joined", "joined, collate"],
)
def test_a_method_that_would_not_be_called_is_one_line(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset: Any,
    method: str,
    names: str,
) -> None:
    project.train_on(monkeypatch, dataset())
    said = project.refuses("train", *project.settings, "--run-dir", str(tmp_path / "run"))
    kind, _, parts = names.partition(" (")
    assert said == (
        f"`{method}` of a dataset inside a {kind} ({parts} would not be called: define "
        f"`{method}` in a subclass of {kind} (data.py)"
    )


FULL = "unable to write to file </torch_71_3082_0>: No space left on device (28)"


@pytest.mark.parametrize("finished", [False, True], ids=["samples", "batches"])
def test_full_shared_memory_is_one_line(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """Samples are stacked in it; a finished batch is copied to it when it is sent."""

    def full(*given: Any, **options: Any) -> None:
        raise RuntimeError(FULL)

    if not finished:
        project.train_on(monkeypatch, Samples(lambda n: {"tokens": tokens(n)}))
    name = "_share_fd_cpu_" if finished else "_new_shared"
    monkeypatch.setattr(torch.UntypedStorage, name, full)
    words = (*project.settings, "--run-dir", str(tmp_path / "run"), "--train.loader-workers", "1")
    said = project.refuses("train", *words)
    assert (
        "shared memory (/dev/shm), through which loader workers send batches, is full" in said
        and "stacked" not in said
    )
    assert "--shm-size" in said and "--ipc=host" in said and "--train.loader-workers 0" in said
    assert "\n" not in said and "TMPDIR" not in said


def test_a_killed_worker_of_too_little_shared_memory_is_one_line(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch tells it after a bus error."""
    bus_error = "DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that "
    bus_error += "dataloader's workers are out of shared memory. Please try to raise your limit."

    class Iterator:
        _workers = ()

        def __next__(self) -> None:
            raise RuntimeError(bus_error)

        def _shutdown_workers(self) -> None:
            pass

    loader = project.module("train").setup(project.config(run_dir=tmp_path / "run")).loader
    loader.iterator = Iterator()
    with pytest.raises(project.module("errors").UserError, match=r"\(/dev/shm\), .* is full"):
        loader._wait(None)


@pytest.mark.parametrize("hard", [False, True], ids=["soft limit", "hard limit"])
def test_few_open_files(project: Project, tmp_path: Path, hard: bool) -> None:
    """A step holds a file for each tensor of its micro-batches: a soft limit is raised."""
    words = f"-m {project.name} train --preset tiny --device cpu --train.steps 2"
    words += f" --run-dir {tmp_path / 'run'} --data.path text.txt --train.loader-workers 2"
    words += " --train.global-batch-size 300 --train.micro-batch-size 1"
    outcome = subprocess.run(
        ["bash", "-c", f"ulimit -{'H' if hard else ''}Sn 200; exec {sys.executable} {words}"],
        cwd=project.folder,
        env=os.environ | {"PYTHONPATH": str(project.folder / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if not hard:
        assert outcome.returncode == 0, outcome.stderr
        return
    assert outcome.returncode == 2, outcome.stderr
    *_, line = outcome.stderr.splitlines()
    assert line.startswith("error: too many open files: ") and "ulimit -n" in line
    assert "Traceback" not in outcome.stderr


# As Python 3.14 does by default: the workers are no copies of this process.
FORKSERVER = """
import multiprocessing, sys
multiprocessing.set_start_method("forkserver")
from of_collate import __main__, errors, train

build = train.build_datasets


def with_a_lambda(config):
    training, validation, spec = build(config)
    training.options = {"transform": lambda sample: sample}
    return training, validation, spec


train.build_datasets = with_a_lambda
sys.exit(errors.run_main(lambda: __main__.dispatch(sys.argv[1:])))
"""


def test_what_workers_cannot_be_sent_is_named(project: Project, tmp_path: Path) -> None:
    words = (*project.settings, "--run-dir", str(tmp_path / "run"), "--train.loader-workers", "1")
    outcome = project.python("-c", FORKSERVER, "train", *words)
    *_, line = outcome.stderr.splitlines()
    assert outcome.returncode == 2, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert "cannot start, since Chunks.options['transform'] cannot be pickled: " in line
    assert "--train.loader-workers 0" in line
