"""Profiles on several ranks: a slow all-reduce, and a rank that comes late, must both be named.

Usage: profiled.py FOLDER DDP_PACKAGE FSDP_PACKAGE (by `drill`, on two ranks)
"""

import importlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

LATE = 0.5 * int(os.environ["RANK"])  # seconds


class Slow:
    """A dataset of which reading takes its time."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, ids):
        """Wait, then read."""
        time.sleep(LATE)
        return self.dataset.__getitems__(ids)


def slow_all_reduce(training):
    """Let each step send 32 MB more."""
    all_reduce, much = training.parallel.all_reduce, torch.zeros(8_000_000)

    def slow(tensor, world):
        dist.all_reduce(much)
        return all_reduce(tensor, world)

    training.parallel.all_reduce = slow


def late_rank(training):
    """Let all ranks but the first be late with their data."""
    build = training.build_datasets

    def late(config):
        train, *rest = build(config)
        return Slow(train), *rest

    training.build_datasets = late


def main(folder: Path, ddp: str, fsdp: str) -> None:
    """Profile a step of each kind; the test reads what rank 0 wrote."""
    distributed = importlib.import_module(f"{ddp}.distributed")
    leave = distributed.leave
    parallel = importlib.import_module(f"{ddp}.distributed.parallel")
    world = distributed.join(parallel.ParallelConfig(), "cpu")
    for package in (ddp, fsdp):  # both share one process group
        stage = importlib.import_module(f"{package}.workflow.profile")
        stage.join, stage.leave = lambda *_: world, lambda _: None
    for package, change in ((ddp, slow_all_reduce), (fsdp, late_rank)):
        change(importlib.import_module(f"{package}.train"))
        config = importlib.import_module(f"{package}.config")
        stage = importlib.import_module(f"{package}.workflow.profile")
        ground = {"device": "cpu", "data.path": folder / "text.txt", "run_dir": folder / package}
        code = stage.measure(config.override(config.preset("tiny"), ground))
        if world.rank == 0:
            print(f"{package} was profiled on {world.size} ranks: {code}")
    leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
