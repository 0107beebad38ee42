"""The tasks of the restore drill: train a short run, kill it, load its checkpoints, time saves.

`python -m` this module FOLDER TASK runs a task as a plain process or, under torchrun, on several
ranks. It reads FOLDER/settings.json, works on the run FOLDER/run and writes FOLDER/TASK.json.
"""

import logging
import os
import signal
import sys
import time
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import Config, load, override
from ..device import synchronize
from ..distributed import Group, World, join, leave, parallel
from ..errors import UserError, exit_code
from ..files import fingerprint, write_json
from ..run.logs import log_to_console
from ..train import State, resume, run, setup, train_step
from .stage import PACKAGE, StageConfig
from .timing import record_steps, spread

IMPORTED = time.time()
STEPS, EVERY = 12, 3  # of a drill's run, and between its saves
QUIET_STEPS, SAVES = 16, 6  # to time: steps without a save, and saves
Digests = dict[str, str]  # a fingerprint by the name of a tensor


def main(words: list[str]) -> int:
    """Run one task."""
    folder, task = Path(words[0]), words[1]
    config = override(load(folder / "settings.json", StageConfig), {"run_dir": folder / "run"})
    world = join(config.parallel, config.device)
    if task in ("reload", "damage"):
        result = reload(config, world, timed=task == "damage")
        leave(world)  # only now that nothing refers to the model
    else:
        recorder = Recorder(folder / "kill.json" if task == "kill" else None)
        run(config, [recorder], world)
        result = recorder.result
    if os.environ.get("RANK", "0") == "0":
        write_json(folder / f"{task}.json", result)
    return 0


class Recorder:
    """A callback: the moments of a (re)start, and digests of what is restored and saved.

    With `kill_file` it kills the run during its last save, and first writes what it has recorded.
    """

    def __init__(self, kill_file: Path | None) -> None:
        self.kill_file = kill_file
        self.restart: dict[str, float] = {}
        self.digests: dict[int, Digests] = {}
        self.result = {"restart": self.restart, "digests": self.digests}

    def before_step(self, state: State) -> None:
        """Note that the checkpoint is loaded."""
        if self.restart:
            return
        self.restart |= {"step": state.step, "imported": IMPORTED, "restored": time.time()}
        self.group = Group(state.world)
        self.digests[state.step] = digests_of(state, self.group)
        self.hashed = time.time()
        if self.kill_file and state.checkpointer:
            publisher: Any = state.checkpointer.publisher
            self.commit, publisher.commit = publisher.commit, self.kill_or_commit

    def after_step(self, state: State, record: dict[str, Any] | None) -> None:
        """Note the first step, and what is saved."""
        first_step = time.time() - self.hashed  # hashing is no part of a restart
        self.restart.setdefault("first_step", self.restart["restored"] + first_step)
        if state.step % EVERY == 0:
            self.digests[state.step] = digests_of(state, self.group)

    def kill_or_commit(self, reserved: str, manifest: dict[str, Any]) -> None:
        """Publish, or kill the run in its last save, when all ranks have written their files."""
        if self.kill_file and manifest["step"] == STEPS:
            write_json(self.kill_file, {**self.result, "killed_at": time.time()})
            kill_run()
        self.commit(reserved, manifest)


def kill_run() -> None:
    """Kill this run: torchrun, with which the kernel kills all its ranks, or this process alone."""
    if "RANK" in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def reload(config: Config, world: World, timed: bool) -> dict[str, Any]:
    """Restore the run over other values; its step, digests, log and costs, or why it is refused."""
    logging.getLogger(PACKAGE).addHandler(log := BufferingHandler(1_000_000))
    try:
        state, group = setup(config, world), Group(world)
        with torch.no_grad():
            for tensor in state.model.state_dict().values():
                tensor.fill_(7)
        resume(state, config.directory, group).close()
    except UserError as error:  # as where it is too large for so few ranks
        return {"refused": str(error)}
    result = {"step": state.step, "digests": digests_of(state, group)}
    result["messages"] = [record.getMessage() for record in log.buffer]
    if timed:
        result["costs"] = time_saves(state, config.directory.with_name("timed"), group)
    state.loader.close()
    return result


def time_saves(state: State, run_dir: Path, group: Group) -> dict[str, Any]:
    """Seconds of a step without a save, of saves one at a time, and of a restore.

    Of a save: what it blocks training, as the checkpointer counts, and until it is published,
    while training takes one step.
    """
    checkpointer = resume(state, run_dir, group)
    quiet = record_steps(state, QUIET_STEPS).seconds[1:]
    blocked, published = seconds = np.zeros((2, SAVES))
    for save in range(SAVES):
        synchronize(state.world.device)  # otherwise the save would wait for the steps before it
        began, before = time.perf_counter(), checkpointer.blocked_seconds
        checkpointer.save(state.step)
        train_step(state, state.loader.next())
        blocked[save] = checkpointer.blocked_seconds - before
        checkpointer.settle()
        published[save] = time.perf_counter() - began
    began = time.perf_counter()
    checkpointer.restore()
    restored = time.perf_counter() - began
    checkpointer.close()
    ranks = group.gather((seconds[:, 1:], restored))  # the first save warms up
    blocked, published = np.max([saves for saves, _ in ranks], axis=0)  # of the slowest rank
    return {
        "blocked_seconds": spread(blocked),
        "save_seconds": spread(published),
        "restore_seconds": max(restored for _, restored in ranks),
        "step_seconds": spread(quiet),
    }


def digests_of(state: State, group: Group) -> Digests:
    """sha256 of each full (unsharded) tensor of model and optimizer.

    Where ranks hold different values, rank 0 returns all of theirs, to which nothing can be equal.
    """
    assert state.checkpointer
    digests = {}
    for name, tensor in state.checkpointer.tensors().items():
        full = parallel.full_tensor(tensor).detach().cpu().contiguous()
        digests[name] = fingerprint(full.flatten().view(torch.uint8).numpy())
    ranks = group.gather(digests)
    return {name: " ".join(sorted({other[name] for other in ranks})) for name in digests}


if __name__ == "__main__":
    log_to_console()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
