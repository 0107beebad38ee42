"""Ranks of unequal speed: which one is reported as the slowest, and what each log holds.

Usage: pace.py FOLDER DDP_PACKAGE FSDP_PACKAGE (by `drill`, on three ranks)
"""

import importlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

RANK = int(os.environ["RANK"])
EVEN, SLOW = 0.1, 0.25  # seconds that a rank takes for something
CLOCK = SimpleNamespace(**vars(time), seconds=0.0)
CLOCK.perf_counter = lambda: CLOCK.seconds
"""Shows what this rank has taken its time for, and nothing that a busy machine adds to that."""
CASES = {"even": (0, "step", None), "slow step": (0, "step", 2), "slow data": (1, "data", 1)}


def slowed(function: Callable[..., Any], slow: bool) -> Callable[..., Any]:
    """The function, after a while."""

    def waiting(*arguments: Any, **options: Any) -> Any:
        seconds = SLOW if slow else EVEN
        time.sleep(seconds)
        CLOCK.seconds += seconds
        return function(*arguments, **options)

    return waiting


def noisy(state: Any, record: Any) -> None:
    """What a rank may say in a step, by each road."""
    if state.step == 1:
        print(f"printed by rank {RANK}")
        warnings.warn(f"Python's warning of rank {RANK}", stacklevel=1)
        os.write(2, f"library's line of rank {RANK}\n".encode())
        log = logging.getLogger(type(state).__module__)
        log.warning("warning of rank %d", RANK)
        log.error("error of rank %d", RANK)


def fail(state: Any, record: Any) -> None:
    """As a mistake would."""
    raise ValueError(f"broken on rank {RANK}")


def main(folder: Path, packages: list[str]) -> None:
    """Train in each case; rank 0 prints what the log says of each as one line of JSON."""
    found, world = {}, None
    for name, (which, where, slow) in CASES.items():
        training, configuration, sampling, logs, pace = (
            importlib.import_module(f"{packages[which]}.{module}")
            for module in ("train", "config", "sampling", "run.logs", "distributed.stragglers")
        )
        pace.time = CLOCK
        logs.log_to_console()
        changes = {"device": "cpu", "run_dir": folder / name, "train.steps": 10}
        changes |= {"train.log_every": 2, "train.validate_every": 0, "checkpoint.every": 4}
        changes |= {"data.path": folder / "text.txt"}
        config = configuration.override(configuration.preset("tiny"), changes)
        world = world or training.join(config.parallel, "cpu")
        module, function = (training, "compute_loss") if where == "step" else (sampling, "fetch")
        before = getattr(module, function)
        setattr(module, function, slowed(before, slow == RANK))
        training._run(config, world, [SimpleNamespace(after_step=noisy)])
        setattr(module, function, before)
        if RANK == 0:
            lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
            found[name] = [line.get("slowest_rank") for line in lines]
    try:
        config = configuration.override(config, {"run_dir": folder / "broken"})
        training._run(config, world, [SimpleNamespace(after_step=fail)])
    except ValueError:
        pass
    cut_off(packages[1], world)
    if RANK == 0:
        print(json.dumps(found))


def cut_off(package: str, world: Any) -> None:
    """The last rank is not there any more; the others do not wait for it as at the start."""
    agreement, errors, world_module = (
        importlib.import_module(f"{package}.{module}")
        for module in ("distributed.agreement", "errors", "distributed.world")
    )
    group = agreement.Group(world)
    group.exchange([0, 0])
    if world.size - 1 != RANK:
        group.exchange([0, 0])  # of before: all have sent it, or will
        group.timeout = timedelta(seconds=0.5)
        try:
            group.exchange([0, 0])
        except errors.RankError as error:
            assert "did not answer" in str(error)
        else:
            raise AssertionError("there was an answer")
    dist.barrier()
    world_module.leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)
