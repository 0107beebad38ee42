"""Train renders in one process, with a save after each step, for crash_points to record.

Usage: saving.py FOLDER '[[PACKAGE, RUN, STEPS], …]' (plain or under torchrun)
"""

import functools
import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

RUN = "runs/default"  # of the recorded directory; all of it is made by the run itself


def main(folder: Path, jobs: list[tuple[str, str, int]]) -> None:
    """Train one after the other; note aside what was to be saved, and when each save was over."""
    world = None
    for package, run, steps in jobs:
        train = importlib.import_module(f"{package}.train")
        config = importlib.import_module(f"{package}.config")
        settings = config.override(
            config.preset("tiny"),
            {
                "device": "cpu",
                "run_dir": folder / "disk" / run / RUN,
                "data.path": folder / "text.txt",
                "train.steps": steps,
                "train.validate_every": 0,
                "optim.final_fraction": 1.0,  # a longer run has a longer schedule: hold it flat
                "checkpoint.every": 1,
                "checkpoint.keep": 1,  # so that each save prunes the one before
            },
        )
        world = world or train.join(settings.parallel, "cpu")
        note_saves(importlib.import_module(f"{package}.checkpoint.publish"), folder / "marks" / run)

        note = functools.partial(note_state, folder / "expected" / run)
        train._run(settings, world, [SimpleNamespace(after_step=note)])
    train.leave(world)


def note_state(folder: Path, state: Any, record: Any) -> None:
    """Write what the checkpoint of this step has to hold."""
    tensors = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state.checkpointer.tensors().items()
    }
    if state.world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(tensors, folder / f"{state.step}.pt")


def note_saves(publishing: Any, marks: Path) -> None:
    """Leave a mark, which the recording shows in its place, when a checkpoint is published."""
    if not hasattr(publishing.Publisher, "unmarked"):
        publishing.Publisher.unmarked = publishing.Publisher.commit

    def commit(self: Any, reserved: str, manifest: dict[str, Any]) -> None:
        self.unmarked(reserved, manifest)
        os.makedirs(marks / publishing.step_name(manifest["step"]), exist_ok=True)

    publishing.Publisher.commit = commit


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
