"""What owners write and a resume has to keep exact: data that draws, buffers of every sort.

`add` puts it into a package, in a process that is to train (`Plan.sabotage`).
"""

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Drawing:
    """Samples with what each generator gives that transforms use."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, ids: list[int]) -> dict[str, torch.Tensor]:
        drawn = [[torch.rand(()).item(), np.random.rand(), random.random()] for _ in ids]
        return {**self.samples.__getitems__(ids), "drawn": torch.tensor(drawn)}


def add(package: str) -> None:
    """Put a dataset around the data, buffers into the model, and both into the loss."""
    training = importlib.import_module(f"{package}.train")
    build_datasets = training.build_datasets

    def drawing(config: Any) -> Any:
        train, validation, spec = build_datasets(config)
        return Drawing(train), Drawing(validation), spec

    training.build_datasets = drawing
    training.build_model = with_buffers(training.build_model)
    validation = importlib.import_module(f"{package}.validation")
    training.compute_loss = validation.compute_loss = weighted(training.compute_loss)


def freeze(package: str) -> None:
    """Let the first block of the model stay as it is."""
    training = importlib.import_module(f"{package}.train")
    build_model = training.build_model

    def build(*arguments: Any) -> Any:
        model = build_model(*arguments)
        first = next(iter(training.blocks(model)))
        first.requires_grad_(False)
        return model

    training.build_model = build


def write_base(package: str, config: Any, path: Path) -> None:
    """Write weights to begin with, of the model of a run with these settings."""
    from safetensors.torch import save_file

    training = importlib.import_module(f"{package}.train")
    spec = training.build_datasets(config)[2]
    torch.manual_seed(5)
    save_file(training.build_model(config, spec).state_dict(), path)


def with_buffers(build_model: Callable[..., Any]) -> Callable[..., Any]:
    """The model with buffers of each kind of number, and batch statistics."""

    def build(*arguments: Any) -> Any:
        model = build_model(*arguments)
        model.register_buffer("running", torch.zeros(3))
        model.register_buffer("center", torch.zeros(3))
        model.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        model.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        model.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))
        model.statistics = torch.nn.BatchNorm1d(3, affine=False)
        return model

    return build


def weighted(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss, times what follows from the buffers, which change with each batch."""

    def compute(model: Any, batch: dict[str, torch.Tensor]) -> Any:
        rest = {**batch}
        drawn = rest.pop("drawn")
        found = compute_loss(model, rest)
        if model.training:
            model.running.mul_(0.9).add_(drawn.mean(0))  # in place
            model.center = 0.9 * model.center + 0.1 * found.total.detach().float()  # anew
            model.counts += (drawn > 0.5).sum(0)
            model.seen |= drawn[0] > 0.9
            model.spectrum = model.spectrum / 2 + torch.fft.rfft(drawn).mean(0)
        known = model.running.sum() + model.center.sum() + model.counts.sum() / 100
        known = known + model.seen.sum() + model.spectrum.real.sum()
        known = known + model.statistics(torch.cat([drawn, drawn.square()]))[0].sum()
        return found._replace(total=found.total * (1 + 0.1 * known.tanh()))

    return compute
