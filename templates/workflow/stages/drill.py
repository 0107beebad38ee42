"""What the restore drill does to short runs: resume, reshard, damage, time and kill them.

`python -m` this module FOLDER TASK [names] runs a task on one plain process or, under torchrun, on
several ranks. Its settings are in FOLDER/settings.json, its result goes to FOLDER/TASK.json.
"""

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checkpoint import MANIFEST, PUBLISHED, step_name
from ..checkpoint.paths import published
from ..checkpoint.publish import RESERVED
from ..checkpoint.tensors import flat
from ..config import Config, load, override
from ..distributed import Group, World, join, leave, parallel
from ..errors import RankError, UserError, exit_code
from ..files import write_json
from ..run.hardware import check_memory, expected_memory
from ..run.logs import log_to_console
from ..train import State, run, setup, start, train_step
from . import processes
from .stage import PACKAGE, StageConfig
from .timing import record_steps, spread, synchronize

IMPORTED = time.time()
STEPS, EVERY = 12, 3  # of a run of the drill, and between its saves
QUIET_STEPS, SAVES = 16, 6  # to time: steps without a save, and saves
PATIENCE = 1800.0  # seconds for a process of the drill
LOG = BufferingHandler(1_000_000)  # what this package has logged
Digests = dict[str, str]  # sha256 by the name of a tensor


def main(words: list[str]) -> int:
    """Run one task."""
    logging.getLogger(PACKAGE).addHandler(LOG)
    folder, task, *runs = Path(words[0]), words[1], *(Path(words[0], name) for name in words[2:])
    config = load(folder / "settings.json", StageConfig)
    world = join(config.parallel, config.device)
    if task == "train":
        recorder = Recorder()
        run(override(config, {"run_dir": runs[0]}), [recorder], world)
        result: dict[str, Any] = vars(recorder)
    else:
        result = {"reload": reload, "examine": examine}[task](config, world, *runs)
        leave(world)  # only now that nothing refers to the model
    if os.environ.get("RANK", "0") == "0":
        write_json(folder / f"{task}.json", result)
    return 0


class Recorder:
    """A callback: when a run got how far in (re)starting, and the digests of its last two saves."""

    def __init__(self) -> None:
        self.joined = time.time()
        self.restart: dict[str, float] = {}
        self.digests: dict[int, Digests] = {}

    def after_step(self, state: State, record: dict[str, Any] | None) -> None:
        """Note the first step, and what is saved."""
        if not self.restart:
            logged = {record.getMessage()[:8]: record.created for record in LOG.buffer}
            self.restart = {
                "step": state.step - 1,
                "started": time.time() - age(),
                "imported": IMPORTED,
                "joined": self.joined,
                "set_up": logged["expected"],  # memory, which is told right before the restore
                "restored": logged.get("resuming", logged["expected"]),
                "first_step": time.time(),
            }
        if state.step >= STEPS - EVERY and state.step % EVERY == 0:
            self.digests[state.step] = digests_of(state, Group(state.world))


def age() -> float:
    """Seconds since this process was started, or since its imports where no system tells."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return time.time() - IMPORTED
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def reload(config: Config, world: World, source: Path, target: Path) -> dict[str, Any]:
    """Load the newest checkpoint of a run, and save it as the only one of another."""
    try:
        state = setup(config, world)
        check_memory(expected_memory(state.model, state.optimizer, 0), world.device)
    except UserError as error:  # too large for so few processes
        return {"refused": str(error)}
    group = Group(world)
    digests, step = load_into(state, source, group), state.step
    checkpointer = start(state, target, group)  # finds nothing there
    checkpointer.save(step)
    checkpointer.close()
    state.loader.close()
    return {"digests": digests}


def examine(config: Config, world: World, run_dir: Path) -> dict[str, Any]:
    """Restore a run into processes that never trained, flip bits of it, then time other saves."""
    state, group = setup(config, world), Group(world)
    newest = group.from_first(lambda: published(run_dir / "checkpoints")[-1])
    group.from_first(lambda: os.rename(newest, run_dir / "held-back"))
    restored, step = load_into(state, run_dir, group), state.step
    losses = record_steps(state, EVERY).losses.tolist()
    after = digests_of(state, group)
    group.from_first(lambda: os.rename(run_dir / "held-back", newest))
    files = group.from_first(lambda: sorted(newest.iterdir()))
    size = group.from_first(lambda: sum(file.stat().st_size for file in files))
    flips = [problem_with_flip(state, file, group, (step, restored)) for file in files]
    group.from_first(lambda: shutil.rmtree(run_dir / "checkpoints"))
    costs = time_saves(state, run_dir.with_name("timed"), group)
    state.loader.close()
    return {
        "roundtrip": {"restored": restored, "step": step, "losses": losses, "after": after},
        "flips": flips,
        "costs": {"bytes": size, **costs},
    }


def problem_with_flip(state: State, file: Path, group: Group, expected: tuple[int, Digests]) -> str:
    """Flip a bit of a run's newest checkpoint, restore the run, and undo the damage.

    Returns what went wrong; empty if the damage was named, the checkpoint set aside, and the one
    before it restored, whose step and digests are `expected`.
    """
    newest, problem, restored = file.parent, "", {}
    group.from_first(lambda: flip_bit(file))
    LOG.buffer.clear()
    try:
        restored = load_into(state, newest.parents[1], group)
    except RankError as error:
        problem = str(error)

    def undo() -> bool:
        set_aside = sorted(newest.parent.glob(f"{newest.name}.damaged-*"))
        for path in set_aside:
            os.rename(path, newest)
        flip_bit(file)
        return bool(set_aside)

    set_aside = group.from_first(undo)
    warnings = [record.getMessage() for record in LOG.buffer]
    if (state.step, restored) != expected:
        values = f"restored other values, of step {state.step}"
        problem = problem or f"not noticed, or not repaired: {values}"
    elif not set_aside:
        problem = "noticed, but the checkpoint was not set aside"
    elif not any("DAMAGED" in text and file.name in text for text in warnings):
        problem = "noticed, but no warning names the file"
    return problem and f"{file.name}: {problem}"


def flip_bit(path: Path) -> None:
    """Flip the lowest bit of the byte in the middle."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[len(content) // 2] ^= 1


def time_saves(state: State, run_dir: Path, group: Group) -> dict[str, Any]:
    """What a step costs without a save, what saves cost, each begun when the last is over.

    And what the slowest rank takes to verify and load one.
    """
    checkpointer = start(state, run_dir, group)
    quiet = record_steps(state, QUIET_STEPS).seconds[1:]
    saves = [time_save(state, run_dir, group) for _ in range(SAVES)]
    began = time.perf_counter()
    checkpointer.restore()
    restored = max(group.agree(lambda: time.perf_counter() - began))
    checkpointer.close()
    group.from_first(lambda: shutil.rmtree(run_dir))
    blocked, seconds = zip(*saves, strict=True)
    return {
        "blocked_first": blocked[0],
        "blocked_seconds": spread(blocked[1:]),
        "save_seconds": spread(seconds[1:]),
        "restore_seconds": restored,
        "step_seconds": spread(quiet),
    }


def time_save(state: State, run_dir: Path, group: Group) -> tuple[float, float]:
    """Save, and train until the save is published: (blocked seconds, seconds until published).

    Blocked is what the checkpointer of the slowest rank counts. The checkpoint is looked for
    before each step, so behind a save in the background the second figure can be a step too long.
    """
    checkpointer, path = state.checkpointer, run_dir / "checkpoints" / step_name(state.step)
    assert checkpointer
    synchronize(state.world.device)  # otherwise the save would wait for the steps before it
    before, began = checkpointer.blocked_seconds, time.perf_counter()
    checkpointer.save(state.step)
    while not group.from_first(lambda: path.exists() or checkpointer.failed):
        train_step(state, state.loader.next())
    seconds = time.perf_counter() - began
    train_step(state, state.loader.next())  # the next save is of another step
    blocked = max(group.agree(lambda: checkpointer.blocked_seconds - before))
    checkpointer.settle()
    return blocked, seconds


def load_into(state: State, run_dir: Path, group: Group) -> Digests:
    """Restore the newest good checkpoint of a run over other values; the digests of the state."""
    with torch.no_grad():
        for tensor in state.model.state_dict().values():
            tensor.fill_(7)
    state.optimizer.state.clear()
    start(state, run_dir, group).close()
    return digests_of(state, group)


def digests_of(state: State, group: Group) -> Digests:
    """sha256 of each whole tensor of model and optimizer.

    Where ranks hold different values, rank 0 returns all of theirs, to which nothing can be equal.
    """
    assert state.checkpointer
    parallel.agree_on_buffers(state.model, state.world)
    digests = {}
    for name, tensor in flat(state.checkpointer.tensors()):
        content = parallel.whole(tensor).detach().cpu().contiguous().flatten().view(torch.uint8)
        digests[name] = hashlib.sha256(content.numpy().data).hexdigest()
    ranks = group.agree(lambda: digests)
    return {name: " ".join(sorted({other[name] for other in ranks})) for name in digests}


class Kill(NamedTuple):
    """A kill in mid-save: the steps saved, published and trained by then, and two times."""

    saving: int
    newest: int
    done: int
    at: float
    noticed: float
    """By torchrun, or by whoever waits for a plain process."""


def kill_in_save(process: processes.Process, run_dir: Path) -> Kill | None:
    """Kill the ranks of a run once a save has written a file.

    The run is stopped first to look again: on a fast disk a save is over as soon as it is seen.
    None if the run ended, or died outside of a save.
    """
    checkpoints, deadline = run_dir / "checkpoints", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=0.001)  # reads the output, so that no pipe gets full
            processes.finish(process, "training to be killed", PATIENCE)
            return None
        if saving := save_under_way(checkpoints):
            processes.kill(process, signal.SIGSTOP)
            if saving.exists() and saving == save_under_way(checkpoints):
                at = time.time()
                kill_ranks(process)
                noticed, paths = time.time(), [saving, *whole(checkpoints)]
                step, *others = (int(re.findall(r"step_(\d+)", path.name)[0]) for path in paths)
                kill = Kill(step, max(others), max(losses_of(run_dir)), at, noticed)
                return kill if saving.exists() else None
            processes.kill(process, signal.SIGCONT)
    raise RankError(f"a run of a few steps took more than {PATIENCE:.0f} s")


def kill_ranks(process: processes.Process) -> None:
    """Kill the ranks of a stopped run; wait until torchrun, which goes on, has noticed."""
    below, session = processes.descendants(process.pid), os.getsid(process.pid)
    ranks = [pid for pid in below if os.getsid(pid) == pid]  # torchrun gives each its session
    if not ranks:  # a plain process
        processes.kill(process)
        process.communicate()  # until the last of its processes is gone
        return
    for pid in (pid for pid in below if os.getsid(pid) != session):  # loader workers, too
        os.kill(pid, signal.SIGKILL)
    processes.kill(process, signal.SIGCONT)
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(ProcessLookupError):  # the last is gone: torchrun knows how it ended
        while process.poll() is None and time.monotonic() < deadline:
            os.kill(ranks[0], 0)
            time.sleep(0.001)


def save_under_way(checkpoints: Path) -> Path | None:
    """The folder of a save that has written a file, once an earlier checkpoint is published."""
    if not (done := whole(checkpoints)):
        return None
    folders = {file.parent for file in checkpoints.glob("*/*")} - done
    begun = (it for it in folders if it.name.startswith(RESERVED) or PUBLISHED.fullmatch(it.name))
    return next(begun, None)


def whole(checkpoints: Path) -> set[Path]:
    """Published checkpoints that have a manifest."""
    return {path for path in published(checkpoints) if (path / MANIFEST).exists()}


def losses_of(run_dir: Path) -> dict[int, float]:
    """Loss by step, from the complete lines of metrics.jsonl; NaN where it was not finite."""
    *lines, _ = (run_dir / "metrics.jsonl").read_text("utf-8").split("\n")
    records = map(json.loads, lines)
    return {it["step"]: math.nan if it["loss"] is None else it["loss"] for it in records}


if __name__ == "__main__":
    log_to_console()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
