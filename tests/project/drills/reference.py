"""Train renders beside the reference of plain_loop.py, and say in what they differ.

Usage: reference.py FOLDER PACKAGE... (by `drill`). FOLDER holds the references and settings.json
(for each package the name of its reference, and its settings); FOLDER/<ranks>.json gets the
differences by package.

The reference computes in float64, so that what is left is the rounding of the render's float32
and, with several ranks, the order of its sums: 1e-7 each. TOLERANCES are four to ten times what
these amount to in 30 steps. AdamW divides a gradient by its own size, so that a weight whose
gradient is almost zero moves by its rounding: weights are compared by their norm, tensor by tensor.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

WEIGHTS_EVERY = 10  # steps: to gather them from all ranks takes longer than a step
TOLERANCES = {"loss": 1e-5, "metric": 1e-5, "norm": 1e-5, "clipped": 1e-5, "rate": 1e-9}
TOLERANCES |= {"weights": 1e-4, "validation": 1e-5, "start": 0.0}


def measure(package: str, settings: Any, world: Any) -> dict[str, Any]:
    """Train as the settings say; what is seen from outside of each step, on all ranks."""
    training = importlib.import_module(f"{package}.train")
    parallel = importlib.import_module(f"{package}.distributed").parallel
    seen: dict[str, Any] = {name: [] for name in ("records", "norms", "clipped", "rates")}

    def weights_of(state: Any) -> dict[str, torch.Tensor]:
        named = state.model.named_parameters()
        return {name: parallel.full_tensor(p.detach()).clone() for name, p in named}

    def begin(state: Any) -> None:
        if state.step == 0:
            seen["weights"] = [weights_of(state)]
            state.optimizer.register_step_pre_hook(note_gradients)

    def note_gradients(optimizer: Any, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norms = [parallel.local_part(p.grad).double().norm() for p in parameters]
        square = torch.stack(norms).square().sum()
        if isinstance(parameters[0], DTensor):  # each rank has a part
            torch.distributed.all_reduce(square)
        seen["clipped"].append(float(square.sqrt()))

    def end(state: Any, record: Any) -> None:
        seen["norms"].append(float(state.grad_norm))
        seen["rates"].append([group["lr"] for group in state.optimizer.param_groups])
        if state.step % WEIGHTS_EVERY == 0:
            seen["weights"].append(weights_of(state))
        if record:
            seen["records"].append(dict(record))

    training._run(settings, world, [SimpleNamespace(before_step=begin, after_step=end)])
    return seen


def differences(seen: dict[str, Any], reference: Any, start: dict, metric: str) -> dict[str, float]:
    """The largest relative difference of each kind."""
    largest = dict.fromkeys(TOLERANCES, 0.0)

    def compare(kind: str, here: float, there: float) -> None:
        found = abs(here - there) / max(abs(there), 1e-12)
        largest[kind] = max(largest[kind], found if found == found else float("inf"))

    def compare_weights(kind: str, here: dict, there: dict) -> None:
        assert here.keys() == there.keys()
        for name, tensor in there.items():
            compare(kind, float((here[name] - tensor).norm()) + float(tensor.norm()), tensor.norm())

    steps, done = len(reference["rates"]), 0
    assert len(seen["norms"]) == len(seen["clipped"]) == steps
    for step in range(steps):
        compare("norm", seen["norms"][step], reference["norms"][step])
        compare("clipped", seen["clipped"][step], reference["clipped"][step])
        for rate in seen["rates"][step]:
            compare("rate", rate, reference["rates"][step])
    compare_weights("start", seen["weights"][0], start)
    for i, weights in enumerate(reference["weights"]):
        compare_weights("weights", seen["weights"][i + 1], weights)
    for record in seen["records"]:  # of the steps since the record before
        sums = torch.tensor(reference["sums"][done : record["step"]], dtype=torch.float64).sum(0)
        done = record["step"]
        compare("loss", record["loss"], sums[0] / sums[1])
        compare("metric", record[metric], sums[2] / sums[1])
        compare("norm", record["grad_norm"], reference["norms"][done - 1])
        compare("rate", record["lr"], reference["rates"][done - 1])
        if done in reference["validation"]:
            names = ("validation_loss", f"validation_{metric}")
            for name, value in zip(names, reference["validation"][done], strict=True):
                compare("validation", record.get(name, float("nan")), value)
    assert done == steps
    return {kind: float(found) for kind, found in largest.items()}


def too_large(found: dict[str, float]) -> dict[str, float]:
    """Those of the differences that are no rounding."""
    return {kind: value for kind, value in found.items() if value > TOLERANCES[kind]}


def main(folder: Path, packages: list[str]) -> None:
    """Train each with one process group, and compare on rank 0."""
    world, found = None, {}
    plans = json.loads((folder / "settings.json").read_text())
    for name in packages:
        training = importlib.import_module(f"{name}.train")
        config = importlib.import_module(f"{name}.config")
        reference, changes = plans[name]
        changes |= {"data.path": Path(changes["data.path"])}
        settings = config.override(config.preset("tiny"), changes)
        world = world or training.join(settings.parallel, "cpu")
        own = {"train.log_every": world.size, "run_dir": folder / f"{world.size}-{name}"}
        seen = measure(name, config.override(settings, own), world)
        if world.rank == 0:
            found[name] = differences(seen, *torch.load(folder / f"{reference}.pt"))
    if world.rank == 0:
        (folder / f"{world.size}.json").write_text(json.dumps(found))
    training.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
