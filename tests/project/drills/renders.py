"""What the drills share: settings of a render, the tensors at its end, and how a drill ends."""

import importlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


def load(package: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """Return the `train` module of a package, and its tiny preset with these changes."""
    training = importlib.import_module(f"{package}.train")
    config = importlib.import_module(f"{package}.config")
    return training, config.override(config.preset("tiny"), changes)


def train_to_the_end(package: str, settings: Any, world: Any) -> dict[str, torch.Tensor]:
    """Train, and return copies of all tensors of the last step's checkpoint (collective)."""
    training = importlib.import_module(f"{package}.train")
    naming = importlib.import_module(f"{package}.checkpoint.tensors")
    tensors: dict[str, torch.Tensor] = {}

    def watch(state: Any, record: Any) -> None:
        if state.step == settings.train.steps:
            for name, tensor in naming.flat(state.checkpointer.tensors()):
                tensors[name] = training.parallel.full_tensor(tensor).detach().clone()

    training._run(settings, world, [SimpleNamespace(after_step=watch)])
    dist.barrier()
    return tensors


def remove_checkpoint(run_dir: Path, step: int, world: Any) -> None:
    """Let rank 0 remove the checkpoint of a step while the others wait."""
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(run_dir / f"checkpoints/step_{step:08}")
    dist.barrier()


def spoil(state: Any) -> None:
    """Overwrite the weights and the optimizer's state: only a restore brings them back."""
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.fill_(7)
    state.optimizer.state.clear()


def finish(training: Any, world: Any, outcome: str) -> None:
    """Let rank 0 print the outcome, and leave the process group."""
    if world.rank == 0:
        print(outcome, flush=True)
    training.leave(world)
