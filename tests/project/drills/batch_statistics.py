"""Batch statistics that differ between ranks are one when a validation looks at them.

Usage: batch_statistics.py PACKAGE (by `drill`, on two ranks)
"""

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def main(package: str) -> None:
    """Validate and compare; leave when nothing holds DDP any more, whose end might wait for it."""
    training = importlib.import_module(f"{package}.train")
    config = importlib.import_module(f"{package}.config")
    settings = config.override(config.preset("tiny"), {"device": "cpu"})
    world = training.join(settings.parallel, "cpu")
    compare(training, settings, world)
    training.leave(world)


def compare(training: Any, settings: Any, world: Any) -> None:
    """Set other statistics on each rank, validate, and compare."""
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    training.build_model = lambda config, spec: model
    training.blocks = lambda model: []
    state = training.setup(settings, world)
    model[1].running_mean.fill_(1.0 + int(os.environ["RANK"]))
    training.validate(state)
    found = [torch.empty(64) for _ in range(2)]
    dist.all_gather(found, model[1].running_mean)
    assert torch.equal(*found), "each rank has validated with its own"
    print("the ranks validate the same model")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
