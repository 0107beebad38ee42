"""Train on a stream for each rank, and again from the middle, on as many ranks and on others.

Usage: streams.py FOLDER PACKAGE... (by `drill`). On two ranks it trains, and goes on from the
middle to the same bits; any other number of ranks has to be refused.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from renders import load, remove_checkpoint, train_to_the_end

STEPS = 8
SETTINGS = {
    "device": "cpu",
    "train.steps": STEPS,
    "train.validate_every": 0,
    "train.global_batch_size": 6,
    "train.micro_batch_size": 2,
    "checkpoint.every": STEPS // 2,
}


class Stream:
    """The samples of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.place, self.seen = rank, 0, []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.place < 9 + self.rank:
            number, self.place = self.place, self.place + 1
            self.seen.append(number)
            generator = torch.Generator().manual_seed(100 * self.rank + number)
            yield {"tokens": torch.randint(0, 256, (33,), generator=generator).byte()}
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        """Its place."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self.place = state["place"]


def end_of_run(package: str, settings: Any, world: Any) -> tuple[list[int], dict[str, Any]]:
    """Train to the end: what this rank has read, and all tensors of the last checkpoint."""
    training = importlib.import_module(f"{package}.train")
    build, stream = importlib.import_module(f"{package}.data"), Stream(world.rank)
    training.build_datasets = lambda config: (stream, *build.build_datasets(config)[1:])
    tensors = train_to_the_end(package, settings, world)
    return stream.seen, tensors


def bad_step(training: Any, settings: Any, world: Any) -> str:
    """What a run says of a bad step that it may not skip."""
    settings = importlib.import_module(f"{training.__package__}.config").override(
        settings, {"train.on_bad_step": "stop", "train.steps": 2}
    )
    compute = training.compute_loss

    def of_nan(model: Any, batch: Any) -> Any:
        loss = compute(model, batch)
        return loss._replace(total=loss.total * torch.nan)

    training.compute_loss = of_nan
    try:
        training._run(settings, world, [])
    except ValueError as error:
        return str(error)
    finally:
        training.compute_loss = compute
    return ""


def main(folder: Path, packages: list[str]) -> None:
    """Rank 0 prints what was compared."""
    world = None
    (folder / "text.txt").write_text("Was ever woman in this humour wooed? " * 100)
    for name in packages:
        errors = importlib.import_module(f"{name}.errors")
        run_dir = folder / f"run_{name}"
        own = SETTINGS | {"run_dir": run_dir, "data.path": folder / "text.txt"}
        training, settings = load(name, own)
        world = world or training.join(settings.parallel, "cpu")
        outcome = "refused"
        if world.size == 2:
            seen, whole = end_of_run(name, settings, world)
            remove_checkpoint(run_dir, STEPS, world)
            again, resumed = end_of_run(name, settings, world)
            assert len(seen) == 3 * STEPS and again == seen[3 * STEPS // 2 :], (seen, again)
            assert all(torch.equal(resumed[key], tensor) for key, tensor in whole.items())
            told = bad_step(training, load(name, own | {"run_dir": folder / "bad"})[1], world)
            assert "cannot be searched, since each rank reads its own part" in told, told
            outcome = "the same"
        else:
            remove_checkpoint(run_dir, STEPS, world)
            try:
                end_of_run(name, settings, world)
            except errors.UserError as error:
                assert "positions of 2 ranks" in str(error), error
            else:
                raise AssertionError("it went on with another number of ranks")
        if world.rank == 0:
            print(f"{name} on {world.size} ranks: {outcome}", flush=True)
        dist.barrier()
    training.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
