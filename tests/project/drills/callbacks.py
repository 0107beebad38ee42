"""A user's callbacks on several ranks: all of them are called on each, and a sample is printed.

Usage: callbacks.py FOLDER PACKAGE (by `drill`, on two ranks)
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


def main(folder: Path, package: str) -> None:
    """Train three steps with two callbacks in callbacks.py's list."""
    own = importlib.import_module(f"{package}.callbacks")
    own.callbacks = lambda config, run_dir: [Recorder(), own.Sample(run_dir)]
    config = importlib.import_module(f"{package}.config")
    log = logging.getLogger(package)
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout) if RANK == "0" else logging.NullHandler())
    ground = {"device": "cpu", "data.path": folder / "text.txt", "run_dir": folder / "run"}
    ground |= {"train.steps": 3, "train.log_every": 2, "train.validate_every": 2}
    result = importlib.import_module(f"{package}.train").run(
        config.override(config.preset("tiny"), ground)
    )
    assert result.status == "finished"
    (folder / f"calls_{RANK}.json").write_text(json.dumps(CALLS))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
