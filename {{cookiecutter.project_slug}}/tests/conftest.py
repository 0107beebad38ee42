"""Helpers of the tests: the tiny preset, and runs of it in this process."""

import gc
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from {{ cookiecutter.package_name }} import config
from {{ cookiecutter.package_name }}.config import override
from {{ cookiecutter.package_name }}.model import compute_loss
from {{ cookiecutter.package_name }}.train import State, run

# Each run collects garbage before it starts. That is fast here, since the garbage collector skips
# frozen objects, as are all imported modules from now on. Each run also calls `gc.freeze` and, at
# its end, `gc.unfreeze`, which must not undo that: both do nothing in the tests.
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None
# Steps are so small that several threads would only wait for each other.
torch.set_num_threads(1)
# Settings of all runs in these tests. They override the preset `tiny`, since the tests rely on
# these numbers even if you change the preset. A step has two micro-batches, so gradients are
# accumulated. The last batch of a validation is incomplete: 12 samples are a batch of 8 and 4 more.
RUN = {
    "train.steps": 20,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 4,
    "train.log_every": 5,
    "train.validate_every": 10,
    "train.validate_samples": 12,
    "optim.warmup_steps": 5,
    "checkpoint.every": 5,
}
# Settings that your project needs in addition to the preset `tiny`, for all runs. For example:
# SETTINGS = {"data.path": Path("tests/few.bin"), "data.vocabulary": 50257}
SETTINGS: dict[str, Any] = {}
# {% include "task/" ~ cookiecutter.task ~ "/test_settings.py" %}


def tiny(run_dir: Path, **changes: Any) -> config.Config:
    """Return the tiny preset with RUN and SETTINGS on the CPU, and changes like train__steps=7."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    fixed = {"run_dir": run_dir, "device": "cpu", "track": False}
    # Later settings override earlier ones.
    return override(config.preset("tiny"), RUN | SETTINGS | fixed | named)


def losses(run_dir: Path, name: str = "loss") -> dict[int, float]:
    """Return the loss, or another metric, by step, from metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return {record["step"]: record[name] for record in records if name in record}


def train(settings: config.Config, at: int = 0) -> dict[str, torch.Tensor]:
    """Run to the end in this process; return the weights after step `at` (0: the last step)."""
    weights: dict[str, torch.Tensor] = {}

    def keep(state: State, record: dict | None) -> None:
        if state.step == (at or settings.train.steps):
            weights.update({k: v.clone() for k, v in state.model.state_dict().items()})

    run(settings, [after_step(keep)])
    return weights


def after_step(call: Callable[[State, dict | None], None]) -> SimpleNamespace:
    """Return a callback with only this method."""
    return SimpleNamespace(after_step=call)


def same(weights: dict[str, Any], others: dict[str, Any], near: float = 0) -> None:
    """Assert that names and values are equal; values may differ by `near` * (1 + 10 * |value|)."""
    torch.testing.assert_close(weights, others, atol=near, rtol=10 * near)


def weights_of(state: State) -> dict[str, torch.Tensor]:
    """Return copies of the parameters by name."""
    return {name: p.detach().clone() for name, p in state.model.named_parameters()}


def random_state() -> bytes:
    """Return the states of the global generators of torch, NumPy and Python."""
    return pickle.dumps((torch.get_rng_state().numpy(), np.random.get_state(), random.getstate()))


def draws(call: Callable[[], object]) -> bool:
    """Tell whether a call draws random numbers."""
    before = random_state()
    call()
    return random_state() != before


def read(dataset: Any, ids: list[int]) -> Any:
    """Read samples as the loader does, before they are collated and augmented."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(ids)
    return [dataset[i] for i in ids]


class Recorder:
    """The first samples of a dataset; records the ids that are read, and the model's modes."""

    def __init__(self, dataset: Any, count: int, model: torch.nn.Module) -> None:
        self.dataset, self.count, self.model = dataset, min(count, len(dataset)), model
        self.ids: list[int] = []
        # At each read: whether the model is in training mode, and whether gradients are computed.
        self.in_training: set[bool] = set()
        # The loader looks for this method, so have it only if the dataset has it.
        if hasattr(dataset, "collate"):
            self.collate = dataset.collate

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, ids: list[int]) -> Any:
        self.ids += ids
        self.in_training |= {self.model.training, torch.is_grad_enabled()}
        return read(self.dataset, ids)


def contents(value: Any) -> list[Any]:
    """Return the tensors of a batch as NumPy arrays, and its other values, in one list."""
    if isinstance(value, torch.Tensor):
        return [value.detach().numpy()]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return [value]
    result = []
    for each in value:
        result += contents(each)
    return result


def digest(value: Any) -> bytes:
    """Return bytes that are equal for batches with equal contents."""
    return pickle.dumps([np.ascontiguousarray(each).tobytes() for each in contents(value)])


def loss_draws(state: State, training: bool) -> bool:
    """Tell, by trying, whether the loss draws random numbers in training or in evaluation mode."""
    # The first micro-batch of step 0. The loader does not advance.
    (batch, *_) = state.loader.of(0, state.plan)
    # Modes and buffers are restored below, so that this trial changes nothing.
    modes = {module: module.training for module in state.model.modules()}
    state.buffers.keep()
    state.model.train(training)
    before = random_state()
    first = compute_loss(state.model, batch).total
    drawn = random_state() != before
    # A model may draw from its own generator. Then `random_state` is equal, but the losses are not.
    drawn = drawn or not torch.equal(compute_loss(state.model, batch).total, first)
    state.buffers.put_back(True)
    for module, mode in modes.items():
        module.training = mode
    return drawn


def has_first_batches(state: State) -> bool:
    """Tell whether a batch has the keys of the data.py that the project was created with."""
    batch = state.loader.of(0, state.plan)[0]
    return isinstance(batch, dict) and batch.keys() == FIRST_BATCH


def skip_batch_statistics(model: torch.nn.Module, reason: str) -> None:
    """Skip the test for a model with batch statistics that are not frozen."""
    norms = (m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm))
    if any(norm.training for norm in norms):
        pytest.skip(f"not applicable: {reason}")


def skip_stream(state: State, reason: str) -> None:
    """Skip the test if the training data is a stream."""
    if hasattr(state.loader, "stream"):
        pytest.skip(f"not applicable: {reason}")


def skip_random(state: State, training: bool = False) -> None:
    """Skip the test if the loss draws random numbers, in evaluation or in training."""
    if loss_draws(state, training):
        mode = "training" if training else "evaluation"
        pytest.skip(f"not applicable: the loss draws random numbers in {mode}")


def skip_drawn_batches(*datasets: Any) -> None:
    """Skip the test if a sample's random numbers depend on the batch that it is read with."""
    for dataset in datasets:
        if hasattr(dataset, "__getitems__") and draws(lambda: dataset.__getitems__([0])):  # noqa: B023
            pytest.skip("not applicable: __getitems__ draws random numbers for a whole batch")
