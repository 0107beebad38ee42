"""What the tests share: the tiny preset, and runs of it in this process."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from {{ cookiecutter.package_name }} import config
from {{ cookiecutter.package_name }}.config import override
from {{ cookiecutter.package_name }}.model import compute_loss
from {{ cookiecutter.package_name }}.train import State, run

# Each run collects what was there before it: set what is imported aside, once for all tests.
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None
# What your project needs besides the preset `tiny`: every run of these tests has it, as in
# SETTINGS = {"data.path": Path("tests/few.bin"), "data.vocabulary": 50257}
SETTINGS: dict[str, Any] = {}
# {% include "task/" ~ cookiecutter.task ~ "/test_settings.py" ignore missing %}


def tiny(run_dir: Path, **changes: Any) -> config.Config:
    """The tiny preset with SETTINGS on the CPU in `run_dir`; changes as in train__steps=7."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    quiet = {"run_dir": run_dir, "device": "cpu", "track": False}
    return override(config.preset("tiny"), SETTINGS | quiet | named)


def losses(run_dir: Path, name: str = "loss") -> dict[int, float]:
    """Loss, or another figure, by step, from metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return {record["step"]: record[name] for record in records if name in record}


def train(settings: config.Config, at: int = 0) -> dict[str, torch.Tensor]:
    """Run to the end in this process; the weights at a step (default: the last)."""
    weights: dict[str, torch.Tensor] = {}

    def keep(state: State, record: dict | None) -> None:
        if state.step == (at or settings.train.steps):
            weights.update({k: v.clone() for k, v in state.model.state_dict().items()})

    run(settings, [after_step(keep)])
    return weights


def after_step(call: Callable[[State, dict | None], None]) -> SimpleNamespace:
    """A callback of this method alone."""
    return SimpleNamespace(after_step=call)


def same(weights: dict[str, Any], others: dict[str, Any], near: float = 0) -> None:
    """Assert that the names and all values are equal, or as near as stated."""
    torch.testing.assert_close(weights, others, atol=near, rtol=10 * near)


def skip_batch_statistics(model: torch.nn.Module, reason: str) -> None:
    """Skip the test for a model whose batch statistics it cannot hold for."""
    norms = (m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm))
    if any(norm.training for norm in norms):  # else they are frozen
        pytest.skip(f"not applicable: {reason}")


def skip_stream(state: State, reason: str) -> None:
    """Skip the test for training data without numbers."""
    if hasattr(state.loader, "stream"):
        pytest.skip(f"not applicable: {reason}")


def skip_random(state: State) -> None:
    """Skip the test if the loss draws random numbers without dropout, too, as for noise."""
    (batch, *_), before = state.loader.of(0, state.plan), torch.get_rng_state()
    compute_loss(state.model.eval(), batch)
    state.model.train()
    if not torch.equal(torch.get_rng_state(), before):
        pytest.skip("not applicable: the model draws random numbers, by rank, in evaluation too")
