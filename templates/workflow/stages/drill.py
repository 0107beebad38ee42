"""The tasks of the restore drill: train a short run, kill it, load, damage and time checkpoints.

`python -m` this module FOLDER TASK runs a task as a plain process or, under torchrun, on several
ranks. It reads FOLDER/settings.json, works on the run FOLDER/run and writes FOLDER/TASK.json.
"""

import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import signal
import sys
import time
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.checkpointer import Checkpointer
from ..checkpoint.tensors import flat
from ..config import Config, load, override
from ..device import synchronize
from ..distributed import Group, World, join, leave, parallel
from ..errors import RankError, UserError, exit_code
from ..files import write_json
from ..run.journal import read_records
from ..run.logs import log_to_console
from ..train import State, run, setup, start, train_step
from .stage import PACKAGE, StageConfig
from .timing import record_steps, spread

IMPORTED = time.time()
STEPS, EVERY = 12, 3  # of a drill's run, and between its saves
QUIET_STEPS, SAVES = 16, 6  # to time: steps without a save, and saves
LOG = BufferingHandler(1_000_000)  # what this package logs
Digests = dict[str, str]  # sha256 by the name of a tensor


def main(words: list[str]) -> int:
    """Run one task."""
    logging.getLogger(PACKAGE).addHandler(LOG)
    folder, task = Path(words[0]), words[1]
    config = load(folder / "settings.json", StageConfig)
    world = join(config.parallel, config.device)
    if task in ("kill", "train"):
        recorder = Recorder(folder / "kill.json" if task == "kill" else None)
        run(override(config, {"run_dir": folder / "run"}), [recorder], world)
        result = recorder.result
    else:
        result = {"reload": reload, "damage": damage}[task](config, world, folder)
        leave(world)  # only now that nothing refers to the model
    if os.environ.get("RANK", "0") == "0":
        write_json(folder / f"{task}.json", result)
    return 0


class Recorder:
    """A callback: the moments of a (re)start, and digests of what is restored and saved.

    With `kill_file` it kills the run during its last save, and first writes what it has recorded.
    """

    def __init__(self, kill_file: Path | None) -> None:
        self.kill_file, self.hashed = kill_file, 0.0
        self.restart: dict[str, float] = {}
        self.digests: dict[int, Digests] = {}
        self.result = {"restart": self.restart, "digests": self.digests}

    def before_step(self, state: State) -> None:
        """Note that the checkpoint is loaded."""
        if self.restart:
            return
        self.restart |= {"step": state.step, "imported": IMPORTED, "restored": time.time()}
        self.group = Group(state.world)
        if state.step:
            self.digests[state.step] = digests_of(state, self.group)
        self.hashed = time.time()
        if self.kill_file:
            self.kill_in_last_save(state, self.kill_file)

    def after_step(self, state: State, record: dict[str, Any] | None) -> None:
        """Note the first step, and what is saved."""
        first_step = time.time() - self.hashed  # hashing is no part of a restart
        self.restart.setdefault("first_step", self.restart["restored"] + first_step)
        if state.step % EVERY == 0:
            self.digests[state.step] = digests_of(state, self.group)

    def kill_in_last_save(self, state: State, kill_file: Path) -> None:
        """Let rank 0 kill the run when all ranks have written their files, before it publishes."""
        publisher: Any = state.checkpointer and state.checkpointer.publisher
        commit = publisher.commit

        def kill_or_commit(reserved: str, manifest: dict[str, Any]) -> None:
            if manifest["step"] == STEPS:
                write_json(kill_file, {**self.result, "killed_at": time.time()})
                kill_run()
            commit(reserved, manifest)

        publisher.commit = kill_or_commit


def kill_run() -> None:
    """Kill this run: torchrun, with which the kernel kills all its ranks, or this process alone."""
    if "RANK" in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def reload(config: Config, world: World, folder: Path) -> dict[str, Any]:
    """Load the newest checkpoint of the run: its step and digests, or why that was refused."""
    try:
        state = setup(config, world)
        digests = load_into(state, folder / "run", Group(world))
    except UserError as error:  # too large for so few ranks
        return {"refused": str(error)}
    state.loader.close()
    return {"step": state.step, "digests": digests}


def damage(config: Config, world: World, folder: Path) -> dict[str, Any]:
    """Flip a bit of each file of the run's newest checkpoint in turn; then time saves."""
    state, group = setup(config, world), Group(world)
    saved = json.loads((folder / "kill.json").read_text("utf-8"))["digests"]
    checkpoints = folder / "run/checkpoints"
    previous, newest = group.from_first(lambda: sorted(checkpoints.glob("step_????????"))[-2:])
    expected = saved[str(int(previous.name[5:]))]
    sizes = group.from_first(lambda: {file: file.stat().st_size for file in newest.iterdir()})
    flips = [problem_with_flip(state, file, group, expected) for file in sorted(sizes)]
    costs = {"bytes": sum(sizes.values()), **time_saves(state, folder / "timed", group)}
    state.loader.close()
    return {"flips": flips, "costs": costs}


def problem_with_flip(state: State, file: Path, group: Group, expected: Digests) -> str:
    """Flip a bit in a file of a run's newest checkpoint, restore the run and undo the damage.

    Empty if a warning named the file, the checkpoint was set aside and the previous one restored.
    """
    newest, problem = file.parent, ""
    group.from_first(lambda: flip_bit(file))
    LOG.buffer.clear()
    try:
        if load_into(state, newest.parents[1], group) != expected:
            problem = f"not noticed, or not repaired: restored other values, of step {state.step}"
    except RankError as error:
        problem = str(error)
    messages = [record.getMessage() for record in LOG.buffer]
    named = any("DAMAGED" in text and file.name in text for text in messages)
    set_aside = group.from_first(lambda: undo_flip(file))
    if not problem and not (named and set_aside):
        problem = "noticed, but not named by a warning, or the checkpoint not set aside"
    return problem and f"{file.name}: {problem}"


def undo_flip(file: Path) -> bool:
    """Repair a checkpoint and put it back into its place; whether it had been set aside."""
    set_aside = [*file.parents[1].glob(f"{file.parent.name}.damaged-*")]
    for path in set_aside:
        os.rename(path, file.parent)
    flip_bit(file)
    return bool(set_aside)


def flip_bit(path: Path) -> None:
    """Flip the lowest bit of the byte in the middle."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[len(content) // 2] ^= 1


def time_saves(state: State, run_dir: Path, group: Group) -> dict[str, Any]:
    """Seconds of a step without a save, of saves one at a time, and of a restore."""
    checkpointer = start(state, run_dir, group)
    quiet = record_steps(state, QUIET_STEPS).seconds[1:]
    saves = [time_save(state, checkpointer, group) for _ in range(SAVES)]
    began = time.perf_counter()
    checkpointer.restore()
    restored = max(group.agree(lambda: time.perf_counter() - began))
    checkpointer.close()
    group.from_first(lambda: shutil.rmtree(run_dir))
    blocked, until_published = zip(*saves, strict=True)
    return {
        "blocked_seconds": spread(blocked[1:]),
        "save_seconds": spread(until_published[1:]),
        "restore_seconds": restored,
        "step_seconds": spread(quiet),
    }


def time_save(state: State, checkpointer: Checkpointer, group: Group) -> tuple[float, float]:
    """Save, and train until the save is published: (blocked seconds, seconds until published).

    Blocked is what the checkpointer of the slowest rank counts. The second figure can be a step too
    long, since the checkpoint is looked for before each step.
    """
    step, before = state.step, checkpointer.blocked_seconds
    synchronize(state.world.device)  # otherwise the save would wait for the steps before it
    began = time.perf_counter()
    checkpointer.save(step)
    while not group.from_first(lambda: checkpointer.last_good == step or checkpointer.failed):
        train_step(state, state.loader.next())
    until_published = time.perf_counter() - began
    train_step(state, state.loader.next())  # the next save is of another step
    blocked = max(group.agree(lambda: checkpointer.blocked_seconds - before))
    checkpointer.settle()
    return blocked, until_published


def load_into(state: State, run_dir: Path, group: Group) -> Digests:
    """Restore the newest good checkpoint of a run over other values; the digests of the state."""
    with torch.no_grad():
        for tensor in state.model.state_dict().values():
            tensor.fill_(7)
    state.optimizer.state.clear()
    start(state, run_dir, group).close()
    return digests_of(state, group)


def digests_of(state: State, group: Group) -> Digests:
    """sha256 of each full (unsharded) tensor of model and optimizer.

    Where ranks hold different values, rank 0 returns all of theirs, to which nothing can be equal.
    """
    assert state.checkpointer
    parallel.agree_on_buffers(state.model, state.world)
    digests = {}
    for name, tensor in flat(state.checkpointer.tensors()):
        full = parallel.full_tensor(tensor).detach().cpu().contiguous()
        content = full.flatten().view(torch.uint8).numpy()
        digests[name] = hashlib.sha256(content.data).hexdigest()
    ranks = group.agree(lambda: digests)
    return {name: " ".join(sorted({other[name] for other in ranks})) for name in digests}


def losses_of(run_dir: Path) -> dict[int, float]:
    """Loss by step; NaN where it was not finite."""
    losses = {record["step"]: record["loss"] for record in read_records(run_dir)}
    return {step: math.nan if loss is None else loss for step, loss in losses.items()}


if __name__ == "__main__":
    log_to_console()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
