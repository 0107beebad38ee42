"""Ranks with other data, weights or settings must all be told, and none hang.

Usage: disagree.py FOLDER PACKAGE (by `drill`, on two ranks)
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch


def main(folder: Path, package: str) -> None:
    """Try a run on different texts, one from different weights, one with different settings."""
    training = importlib.import_module(f"{package}.train")
    config = importlib.import_module(f"{package}.config")
    error = importlib.import_module(f"{package}.errors").UserError
    rank, told = os.environ["RANK"], 0
    text = folder / "text.txt"
    # Each rank has a folder of its own for what lies at the same path on each of two machines.
    home = folder / f"machine-{rank}"
    home.mkdir()
    os.chdir(home)
    (home / "own.txt").write_text(f"I am rank {rank}, and I am alone. " * 100)
    ground = {"device": "cpu", "run_dir": folder / "run", "train.steps": 2}
    ground = config.override(config.preset("tiny"), ground)
    world = training.join(ground.parallel, "cpu")
    model = training.setup(config.override(ground, {"data.path": text}), world).model
    torch.save({k: v + int(rank) for k, v in model.state_dict().items()}, home / "weights.pt")
    for changes, words in (
        ({"data.path": Path("own.txt")}, "rank 1 differs from rank 0: data"),
        (
            {"data.path": text, "init_from": Path("weights.pt")},
            "rank 1 differs from rank 0: content of weights.pt",
        ),
        (
            {"data.path": text, "optim.clip": 1.0 + int(rank)},
            "the setting optim.clip must be the same on all ranks: 2.0 on rank 1, 1.0 on rank 0",
        ),
        (
            {"data.path": text, "init_from": Path("weights.pt") if rank == "1" else None},
            "whether --init-from is given must be the same on all ranks: True on rank 1, False on",
        ),
        (
            {"data.path": text, "reset_optimizer": rank == "1"},
            "--reset-optimizer must be the same on all ranks: True on rank 1, False on rank 0",
        ),
    ):
        try:
            training._run(config.override(ground, changes), world, [])
        except error as found:
            assert words in str(found), found
            told += 1
    if rank == "0":  # which alone makes the directory, and takes it away
        assert not (folder / "run").exists()
    told += load_other_bits(package, config.override(ground, {"data.path": text}), world)
    if rank == "0":
        print(f"{told} disagreements were told on {world.size} ranks")
    training.leave(world)


def load_other_bits(package: str, settings: Any, world: Any) -> int:
    """Resume with one weight changed on rank 1, as by a faulty memory; 1 if all ranks are told."""
    training = importlib.import_module(f"{package}.train")
    config = importlib.import_module(f"{package}.config")
    checkpointer = importlib.import_module(f"{package}.checkpoint.checkpointer").Checkpointer
    training._run(settings, world, [])
    load = checkpointer.load

    def load_with_a_fault(self: Any, *given: Any, **named: Any) -> None:
        load(self, *given, **named)
        if world.rank == 1:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0] += 1

    checkpointer.load = load_with_a_fault
    try:
        training._run(config.override(settings, {"train.steps": 3}), world, [])
    except importlib.import_module(f"{package}.errors").RankError as found:
        assert "a disk or memory is faulty" in str(found), found
        return 1
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
