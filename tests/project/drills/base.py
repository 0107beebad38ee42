"""Train from a base that checkpoints leave out, in several renders, and pass the runs on.

Usage: base.py FOLDER PACKAGE... (by `drill`), in one process first. Each call continues the run of
the call before by 4 steps, by its first package, and compares the weights with those of a run of as
many steps that saves everything.
"""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, wherever its parts are (a collective call)."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Adapted(nn.Linear):
    """A frozen layer and a trained addition, which begins with random numbers."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = layer.weight
        self.down = nn.Parameter(torch.randn(3, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to what the layer gives."""
        return super().forward(x) + x @ self.down.T @ self.up.T


def main(folder: Path, packages: list[str]) -> None:
    """Train with each package."""
    first = importlib.import_module(f"{packages[0]}.train")
    first_config = importlib.import_module(f"{packages[0]}.config")
    world = first.join(first_config.Config().parallel, "cpu")
    for name in packages:
        training = importlib.import_module(f"{name}.train")
        config = importlib.import_module(f"{name}.config")
        build = importlib.import_module(f"{name}.model").build_model

        def adapted(*arguments: Any, build: Any = build) -> nn.Module:
            model = build(*arguments).requires_grad_(False)
            for block in model.blocks:
                block.up = Adapted(block.up)
            return model

        def go(
            where: str, steps: int, training: Any = training, config: Any = config, **more: Any
        ) -> dict[str, torch.Tensor]:
            settings = {
                "device": "cpu",
                "data.path": folder / "text.txt",
                "run_dir": folder / where,
                "train.steps": steps,
                "optim.warmup_steps": 0,
                "optim.final_fraction": 1.0,
                **{key.replace("__", "."): value for key, value in more.items()},
            }
            found: dict[str, torch.Tensor] = {}

            def watch(state: Any, record: Any) -> None:
                if state.step == steps:
                    found.update({k: whole(v) for k, v in state.model.state_dict().items()})

            settings = config.override(config.preset("tiny"), settings)
            training._run(settings, world, [SimpleNamespace(after_step=watch)])
            return found

        base = folder / "base.safetensors"
        if not base.exists():
            from safetensors.torch import save_file

            pretrained = go("pretrained", 2)
            save_file(pretrained, base)
        training.build_model = adapted
        run = folder / "passed_on/checkpoints"
        done = max([int(path.name[5:]) for path in run.glob("step_*")], default=0)
        steps = done + 4
        passed_on = go("passed_on", steps, init_from=base, checkpoint__frozen="no")
        undisturbed = go(f"{name}_{world.size}_{steps}", steps, init_from=base)
        assert passed_on.keys() == undisturbed.keys()
        for key, value in undisturbed.items():
            # Several ranks sum in another order than one.
            torch.testing.assert_close(passed_on[key], value, rtol=1e-4, atol=1e-6)
        again = go(
            f"{name}_{world.size}_{steps}_left_out", steps, init_from=base, checkpoint__frozen="no"
        )
        for key, value in undisturbed.items():
            assert torch.equal(again[key], value), key
        print("the same bits")
        if world.size > 1:
            # A rank that cannot see the files makes all ranks build the model in the plain way, or
            # they would wait for each other. All read from the path of rank 0.
            place = base if world.rank == 0 else folder / "missing.safetensors"
            assert go(f"{name}_{world.size}_missing", 2, init_from=place)
    first.leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
