"""Validation, also of the EMA of the weights, is compared with a plain computation."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Recorder, draws, loss_draws, read, same, skip_random, tiny, weights_of

from {{ cookiecutter.package_name }}.config import override
from {{ cookiecutter.package_name }}.ema import averaged_weights
from {{ cookiecutter.package_name }}.model import compute_loss
from {{ cookiecutter.package_name }}.sampling import fetch
from {{ cookiecutter.package_name }}.train import setup, train_step, validate
from {{ cookiecutter.package_name }}.validation import validate_averaged


def sums_of(model: torch.nn.Module, batch: Any) -> dict[str, np.ndarray]:
    """Return (sum, count) of the loss and of each metric of a batch."""
    loss = compute_loss(model, batch)
    pairs = {"loss": (loss.total, loss.count)}
    for name, metric in loss.metrics.items():
        pairs[name] = metric if isinstance(metric, tuple) else (metric, loss.count)
    return {name: np.array([float(each) for each in pair]) for name, pair in pairs.items()}


@torch.no_grad()
def test_validation_is_the_mean_over_all_samples(monkeypatch) -> None:
    """The mean does not depend on how samples are batched, and validation changes nothing.

    17 samples leave an incomplete batch of 7, and batches leave incomplete micro-batches of 3.
    """
    uneven = {"train__global_batch_size": 7, "train__micro_batch_size": 3}
    state = setup(tiny(Path("unused"), train__validate_samples=0, **uneven))
    recorder = Recorder(state.validation, 17, state.model)
    if draws(lambda: read(recorder.dataset, [0])):
        pytest.skip("not applicable: validation samples draw random numbers")
    skip_random(state)
    modes = [module.training for module in state.model.modules()]
    tensors = {name: each.clone() for name, each in state.model.state_dict().items()}
    state.validation = recorder
    # `validate` turns gradients off, and must turn them on again.
    with torch.enable_grad():
        figures = validate(state)
        assert torch.is_grad_enabled()
    assert sorted(recorder.ids) == list(range(len(recorder))), "each sample once"
    assert recorder.in_training == {False}, "in evaluation, and without a graph"
    assert [module.training for module in state.model.modules()] == modes
    same(dict(state.model.state_dict()), tensors)
    assert validate(state) == figures, "the same again"

    # --train.validate-samples 5 reads 5 samples, each once.
    recorder.ids.clear()
    state.config = override(state.config, {"train.validate_samples": 5})
    validate(state)
    assert len({*recorder.ids}) == len(recorder.ids) == min(5, len(recorder))

    # The expected means: each sample alone, added up.
    state.model.eval()
    totals: dict[str, np.ndarray] = {}
    for i in range(len(recorder)):
        for name, pair in sums_of(state.model, fetch(recorder.dataset, np.array([i]))).items():
            totals[name] = totals.get(name, 0.0) + pair
    # Read all samples in one batch, too. A small difference of the sums is rounding. A larger one
    # means that the loss of a sample depends on its batch.
    together = sums_of(state.model, fetch(recorder.dataset, np.arange(len(recorder))))
    alone = totals["loss"][0]
    rounding = abs(together["loss"][0] - alone) / (abs(alone) + 1e-6)
    if not rounding < 1e-3:
        pytest.skip("not applicable: the loss of a sample depends on the others of its batch")
    # An untrained model has about the same loss everywhere, so require close agreement.
    near = max(1e-5, 3 * rounding)
    expected = {f"validation_{name}": total / n for name, (total, n) in totals.items()}
    assert figures == pytest.approx(expected, rel=near, abs=1e-6, nan_ok=True)


def test_a_stopped_validation_has_no_result() -> None:
    """It is stopped before the second batch, so it has read one batch of 2 samples."""
    state = setup(tiny(Path("unused"), train__validate_samples=0, train__global_batch_size=2))
    state.validation = Recorder(state.validation, 6, state.model)
    answers = iter([False, True, True])
    assert validate(state, lambda: next(answers)) == {}
    assert len(state.validation.ids) == min(2, len(state.validation))


def test_the_average_of_the_weights_follows_its_formula() -> None:
    """The decay is smaller at first. Weights are restored even if the block raises an error.

    The validation of the averages equals one with the averages as the weights.
    """
    state = setup(tiny(Path("unused"), optim__ema=0.2, optim__warmup_steps=0))
    if hasattr(state.optimizer, "eval"):
        pytest.skip("not applicable: a schedule-free optimizer has its own average")
    average: dict[str, torch.Tensor] = {}
    for step in range(4):
        train_step(state, state.loader.next())
        # 1/10, 2/11, then 0.2 instead of 3/12 and 4/13.
        decay = min(0.2, (1 + step) / (10 + step))
        for name, p in weights_of(state).items():
            average[name] = decay * average.get(name, p) + (1 - decay) * p
    weights = weights_of(state)
    # Twice, since the first use must also leave the averages as they were.
    for _ in range(2):
        interrupted = contextlib.suppress(InterruptedError)
        with interrupted, averaged_weights(state.model, state.optimizer):
            same(weights_of(state), average, near=1e-6)
            raise InterruptedError
        same(weights_of(state), weights)

    state.validation = Recorder(state.validation, 6, state.model)
    if loss_draws(state, training=False) or draws(lambda: read(state.validation.dataset, [0])):
        pytest.skip("not applicable: validation draws random numbers")
    raw = validate(state)
    figures = validate_averaged(state, lambda: False)
    same(weights_of(state), weights)
    with torch.no_grad():
        for name, p in state.model.named_parameters():
            p.copy_(average[name])
    for name, value in validate(state).items():
        assert figures[name] == raw[name]
        averaged = figures[name.replace("validation_", "validation_ema_")]
        assert averaged == pytest.approx(value, rel=1e-4, nan_ok=True)
