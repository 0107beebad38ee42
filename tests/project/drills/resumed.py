"""Train renders undisturbed, and again from the middle: the same weights, moments and losses.

Usage: resumed.py FOLDER PACKAGE... (by `drill`). The models have dropout and batch statistics.
"""

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from renders import finish, load
from torch import nn

STEPS = 16
SETTINGS = {
    "device": "cpu",
    "train.steps": STEPS,
    "train.log_every": 1,
    "train.validate_every": 0,
    "train.micro_batch_size": 2,
    "checkpoint.every": STEPS // 2,
    "model.dropout": 0.1,
}


def with_batch_statistics(build: Any) -> Any:
    """The model of `build` behind a batch normalisation of its input, if that is of images."""

    def built(config: Any, spec: Any) -> nn.Module:
        model = build(config, spec)
        if hasattr(spec, "channels"):
            model.add_module("statistics", nn.BatchNorm2d(spec.channels))
            model.register_forward_pre_hook(lambda module, images: module.statistics(*images))
        return model

    return built


def main(folder: Path, packages: list[str]) -> None:
    """Rank 0 prints how many steps a run takes in all, warm-up included."""
    world, taken = None, 0
    for name in packages:
        run_dir = folder / name
        training, settings = load(name, SETTINGS | {"run_dir": run_dir})
        naming = importlib.import_module(f"{name}.checkpoint.tensors")
        training.build_model = with_batch_statistics(training.build_model)
        found: list[dict[str, torch.Tensor]] = []

        def watch(state: Any, record: Any, found: Any = found, naming: Any = naming) -> None:
            if state.step == STEPS:
                tensors = naming.flat(state.checkpointer.tensors())
                found.append({key: tensor.detach().clone() for key, tensor in tensors})

        world = world or training.join(settings.parallel, "cpu")
        losses = []
        step = training.train_step

        def counted(*arguments: Any, step: Any = step) -> None:
            nonlocal taken
            taken += 1
            step(*arguments)

        training.train_step = counted
        for _ in range(2):
            training._run(settings, world, [SimpleNamespace(after_step=watch)])
            lines = (run_dir / "metrics.jsonl").read_text().splitlines()
            losses.append([json.loads(line)["loss"] for line in lines])
            if world.distributed:
                dist.barrier()
            if world.rank == 0:
                shutil.rmtree(run_dir / f"checkpoints/step_{STEPS:08}", ignore_errors=True)
            if world.distributed:
                dist.barrier()
        whole, resumed = found
        assert whole.keys() == resumed.keys()
        differ = [key for key in whole if not torch.equal(whole[key], resumed[key])]
        assert not differ, f"{name} on {world.size}: {len(differ)} of {len(whole)}: {differ[:3]}"
        assert losses[0] == losses[1] and len(losses[0]) == STEPS
    finish(training, world, f"{world.size} ranks: {len(packages)} resumed, {taken} steps")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
