"""Train with Muon, an average of the weights and a mixture of data, and again from the middle.

Usage: together.py FOLDER PACKAGE... (by `drill`). FOLDER has text in `letters` and in `digits`.
The first job of a folder trains undisturbed, whose end is kept for the later ones, which may be on
another number of ranks. Each then goes on from the middle: to the same bits on as many ranks.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from renders import load, remove_checkpoint, train_to_the_end

STEPS = 12
SETTINGS = {
    "device": "cpu",
    "train.steps": STEPS,
    "train.log_every": 1,
    "train.validate_every": STEPS // 2,
    "train.global_batch_size": 7,
    "train.micro_batch_size": 2,
    "checkpoint.every": STEPS // 2,
    "optim.name": "muon",
    "optim.ema": 0.9,
    "data.mix": "letters=0.7,digits=0.3",
}


def end_of_run(package: str, settings: Any, world: Any) -> dict[str, torch.Tensor]:
    """Train to the end: all tensors of its checkpoint, and the figures that were logged."""
    found = train_to_the_end(package, settings, world)
    for line in (settings.directory / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key, value in record.items():
            if key.startswith(("samples_of", "validation_", "loss")):
                found[f"{key} at {record['step']}"] = torch.tensor(value)
    return found


def main(folder: Path, packages: list[str]) -> None:
    """Rank 0 prints what was compared."""
    world = None
    for name in packages:
        run_dir, kept = folder / name, folder / f"{name}.pt"
        training, settings = load(name, SETTINGS | {"run_dir": run_dir, "data.path": folder})
        world = world or training.join(settings.parallel, "cpu")
        if new := not kept.exists():
            dist.barrier()
            whole = end_of_run(name, settings, world)
            if world.rank == 0:
                torch.save({"ranks": world.size, "end": whole}, kept)
            dist.barrier()
        remove_checkpoint(run_dir, STEPS, world)
        reference, resumed = torch.load(kept), end_of_run(name, settings, world)
        whole, exact = reference["end"], reference["ranks"] == world.size
        assert whole.keys() == resumed.keys()
        assert any(key.endswith(".ema") for key in whole)
        assert any(key.endswith(".momentum_buffer") for key in whole)
        assert f"validation_ema_loss at {STEPS}" in whole
        differ = [
            key
            for key, tensor in whole.items()
            if not (
                torch.equal(tensor, resumed[key])
                if exact
                else torch.allclose(tensor, resumed[key], rtol=1e-3, atol=1e-4)
            )
        ]
        assert not differ, f"{name} on {world.size}: {len(differ)} of {len(whole)}: {differ[:3]}"
        dist.barrier()
        if world.rank == 0:
            kind = "the same" if exact else "near"
            print(f"{name} on {world.size} ranks: {kind}, new: {new}", flush=True)
    training.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
