"""Train on few samples: one, and fewer than a batch, which more ranks than samples divide.

Usage: sizes.py FOLDER PACKAGE (by `drill`); losses go to FOLDER/<ranks>.json.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Subset

SETTINGS = {
    "device": "cpu",
    "train.steps": 4,
    "train.global_batch_size": 10,
    "train.micro_batch_size": 3,
    "train.validate_every": 2,
    "train.log_every": 1,
}


def main(folder: Path, package: str) -> None:
    """Train with 1, 2 and 7 samples, and validate with as many."""
    training = importlib.import_module(f"{package}.train")
    config = importlib.import_module(f"{package}.config")
    world = training.join(config.Config().parallel, "cpu")
    build = training.build_datasets
    losses: dict[str, list[float]] = {}
    for count in (1, 2, 7):
        found = losses.setdefault(str(count), [])

        def few(settings: Any, count: int = count) -> Any:
            samples, validation, spec = build(settings)
            return Subset(samples, range(count)), Subset(validation, range(count)), spec

        def watch(state: Any, record: dict[str, Any], found: list[float] = found) -> None:
            found.append(record["loss"])
            if "validation_loss" in record:
                found.append(record["validation_loss"])

        training.build_datasets = few
        run_dir = folder / f"{world.size}_ranks_{count}_samples"
        settings = config.override(config.preset("tiny"), SETTINGS | {"run_dir": run_dir})
        training._run(settings, world, [SimpleNamespace(after_step=watch)])
    if world.rank == 0:
        (folder / f"{world.size}.json").write_text(json.dumps(losses))
    training.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
