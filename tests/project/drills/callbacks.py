"""A user's callbacks on several ranks: all of them are called on each, and a sample is printed.

With STEPS one rank ends a run of so many early: all leave at the same step.

Usage: callbacks.py FOLDER PACKAGE [STEPS] (by `drill`, on two ranks)
"""

import importlib
import json
import logging
import os
import sys
from pathlib import Path

import torch

RANK = os.environ["RANK"]
CALLS = []


class Recorder:
    """Notes what it is called for."""

    def __enter__(self):
        CALLS.append("enter")

    def __exit__(self, *exception):
        CALLS.append("exit")

    def after_step(self, state, record):
        """Called after a step."""
        CALLS.append(f"step {state.step}{'' if record is None else ', logged'}")

    def after_validation(self, state, figures):
        """Called after a validation."""
        CALLS.append(f"validation {sorted(figures)}")


class Early:
    """Ends the run at the first validation from step 4 on, on the last rank."""

    def after_validation(self, state, figures):
        """Called after a validation."""
        if RANK == "1" and state.step >= 4:
            state.finish("it is good enough")


def main(folder: Path, package: str, steps: str = "") -> None:
    """Train three steps with two callbacks in callbacks.py's list, or until `Early` ends it."""
    own = importlib.import_module(f"{package}.callbacks")
    own.callbacks = lambda config, run_dir: [Recorder(), own.Sample(run_dir)]
    config = importlib.import_module(f"{package}.config")
    log = logging.getLogger(package)
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout) if RANK == "0" else logging.NullHandler())
    ground = {"device": "cpu", "data.path": folder / "text.txt", "run_dir": folder / "run"}
    ground |= {"train.steps": 3, "train.log_every": 2, "train.validate_every": 2}
    if steps:
        own.callbacks = lambda config, run_dir: [Early()]
        ground |= {"run_dir": folder / "early", "train.steps": int(steps)}
        ground |= {"train.validate_every": 1}
    result = importlib.import_module(f"{package}.train").run(
        config.override(config.preset("tiny"), ground)
    )
    if not steps:
        assert result.status == "finished"
        (folder / f"calls_{RANK}.json").write_text(json.dumps(CALLS))
    else:
        with (folder / f"ends_{RANK}").open("a") as file:
            file.write(f"{steps} steps: {result.status} at {result.step}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
