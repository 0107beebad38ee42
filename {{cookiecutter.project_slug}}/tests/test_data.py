"""Training and validation data are separate, and a sample is the same whenever it is read."""

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
# {% if cookiecutter.task == "image_classifier" %}
import torch
# {% endif %}
from conftest import FIRST_BATCH, contents, digest, draws, read, tiny

from {{ cookiecutter.package_name }}.data import DataConfig, build_datasets
# {% if cookiecutter.task == "language_model" %}
from {{ cookiecutter.package_name }}.errors import UserError
# {% endif %}
from {{ cookiecutter.package_name }}.sampling import fetch, fixed_subset
from {{ cookiecutter.package_name }}.train import State, setup

# Seconds to spend on looking for validation samples in the training data.
PATIENCE = 2.0


@pytest.fixture(scope="module")
def state() -> State:
    return setup(tiny(Path("unused")))


def ends_and_some(size: int, count: int) -> list[int]:
    """Return about `count` ids, or all: the first ones, the last ones, and random ones.

    The ends are always included, since data is often split there.
    """
    if size <= count:
        return list(range(size))
    third = count // 3
    some = fixed_subset(size, third).tolist()
    return list(dict.fromkeys([*range(third), *range(size - third, size), *some]))


def digests(dataset: Any, ids: list[int]) -> list[bytes]:
    """Return digests of samples, read one by one; stop after `PATIENCE` seconds."""
    result: list[bytes] = []
    began = time.monotonic()
    for i in ids:
        result.append(digest(fetch(dataset, np.array([i]))))
        if time.monotonic() > began + PATIENCE:
            break
    return result


def test_no_sample_is_both_trained_on_and_validated(state: State) -> None:
    """Look for up to 150 validation samples among up to 3000 training samples."""
    training = state.loader.source.dataset
    if not hasattr(training, "__len__"):
        pytest.skip("not applicable: a stream has no number of samples")
    if draws(lambda: read(training, [0])):
        pytest.skip("not applicable: samples draw random numbers, and are never the same")
    trained = digests(training, ends_and_some(len(training), 3000))
    validated = digests(state.validation, ends_and_some(len(state.validation), 150))
    # Samples that repeat within the training data may also be in the validation data.
    if len({*trained}) < 0.9 * len(trained):
        pytest.skip("not applicable: the training data has many samples more than once")
    both = [sample for sample in validated if sample in {*trained}]
    # Data may contain some samples twice, so only many of them are an error.
    assert len(both) <= len(validated) / 2, f"{len(both)} of {len(validated)} are in both"


def test_a_sample_is_the_same_whenever_it_is_read(state: State) -> None:
    """It may be read alone or in a batch, before or after others."""
    dataset = state.validation
    if draws(lambda: read(dataset, [0])):
        pytest.skip("not applicable: samples draw random numbers")
    count = min(len(dataset), 4)
    alone = [digest(fetch(dataset, np.array([i]))) for i in range(count)]
    forwards = fetch(dataset, np.arange(count))
    backwards = fetch(dataset, np.arange(count)[::-1])
    assert alone == [digest(fetch(dataset, np.array([i]))) for i in range(count)]
    # Compare the arrays that have a row for each sample.
    for a, b in zip(contents(forwards), contents(backwards), strict=True):
        if isinstance(a, np.ndarray) and a.shape[:1] == (count,) == b.shape[:1]:
            assert np.array_equal(a, b[::-1])


def test_a_built_dataset_is_the_same_again(state: State) -> None:
    """The split and the order of the samples depend only on the settings."""
    again = setup(state.config)
    assert again.spec == state.spec
    assert len(again.validation) == len(state.validation)
    if not draws(lambda: read(state.validation, [0])):
        ends = [0, len(state.validation) - 1]
        assert digests(again.validation, ends) == digests(state.validation, ends)


def test_validation_data_is_not_augmented(state: State) -> None:
    """`augment` does not change validation samples, whatever the keys of its random numbers."""
    if not hasattr(state.validation, "augment"):
        pytest.skip("not applicable: there is no `augment`")
    batch = fetch(state.validation, np.arange(2))
    # Any keys; the second one needs all 64 bits.
    keys = np.array([3, 2**63 + 11], np.uint64)
    values = fetch(state.validation, np.arange(2), keys)
    # `augment` may add values that only training needs.
    if isinstance(batch, dict):
        values = {name: values[name] for name in batch}
    assert digest(values) == digest(batch)


def test_data_that_says_so_draws_no_random_numbers(state: State) -> None:
    """A dataset with `draws = False` is not seeded: random numbers would differ after a resume."""
    if getattr(state.loader.source.dataset, "draws", True):
        pytest.skip("not applicable: this data may draw random numbers, and is seeded")
    assert not draws(lambda: state.loader.of(0, state.plan))


@functools.cache
def is_first_data() -> bool:
    """Tell by the keys of a batch whether data.py is the one that the project was created with."""
    _, validation, _ = build_datasets(tiny(Path("unused")))
    batch = read(validation, [0])
    return isinstance(batch, dict) and batch.keys() == FIRST_BATCH


def own_data(**changes: Any) -> tuple[Any, Any, Any]:
    """Return datasets and spec for changed settings, such as max_shift=2 (--data.max-shift).

    Skip the test if data.py was replaced, or does not have these settings.
    """
    names = {setting.name for setting in dataclasses.fields(DataConfig)}
    if not {*changes} <= names or not is_first_data():
        pytest.skip("not applicable: other data")
    return build_datasets(tiny(Path("unused"), **{f"data__{n}": v for n, v in changes.items()}))


# {% include "task/" ~ cookiecutter.task ~ "/test_data.py" %}
