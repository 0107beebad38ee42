"""Train a contrastive model in several renders, interrupted and resumed.

Usage: contrastive.py FOLDER PACKAGE... (by `drill`); losses go to FOLDER/<ranks>.json.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

SETTINGS = {
    "device": "cpu",
    "train.steps": 6,
    # Some of four ranks have fewer samples than the others, and none of a validation's last two.
    "train.global_batch_size": 18,
    "train.micro_batch_size": 18,
    "train.validate_samples": 20,
    "train.validate_every": 3,
    "train.log_every": 1,
    "checkpoint.every": 3,
    "optim.warmup_steps": 0,
    "optim.final_fraction": 1.0,
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, wherever its parts are (a collective call)."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def main(folder: Path, packages: list[str]) -> None:
    """Train each package in every way."""
    first = importlib.import_module(f"{packages[0]}.train")
    first_config = importlib.import_module(f"{packages[0]}.config")
    world = first.join(first_config.Config().parallel, "cpu")
    losses: dict[str, Any] = {}
    for name in packages:
        training = importlib.import_module(f"{name}.train")
        config = importlib.import_module(f"{name}.config")

        def go(where: str, training: Any = training, config: Any = config, **more: Any) -> Any:
            changes = {key.replace("__", "."): value for key, value in more.items()}
            settings = SETTINGS | {"run_dir": folder / f"{world.size}_{where}"} | changes
            found: dict[str, Any] = {"loss": [], "validation": []}

            def watch(state: Any, record: dict[str, Any]) -> None:
                found["loss"].append(record["loss"])
                if "validation_loss" in record:
                    found["validation"].append(record["validation_loss"])
                model = state.model.state_dict()
                found["weights"] = {key: whole(value) for key, value in model.items()}

            settings = config.override(config.preset("tiny"), settings)
            training._run(settings, world, [SimpleNamespace(after_step=watch)])
            return found

        undisturbed = go(f"{name}_whole")
        go(f"{name}_halves", train__steps=3)
        resumed = go(f"{name}_halves")
        for key, value in undisturbed.pop("weights").items():
            assert torch.equal(resumed["weights"][key], value), key
        losses[name] = undisturbed
        errors = importlib.import_module(f"{name}.errors")
        for setting, value in (("micro", 18 // world.size // 2), ("validate", 20)):
            try:
                go(f"{name}_{setting}", **{f"train__{setting}_batch_size": value})
            except errors.UserError as error:
                assert "compares all samples of a batch" in str(error), error
                assert f"--train.{setting}-batch-size" in str(error), error
            else:
                raise AssertionError(f"{setting} batches of {value} were not refused")
    if world.rank == 0:
        (folder / f"{world.size}.json").write_text(json.dumps(losses))
    first.leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
