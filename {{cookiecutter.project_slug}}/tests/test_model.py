"""Tests of the model, its batches and its optimizer: yours to replace, together with model.py."""

import dataclasses
import math
# {% if cookiecutter.task == "language_model" %}
import sys
# {% endif %}
from pathlib import Path
# {% if cookiecutter.task == "language_model" %}
from typing import Any
# {% endif %}

import pytest
import torch
import torch.nn.functional as F
from conftest import has_first_batches, loss_draws, tiny

from {{ cookiecutter.package_name }}.model import ModelConfig, blocks, compute_loss
from {{ cookiecutter.package_name }}.train import State, setup, train_step

# After training on one batch, its loss must be below this fraction of the first loss. If the loss
# cannot approach 0, as with noisy targets, use a larger number.
LEARNED = 0.4


@pytest.fixture(scope="module")
def state() -> State:
    return setup(tiny(Path("unused")))


# {% include "task/" ~ cookiecutter.task ~ "/test_model.py" %}


def test_matrices_decay_and_nothing_else_does(state: State) -> None:
    """Parameters with two or more axes have --optim.weight-decay, vectors and scalars have 0."""
    groups = state.optimizer.param_groups
    decay = {id(p): group.get("weight_decay", 0) for group in groups for p in group["params"]}
    if not any(decay.values()):
        pytest.skip("not applicable: an optimizer without weight decay")
    for name, p in state.model.named_parameters():
        assert not p.requires_grad or (decay[id(p)] > 0) == (p.ndim >= 2), name
    stated = getattr(state.config.optim, "weight_decay", None)
    if stated is not None:
        assert {*decay.values()} <= {0, stated}


def test_dropout_is_for_training_only() -> None:
    """Look at whether the loss draws random numbers, with much dropout if there is a setting."""
    changes = {}
    if "dropout" in {setting.name for setting in dataclasses.fields(ModelConfig)}:
        changes = {"model__dropout": 0.5}
    state = setup(tiny(Path("unused"), **changes))
    if loss_draws(state, training=False):
        # Turn all dropout off. If the loss still draws, the random numbers are not of dropout.
        for module in state.model.modules():
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                module.p = 0.0
        drop_nothing = setup(tiny(Path("unused"), model__dropout=0.0)) if changes else state
        if loss_draws(drop_nothing, training=False):
            pytest.skip("not applicable: the loss draws other random numbers, too")
        pytest.fail("dropout is active in evaluation")
    if changes:
        assert loss_draws(state, training=True), "no dropout in training"


def test_blocks_are_parts_of_the_model(state: State) -> None:
    """`blocks` lists modules of the model, each once."""
    modules = {*map(id, state.model.modules())}
    listed = [*map(id, blocks(state.model))]
    assert modules.issuperset(listed) and len({*listed}) == len(listed)


def test_one_batch_can_be_learned_by_heart() -> None:
    """In 60 steps on the same batch, with a high learning rate, the loss falls to a fraction."""
    rate = {"optim__learning_rate": 1e-2, "optim__warmup_steps": 0}
    state = setup(tiny(Path("unused"), train__steps=60, train__global_batch_size=4, **rate))
    has_noise = loss_draws(state, training=True)
    batches, losses = state.loader.next(), []
    for _ in range(60):
        # `train_step` adds this step's loss and count to the sums.
        state.sums = 0.0
        train_step(state, batches)
        losses.append(float(state.sums[0] / state.sums[1]))
    # A model that learns this well passes, even if its loss has noise.
    if losses[-1] < 0.4 * losses[0]:
        return
    if has_noise or losses[0] <= 0:
        pytest.skip("not applicable: noise, or a loss below 0, has no level to fall to")
    assert losses[-1] < LEARNED * losses[0]
