"""What ranks notice of a model that changes, and where they end a run.

Usage: model_state.py FOLDER PACKAGE... (by `drill`, on two ranks; DDP or FSDP)
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

CHANGES = {
    "train.steps": 6,
    "train.validate_every": 2,
    "train.log_every": 1,
    "train.global_batch_size": 4,
    "train.micro_batch_size": 2,
}


@contextlib.contextmanager
def refused(package: str, *words: str) -> Iterator[None]:
    """One line, on this rank as on all, with these words."""
    error = importlib.import_module(f"{package}.errors").UserError
    try:
        yield
    except error as problem:
        for word in words:
            assert word in str(problem), problem
        assert "\n" not in str(problem)
    else:
        raise AssertionError(f"{words}: not refused")


class InOrderOfRank(nn.Module):
    """Two layers of one shape, as a set of their names might list them."""

    def __init__(self) -> None:
        super().__init__()
        names = ["first", "second"]
        if os.environ["RANK"] == "1":
            names.reverse()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))


def build_in_order_of_rank(training: Any) -> Any:
    """Let the run's build_model add such layers, until the block is left."""
    build = training.build_model

    def build_model(config: Any, spec: Any) -> nn.Module:
        model = build(config, spec)
        model.add_module("of_rank", InOrderOfRank())
        return model

    return patch.object(training, "build_model", build_model)


def optimize_in_order_of_rank(training: Any) -> Any:
    """Let the run's build_optimizer reverse its groups on one rank, until the block is left."""
    build = training.build_optimizer

    def build_optimizer(config: Any, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = build(config, model)
        if os.environ["RANK"] == "1":
            for group in optimizer.param_groups:
                group["params"].reverse()
        return optimizer

    return patch.object(training, "build_optimizer", build_optimizer)


def freeze(state: Any) -> None:
    """Before a step, freeze a parameter."""
    if state.step == 2:
        next(state.model.parameters()).requires_grad_(False)


def add_group(state: Any, record: Any) -> None:
    """After a step, give the optimizer another parameter."""
    if state.step == 2:
        state.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def end(state: Any, figures: Any) -> None:
    """After a validation, end the run on one rank."""
    if state.step == 4 and state.world.rank == 1:
        state.finish("good enough")


def main(folder: Path, packages: list[str]) -> None:
    """Try each package."""
    world: Any = None
    for name in packages:
        if world is None:
            config = importlib.import_module(f"{name}.config")
            world = importlib.import_module(f"{name}.distributed").join(
                config.Config().parallel, "cpu"
            )
        training = importlib.import_module(f"{name}.train")
        run = folder / name
        words = ("different models: rank 0 has of_rank.first", "rank 1 has of_rank.second")
        with build_in_order_of_rank(training), refused(name, *words, "sorted list"):
            train(name, run / "model", world, SimpleNamespace())
        words = ("rank 0 has blocks.0.norm1.weight in group 1", "rank 1 has norm.weight in group 1")
        with optimize_in_order_of_rank(training), refused(name, *words, "sorted list"):
            train(name, run / "optimizer", world, SimpleNamespace())
        with refused(name, "was frozen or unfrozen", "rate_factor"):
            train(name, run / "frozen", world, SimpleNamespace(before_step=freeze))
        with refused(name, "added to or removed from the optimizer", "rate_factor"):
            train(name, run / "added", world, SimpleNamespace(after_step=add_group))

        # That is the last step on both ranks, and its checkpoint has the validation.
        result = train(name, run / "ended", world, SimpleNamespace(after_validation=end))
        assert (result.status, result.step) == ("finished", 4), result
        checkpoints = sorted((run / "ended/checkpoints").iterdir())
        assert checkpoints[-1].name == "step_00000004", checkpoints
        manifest = json.loads((checkpoints[-1] / "manifest.json").read_text())
        assert manifest["validation_loss"] == result.validation["validation_loss"]
    if world.rank == 0:
        print("noticed in", *packages)
    importlib.import_module(f"{packages[0]}.distributed").leave(world)


def train(package: str, run_dir: Path, world: Any, callback: Any) -> Any:
    """Train six steps at most, with a callback; the result."""
    training = importlib.import_module(f"{package}.train")
    config = importlib.import_module(f"{package}.config")
    settings = config.override(config.preset("tiny"), {"device": "cpu", "run_dir": run_dir})
    return training._run(config.override(settings, CHANGES), world, [callback])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
