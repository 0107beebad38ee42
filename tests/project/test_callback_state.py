"""The state of callbacks in checkpoints: as it was, or refused by the callback's name."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Project, project_fixture

ANSWERS = {"parallelism": "single", "checkpoint": "torch_save", "tracker": "none"}
project = project_fixture("callback_state", **ANSWERS)


class Own:
    """Saves whatever it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.restored: Any = "nothing"

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.restored = state


class Renamed(Own):
    """The same callback, under another name."""


def train(project: Project, run_dir: Path, *callbacks: Any, steps: int) -> None:
    settings = {"train__steps": steps, "train__validate_every": 0, "optim__warmup_steps": 0}
    config = project.config(run_dir=run_dir, **settings)
    project.module("train").run(config, callbacks)


KEPT = [
    {"a": 1},
    [1, 2.5, "x"],
    3,
    None,
    {"a": float("nan")},
    {"a": -float("inf")},
    2**70,
    "\ud800",
]
REFUSED = [
    {1: 2},
    {"a": (1, 2)},
    {"a": torch.tensor(1.0)},
    {"a": np.float32(1)},
    {"a": np.float64(1)},
    {"a": {1, 2}},
    {"a": Counter("aab")},
    {True: 1},
    {"a": b"x"},
    {(1, 2): 3},
    {1: "a", "1": "b"},
]


@pytest.mark.parametrize("value", KEPT, ids=repr)
def test_a_state_comes_back_as_it_was(project: Project, tmp_path: Path, value: Any) -> None:
    train(project, tmp_path, Own(value), steps=1)
    later = Own("another")
    train(project, tmp_path, later, steps=2)
    assert repr(later.restored) == repr(value)


@pytest.mark.parametrize("value", REFUSED, ids=repr)
def test_a_state_that_json_would_change_is_refused(
    project: Project, tmp_path: Path, value: Any
) -> None:
    """By the callback's name, in one line, at the first save."""
    with pytest.raises(project.module("errors").UserError) as refused:
        train(project, tmp_path, Own(value), steps=1)
    assert "the state of the callback Own cannot be saved" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_states_without_a_callback_and_callbacks_without_a_state_are_named(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(project, tmp_path, Own(1), steps=1)
    renamed = Renamed(2)
    train(project, tmp_path, renamed, steps=2)
    assert renamed.restored == "nothing"
    assert "no state of the callback Renamed: it starts afresh" in caplog.text
    assert "the state of a callback Own, which this run does not have" in caplog.text
    caplog.clear()
    two = (Renamed(3), Renamed(4))
    train(project, tmp_path, *two, steps=3)
    assert [each.restored for each in two] == [2, "nothing"]
    assert "Renamed and Renamed+ are told apart by their order only" in caplog.text


class Harmless(Own):
    """A callback whose errors end nothing."""

    harmless = True


@pytest.mark.parametrize("value", [(1, 2), ValueError("no state")])
def test_a_harmless_callback_costs_only_its_state(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    callback = Harmless(value)
    if isinstance(value, Exception):
        callback.state_dict = lambda: (_ for _ in ()).throw(value)
    train(project, tmp_path, callback, Own(1), steps=1)
    assert "the state of Harmless is not saved" in caplog.text
    own = Own(2)
    train(project, tmp_path, Harmless(3), own, steps=2)
    assert own.restored == 1


def test_a_harmless_callback_may_refuse_its_state(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Harmless):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError("of another kind")

    train(project, tmp_path, Refusing(1), steps=1)
    train(project, tmp_path, Refusing(2), steps=2)
    assert "the state of Refusing is not restored: of another kind" in caplog.text
