"""Mixtures of data: exact proportions anywhere, the same samples however one gets there."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Project, bake, drill, project_fixture, records

project = project_fixture(
    "mixture_project", samples="mixture", parallelism="single", checkpoint="dcp"
)
weights = st.lists(st.integers(1, 400), min_size=1, max_size=6)


@given(weights)
def test_every_stretch_has_its_proportions(project: Project, weights: list[int]) -> None:
    mixture, total = project.module("mixture"), sum(weights)
    pattern = mixture.pattern(weights)
    assert np.bincount(pattern, minlength=len(weights)).tolist() == weights
    taken = np.cumsum(pattern[:, None] == np.arange(len(weights)), 0)
    share = np.arange(1, total + 1)[:, None] * np.array(weights) / total
    assert np.abs(taken - share).max() < 1  # of the stretches from the start; of any, below 2


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 2**40),
    st.integers(1, 50),
)
def test_the_samples_at_a_place_do_not_depend_on_the_way_there(
    project: Project, sources: list[tuple[int, int]], seed: int, start: int, length: int
) -> None:
    sizes, parts = [size for size, _ in sources], [weight for _, weight in sources]
    named = {str(i): part for i, part in enumerate(parts)}
    order = project.module("mixture").MixedBatches(sizes, named, 8, seed)
    ids = order.ids_at(start, start + length)
    one_by_one = [int(order.ids_at(start + i, start + i + 1)[0]) for i in range(length)]
    assert ids.tolist() == one_by_one
    before, after = order.counts(start), order.counts(start + length)
    which = np.searchsorted(np.cumsum(sizes), ids, side="right")
    assert np.bincount(which, minlength=len(sizes)).tolist() == (after - before).tolist()


def test_later_versions_draw_the_same_samples(project: Project) -> None:
    """A checkpoint of today, resumed with the code of next year, continues with the same order."""
    order = project.module("mixture").MixedBatches([30, 7], {"a": 3, "b": 2}, 5, 0)
    assert order.ids(0).tolist() == [24, 32, 2, 6, 36]
    assert order.ids(100).tolist() == [5, 33, 17, 22, 32]


def test_each_source_has_its_own_epochs(project: Project) -> None:
    sizes = [30, 7]
    order = project.module("mixture").MixedBatches(sizes, {"a": 3, "b": 2}, 5, 0)
    ids = np.concatenate([order.ids(step) for step in range(140)])
    for low, high in ((0, 30), (30, 37)):
        own = ids[(ids >= low) & (ids < high)]
        epochs = own[: len(own) // (high - low) * (high - low)].reshape(-1, high - low)
        assert (np.sort(epochs, 1) == np.arange(low, high)).all()
        assert len(epochs) > 10 and (epochs[0] != epochs[1]).any()
    assert order.drawn(140) == {"a": 420, "b": 280}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a=0.7,b=0.3", {"a": 7, "b": 3}),
        ("a=2, b=4", {"a": 1, "b": 2}),
        ("a=1/3,b=2/3", {"a": 1, "b": 2}),
        ("a=0.12345678,b=1", "too many digits"),
        ("a=1,a=2", "each name once"),
        ("a=0,b=1", "above 0"),
        ("a=-1,b=2", "above 0"),
        ("a,b", "NAME=WEIGHT"),
        ("a=x", "NAME=WEIGHT"),
        ("a=1/0", "NAME=WEIGHT"),
        ("=1", "each name once"),
    ],
)
def test_weights_are_read_or_refused(project: Project, text: str, found: Any) -> None:
    parse = project.module("mixture").parse
    if isinstance(found, dict):
        assert parse(text) == found
    else:
        with pytest.raises(project.module("errors").UserError, match=found):
            parse(text)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, letters in (("letters", b"abcdefgh"), ("digits", b"01234567")):
        (folder / name).mkdir()
        for number in range(30):
            content = random.Random(number).choices(letters, k=200)
            (folder / name / f"{number}.txt").write_bytes(bytes(content))
    return folder


MORE = ("--train.steps", "20", "--train.micro-batch-size", "8")


def test_a_run_sees_what_was_asked_for(project: Project, texts: Path, tmp_path: Path) -> None:
    seen = {"letters": 0, "digits": 0}

    class Counting:
        def before_step(self, state: Any) -> None:
            (batch,) = state.loader.of(state.step, state.plan)
            first = batch["tokens"][:, 0]
            seen["digits"] += int((first < ord("a")).sum())
            seen["letters"] += int((first >= ord("a")).sum())

    settings = {"data__path": texts, "data__mix": "letters=3,digits=1", "train__steps": 10}
    settings |= {"train__micro_batch_size": 8, "run_dir": tmp_path / "run"}
    project.module("train").run(project.config(**settings), [Counting()])
    assert seen == {"letters": 60, "digits": 20}
    lines = records(tmp_path / "run")
    assert (lines[-1]["samples_of_letters"], lines[-1]["samples_of_digits"]) == (60, 20)
    other = ("--run-dir", str(tmp_path / "run"), "--data.path", str(texts))
    words = ("train", "--preset", "tiny", "--device", "cpu", *other)
    line = project.refuses(*words, "--data.mix", "letters=2,digits=1")
    assert "letters=3,digits=1' saved" in line and "letters=2,digits=1 now" in line
    # The same mixture, written otherwise.
    project(*words, *MORE, "--data.mix", "letters=0.75, digits=0.25")
    lines = records(tmp_path / "run")
    assert (lines[-1]["step"], lines[-1]["samples_of_letters"]) == (20, 120)
    assert "does not exist" in project.refuses(*words, "--data.mix", "letters=2,none=1")


def test_images_are_mixed(tmp_path: Path) -> None:
    """And moved about, each time another way, as those of one source."""
    for label, name in enumerate(("a", "b")):
        labels = np.full(20, label)
        labels[0] = 1  # for validation; so that both have two classes
        np.savez(tmp_path / f"{name}.npz", images=np.full((20, 8, 8), 255, np.uint8), labels=labels)
    answers = {"task": "image_classifier", "samples": "mixture", "parallelism": "single"}
    with Project.imported(tmp_path, "mixed_images", **answers) as project:
        settings = {"data__path": tmp_path, "data__mix": "a.npz=1,b.npz=3"}
        settings |= {"train__steps": 4, "run_dir": tmp_path / "run"}
        config = project.config(**settings)
        project.module("train").run(config)
        loader = project.module("train").setup(config).loader
        batches = [batch for step in range(4) for batch in loader.of(step, loader.plan)]
    labels = torch.cat([batch["labels"] for batch in batches])
    assert labels.sum() * 4 == len(labels) * 3
    corners = torch.cat([batch["images"] for batch in batches])[..., 0, 0]
    assert 0 < (corners == 0).sum() < len(corners)  # what was moved has nothing there


def test_mixture_average_and_muon_go_on_exactly_together(texts: Path) -> None:
    """On three ranks to the bit, then on two; DDP and FSDP."""
    sources = {}
    for parallelism in ("ddp", "fsdp"):
        name, answers = f"together_{parallelism}", {"parallelism": parallelism, "tracker": "none"}
        project = bake(texts / name, package_name=name, samples="mixture", **answers)
        sources[name] = project / "src"
    runs = texts / "runs"
    runs.mkdir()
    for name in ("letters", "digits"):
        (runs / name).symlink_to(texts / name)
    output = drill(
        "together.py", (3, str(runs), *sources), (2, str(runs), *sources), sources=sources
    )
    for name in sources:
        assert f"{name} on 3 ranks: the same, new: True" in output
        assert f"{name} on 2 ranks: near, new: False" in output
