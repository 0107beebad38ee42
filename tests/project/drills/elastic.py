"""Train several renders in one process to a step, from wherever they stand.

Usage: elastic.py FOLDER RUN STEPS PACKAGE... (by `drill`)
"""

import sys
from pathlib import Path

import torch
from renders import load


def main(folder: Path, run: str, steps: int, packages: list[str]) -> None:
    """Train with one process group for all packages."""
    world = None
    for name in packages:
        changes = {
            "device": "cpu",
            "run_dir": folder / name / run,
            "train.steps": steps,
            "train.log_every": 1,
            "checkpoint.keep": 99,
            "optim.final_fraction": 1.0,  # a longer run has a longer schedule: hold it flat
        }
        training, settings = load(name, changes)
        world = world or training.join(settings.parallel, "cpu")
        training._run(settings, world, [])
    training.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
