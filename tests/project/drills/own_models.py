"""Train models of one's own in several renders: compiled or not, interrupted and resumed.

Usage: own_models.py FOLDER PACKAGE... (by `drill`). A package is named after the model and the
variant; runs go to FOLDER/<ranks>/<package>.
"""

import importlib
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

STEPS = 4
# A flat schedule, since half a run has another one; and saves at the same steps, since a save
# brings the ranks' batch statistics to agreement.
ALIKE = {
    "train.global_batch_size": 8,
    "train.validate_samples": 16,
    "optim.warmup_steps": 0,
    "optim.final_fraction": 1.0,
    "train.log_every": 1,
    "checkpoint.every": STEPS // 2,
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, wherever its parts are (a collective call)."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def main(folder: Path, packages: list[str]) -> None:
    """Train each package's model in every way; the losses go to FOLDER/<ranks>.json."""
    world: Any = None
    losses: dict[str, list[float]] = {}
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    for name in packages:
        logging.getLogger(name).addHandler(handler)
        training = importlib.import_module(f"{name}.train")
        config = importlib.import_module(f"{name}.config")
        build = importlib.import_module(f"{name}.model").build_model

        def go(where: str, world: Any, training: Any = training, config: Any = config, **more: Any):
            changes = {key.replace("__", "."): value for key, value in more.items()}
            settings = {"device": "cpu", "run_dir": folder / where, "train.steps": STEPS}
            settings = config.override(config.preset("tiny"), settings | ALIKE | changes)
            final: dict[str, torch.Tensor] = {}
            seen: list[float] = []

            def watch(state: Any, record: dict[str, Any] | None) -> None:
                seen.append(record["loss"])
                if state.step == settings.train.steps:
                    final.update({k: whole(v) for k, v in state.model.state_dict().items()})

            training._run(settings, world, [SimpleNamespace(after_step=watch)])
            return settings, final, seen

        if world is None:
            world = training.join(config.Config().parallel, "cpu")
        where = f"{world.size}/{name}"
        settings, undisturbed, losses[name] = go(f"{where}/whole", world)
        assert losses[name][-1] < losses[name][0], (name, losses[name])
        spec = training.build_datasets(settings)[2]
        keys = list(build(settings, spec).state_dict())
        assert list(undisturbed) == keys, "a name has changed"

        go(f"{where}/halves", world, train__steps=STEPS // 2)
        _, resumed, _ = go(f"{where}/halves", world)
        for key, value in undisturbed.items():
            assert torch.equal(value, resumed[key]), f"{name}: {key} after a resume"

        # Whole and with its backward pass on one rank; on two, what has to go with the wrappers.
        how = {"compile__backend": "aot_eager", "compile__mode": "full"}
        if world.size > 1:
            how = {"compile__backend": "eager", "compile__mode": "blocks"}
        _, compiled, _ = go(f"{where}/compiled", world, **how)
        assert list(compiled) == keys, "compiling has changed a name"
        for key, value in undisturbed.items():
            close = torch.allclose(value, compiled[key], atol=2e-4, rtol=1e-3)
            assert close, f"{name}: {key} after compiling"
        if world.rank == 0:
            travel = importlib.import_module(f"{name}.checkpoint.transfer")
            file = folder / f"{where}.safetensors"
            travel.export(folder / where / "whole", travel.ExportConfig(to=file))
            exported = importlib.import_module("safetensors.torch").load_file(file)
            assert set(exported) == set(keys), "an export has other names than the model"
            build(settings, spec).load_state_dict(exported, strict=True)
            assert all(torch.equal(exported[key], undisturbed[key]) for key in keys)
    assert not any("Python attributes" in warning for warning in warnings), warnings
    if world.rank == 0:
        (folder / f"{world.size}.json").write_text(json.dumps(losses))
        print(f"{len(packages)} models trained on {world.size} ranks")
    training.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
