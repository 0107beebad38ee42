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


def slow_all_reduce(training):
    """Let each step send 32 MB more."""
    all_reduce, much = training.parallel.all_reduce, torch.zeros(8_000_000)

    def slow(tensor, world):
        dist.all_reduce(much)
        return all_reduce(tensor, world)

    training.parallel.all_reduce = slow


def late_rank(training):
    """Let all ranks but the first be late with their data."""
    sampling = importlib.import_module(f"{training.__package__}.sampling")
    fetch = sampling.fetch

    def late(*arguments, **options):
        time.sleep(LATE)
        return fetch(*arguments, **options)

    sampling.fetch = late


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
