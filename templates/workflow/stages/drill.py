"""Train a short run, kill it, load its checkpoints and time saves: tasks of the checkpoint stage.

The arguments are FOLDER and TASK. A task runs in one process or, under torchrun, on several ranks.
It reads FOLDER/settings.json, uses the run directory FOLDER/run and writes FOLDER/TASK.json.
"""

import logging
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoint.checkpointer import Checkpointer
from ..config import Config, load, override
from ..device import synchronize
from ..distributed import Group, World, join, leave, parallel
from ..errors import UserError, run_main
from ..files import fingerprint, read_json, write_json
from ..run.logs import log_to_console
from ..train import State, resume, run, setup, train_step
from .stage import PACKAGE, StageConfig
from .timing import record_steps, spread

# The time at which this process had imported torch and the package.
IMPORTED = time.time()
# The number of steps of the short run, and of steps between its saves.
STEPS = 12
EVERY = 3
# The number of steps without a save, whose time is the reference for the time of saves.
QUIET_STEPS = 16
# The number of saves that are timed.
SAVES = 6
# The number of steps trained during each later save, relative to those that fit into the first.
SAVE_MARGIN = 1.5
# The fingerprint of each tensor by name.
Digests = dict[str, str]


def main(words: list[str]) -> int:
    """Run a task and write its result."""
    folder = Path(words[0])
    task = words[1]
    settings = read_json(folder / "settings.json")
    changes = {"run_dir": folder / "run"}
    # The drill starts from the same weights as the run that is being checked. `load` leaves out
    # --init-from and its settings, so read them here.
    for name in ("init_from", "init_strict", "init_new"):
        changes[name] = settings[name]
    config = override(load(folder / "settings.json", StageConfig), changes)
    world = join(config.parallel, config.device)
    if task in ("reload", "damage"):
        # Both tasks restore the run. Before "damage", the stage damages the newest checkpoint.
        # "damage" also times saves.
        timed = task == "damage"
        result = reload(config, world, timed=timed)
        # `reload` has returned, so there are no references to the model, as `leave` requires.
        leave(world)
    else:
        kill_file = folder / "kill.json" if task == "kill" else None
        recorder = Recorder(kill_file)
        try:
            run(config, [recorder], world)
            result = recorder.result
        except UserError as error:
            result = {"refused": str(error)}
            if world.size > 1:
                # Perhaps only this rank has the error. Raise it, so that torchrun ends the others.
                if world.rank == 0:
                    write_json(folder / f"{task}.json", result)
                raise
    if world.rank == 0:
        write_json(folder / f"{task}.json", result)
    return 0


class Recorder:
    """Callback that records times of a start or restart, and digests of restored and saved tensors.

    If there is a `kill_file`, the callback writes its records to this file during the last save,
    and then kills the run.
    """

    def __init__(self, kill_file: Path | None) -> None:
        self.kill_file = kill_file
        self.restart: dict[str, float] = {}
        self.digests: dict[int, Digests] = {}
        self.result = {"restart": self.restart, "digests": self.digests}

    def before_step(self, state: State) -> None:
        """Before the first step, record the restored tensors and prepare the kill."""
        if self.restart:
            return
        self.restart["step"] = state.step
        self.restart["imported"] = IMPORTED
        self.restart["restored"] = time.time()
        self.group = Group(state.world)
        self.digests[state.step] = digests_of(state, self.group)
        self.hashed = time.time()
        if self.kill_file and state.checkpointer:
            publisher: Any = state.checkpointer.publisher
            self.commit = publisher.commit
            publisher.commit = self.kill_or_commit

    def after_step(self, state: State, record: dict[str, Any] | None) -> None:
        """Record the time of the first step, and digests of the tensors at each save."""
        if "first_step" not in self.restart:
            # Exclude the hashing in `before_step`, which a real restart does not do.
            step_seconds = time.time() - self.hashed
            self.restart["first_step"] = self.restart["restored"] + step_seconds
        if state.step % EVERY == 0:
            self.digests[state.step] = digests_of(state, self.group)

    def kill_or_commit(self, reserved: str, manifest: dict[str, Any]) -> None:
        """Publish a checkpoint whose files have been written, but kill the run at the last step."""
        if self.kill_file and manifest["step"] == STEPS:
            write_json(self.kill_file, {**self.result, "killed_at": time.time()})
            kill_run()
        self.commit(reserved, manifest)


def kill_run() -> None:
    """Kill this process. If torchrun started it, kill torchrun first: all other ranks then end.

    If torchrun survived, it would end the other ranks with SIGTERM, and they could still save.
    """
    if "RANK" in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def reload(config: Config, world: World, timed: bool) -> dict[str, Any]:
    """Restore the run into a model with other values; return step, digests and log messages.

    If `timed`, also return the times of saves. If the project refuses the settings, return only the
    reason.
    """
    # The capacity is large, since the handler drops all records when it is full.
    log = BufferingHandler(1_000_000)
    logging.getLogger(PACKAGE).addHandler(log)
    try:
        state = setup(config, world)
        group = Group(world)
        # Overwrite all values, so that the digests differ if a tensor is not restored.
        with torch.no_grad():
            for tensor in state.model.state_dict().values():
                tensor.fill_(7)
        # The state keeps the checkpointer, which lists tensors even after it is closed.
        resume(state, config.directory, group).close()
    except UserError as error:
        # For example, the batch is too small for this many ranks.
        return {"refused": str(error)}
    result = {
        "step": state.step,
        "digests": digests_of(state, group),
        "messages": [record.getMessage() for record in log.buffer],
    }
    if timed:
        # Save elsewhere, since the next task reads the checkpoints of the run.
        timed_dir = config.directory.with_name("timed")
        result["costs"] = time_saves(state, timed_dir, group)
    state.loader.close()
    return result


@dataclass(frozen=True)
class SaveTimes:
    """Seconds of each save, and of a restore, on one rank."""

    blocked: np.ndarray
    """The time that each save blocked training, as counted by the checkpointer."""
    published: np.ndarray
    """The time from the start of each save until it was published."""
    cost: np.ndarray
    """The training time that each save cost, including slower steps while it was written."""
    restored: float


def time_saves(state: State, run_dir: Path, group: Group) -> dict[str, Any]:
    """Return the seconds of saves and of a restore on the slowest rank, and of a quiet step.

    Training continues while a checkpoint is written, as in a run. A quiet step is one without a
    save. Only the result on rank 0, which is written to the file, includes the other ranks.
    """
    checkpointer = resume(state, run_dir, group)
    # The first step warms up, so it does not count.
    quiet = record_steps(state, QUIET_STEPS).seconds[1:]
    times = save_and_restore(state, checkpointer, group)
    ranks: list[SaveTimes] = group.gather(times)
    # Rows are ranks and columns are saves. The maximum of a column is that save's slowest rank.
    return {
        "blocked_seconds": spread(np.max([rank.blocked for rank in ranks], axis=0)),
        "save_seconds": spread(np.max([rank.published for rank in ranks], axis=0)),
        "cost_seconds": spread(np.max([rank.cost for rank in ranks], axis=0)),
        "restore_seconds": max(rank.restored for rank in ranks),
        "step_seconds": spread(quiet),
    }


def save_and_restore(state: State, checkpointer: Checkpointer, group: Group) -> SaveTimes:
    """Save several times while training continues, and restore once; return the times of this rank.

    One step is trained during the first save. During each later save, SAVE_MARGIN times the steps
    that fit into the first one are trained. The cost of a save is relative to quiet steps just
    before it.
    """
    publish_times = note_publish_times(checkpointer)
    blocked = np.zeros(SAVES)
    published = np.zeros(SAVES)
    cost = np.zeros(SAVES)
    steps = 1
    for save in range(SAVES):
        quiet_steps = min(steps, QUIET_STEPS)
        seconds_per_step = train_for(state, quiet_steps) / quiet_steps
        began = time.perf_counter()
        blocked_before = checkpointer.blocked_seconds
        checkpointer.save(state.step)
        train_for(state, steps)
        # Read this before `settle`, which adds its wait. A run would train instead of waiting here.
        blocked[save] = checkpointer.blocked_seconds - blocked_before
        checkpointer.settle()
        seconds = time.perf_counter() - began
        published[save] = publish_times[-1] - began
        # The cost is the time beyond that of the same number of quiet steps. It includes the
        # blocked time, so any smaller value is noise.
        cost[save] = max(seconds - steps * seconds_per_step, blocked[save])
        if save == 0:
            in_background = published[0] - blocked[0]
            # Later saves take longer than the first, since more steps are trained during them.
            # SAVE_MARGIN is for this extra time.
            steps_of_rank = 1 + math.ceil(SAVE_MARGIN * in_background / seconds_per_step)
            # All ranks must take the same number of steps. Only rank 0 gets the numbers of all
            # ranks from `gather`, so it broadcasts them.
            steps = max(group.broadcast(group.gather(steps_of_rank)))
    began = time.perf_counter()
    checkpointer.restore()
    restored = time.perf_counter() - began
    checkpointer.close()
    # Leave out the first save, which allocates buffers.
    return SaveTimes(
        blocked=blocked[1:],
        published=published[1:],
        cost=cost[1:],
        restored=restored,
    )


def note_publish_times(checkpointer: Checkpointer) -> list[float]:
    """Return a list of times, still empty; each `publish` from now on appends when it is done."""
    times: list[float] = []
    publisher: Any = checkpointer.publisher
    publish = publisher.publish

    def publish_and_note(*arguments: Any) -> Any:
        path = publish(*arguments)
        times.append(time.perf_counter())
        return path

    publisher.publish = publish_and_note
    return times


def train_for(state: State, steps: int) -> float:
    """Take training steps, and wait for the device after the last one; return the seconds."""
    began = time.perf_counter()
    for _ in range(steps):
        train_step(state, state.loader.next())
    synchronize(state.world.device)
    return time.perf_counter() - began


def digests_of(state: State, group: Group) -> Digests:
    """Return the fingerprint of each full (unsharded) tensor of model and optimizer; collective.

    If ranks have different values of a tensor, rank 0 returns a text with all their fingerprints.
    This text differs from any single fingerprint, so the stage notices it.
    """
    assert state.checkpointer
    digests: Digests = {}
    for name, tensor in state.checkpointer.tensors().items():
        full = parallel.full_tensor(tensor).detach().cpu().contiguous()
        digests[name] = fingerprint(full.flatten().view(torch.uint8).numpy())
    ranks: list[Digests] = group.gather(digests)
    joined: Digests = {}
    for name in digests:
        distinct = {rank[name] for rank in ranks}
        joined[name] = " ".join(sorted(distinct))
    return joined


if __name__ == "__main__":
    log_to_console()
    sys.exit(run_main(lambda: main(sys.argv[1:])))
