"""The model, its batches and its optimizer: yours to replace, together with model.py."""

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import tiny

from {{ cookiecutter.package_name }}.model import compute_loss
from {{ cookiecutter.package_name }}.schedule import ScheduleConfig, learning_rate
from {{ cookiecutter.package_name }}.train import State, setup, train_step


@pytest.fixture(scope="module")
def state() -> State:
    return setup(tiny(Path("unused")))


# {% include "task/" ~ cookiecutter.task ~ "/test_model.py" %}


def test_data_that_says_so_draws_no_random_numbers(state: State) -> None:
    if getattr(state.loader.source.dataset, "draws", True):
        pytest.skip("not applicable: what this data draws is seeded")
    states = (lambda: torch.get_rng_state().tolist(), np.random.get_state, random.getstate)
    before = [str(state_of()) for state_of in states]
    state.loader.of(0, state.plan)
    assert [str(state_of()) for state_of in states] == before


def test_matrices_decay_and_nothing_else_does(state: State) -> None:
    groups = state.optimizer.param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, p in state.model.named_parameters():
        assert not p.requires_grad or (decay[id(p)] > 0) == (p.ndim >= 2), name


def test_the_rate_warms_up_then_falls_as_a_cosine_does() -> None:
    schedule = ScheduleConfig(learning_rate=2.0, warmup_steps=4, final_fraction=0.1)
    rates = [learning_rate(schedule, step, 12) for step in (0, 3, 4, 8, 12)]
    assert rates == pytest.approx([0.5, 2.0, 2.0, 1.1, 0.2])


def test_one_batch_can_be_learned_by_heart() -> None:
    rate = {"optim__learning_rate": 1e-2, "optim__warmup_steps": 0}
    state = setup(tiny(Path("unused"), train__steps=60, train__global_batch_size=4, **rate))
    batches, losses = state.loader.next(), []
    for _ in range(60):
        state.sums = 0.0
        train_step(state, batches)
        losses.append(float(state.sums[0] / state.sums[1]))
    assert losses[-1] < 0.4 * losses[0]
