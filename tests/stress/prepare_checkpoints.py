"""Saves three checkpoints with each of several renders, for others to damage.

Usage: prepare_checkpoints.py FOLDER PACKAGE... (plain or under torchrun); runs are FOLDER/PACKAGE.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

ANSWERS = ("torch_save", "dcp", "dcp_async")


def settings(package: str, run_dir: Path, text: Path, steps: int = 3, **more: Any) -> Any:
    """The tiny preset, with a checkpoint at every step."""
    config = importlib.import_module(f"{package}.config")
    return config.override(
        config.preset("tiny"),
        {
            "device": "cpu",
            "run_dir": run_dir,
            "data.path": text,
            "train.steps": steps,
            "checkpoint.every": 1,
            "optim.final_fraction": 1.0,
            **more,
        },
    )


def save(folder: Path, packages: list[str]) -> None:
    """Train three steps with each, in one process group."""
    world = None
    text = folder / "text.txt"
    for name in packages:
        training = importlib.import_module(f"{name}.train")
        config = settings(name, folder / name, text)
        world = world or training.join(config.parallel, "cpu")
        training._run(config, world, [])
    training.leave(world)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    save(Path(sys.argv[1]), sys.argv[2:])
