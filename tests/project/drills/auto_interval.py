"""Save as often as a share of the time allows, with a rank that is slow to save; then undisturbed.

Usage: auto_interval.py FOLDER PACKAGE (by `drill`). Ranks that did not agree on when to save would
hang.
"""

import importlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 40
SETTINGS = {"device": "cpu", "train.steps": STEPS, "checkpoint.keep": STEPS, "train.log_every": 1}


def main(folder: Path, package: str) -> None:
    """Rank 0 prints the steps that were saved."""
    training = importlib.import_module(f"{package}.train")
    config = importlib.import_module(f"{package}.config")
    publisher = importlib.import_module(f"{package}.checkpoint.publish").Publisher
    publish, world = publisher.publish, None

    def slowly(*arguments: object) -> None:
        time.sleep(0.2 * int(os.environ["RANK"]))
        publish(*arguments)

    publisher.publish = slowly
    digests = set()
    for every in ("auto", 0):
        run_dir = folder / f"run-{every}"
        own = SETTINGS | {"run_dir": run_dir, "data.path": folder / "text.txt"}
        own |= {"checkpoint.every": every, "checkpoint.auto_share": 1.0, "train.validate_every": 9}
        settings = config.override(config.preset("tiny"), own)
        world = world or training.join(settings.parallel, "cpu")
        training._run(settings, world)
        dist.barrier()
        saved = sorted(int(path.name[5:]) for path in run_dir.glob("checkpoints/step_*"))
        for part in sorted((run_dir / f"checkpoints/step_{STEPS:08}").glob("*.distcp")):
            digests.add((part.name, part.read_bytes()))
        if world.rank == 0:
            print(f"{every}: {saved}", flush=True)
    assert len(digests) == len({name for name, _ in digests}), "saving more often changed the run"
    training.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
