"""What the restore drill runs in processes of its own, plain or under torchrun.

`python -m` this module FOLDER TASK [words]: the settings are FOLDER/settings.json, and what came
of the task is in FOLDER/TASK.json.
"""

import hashlib
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..checkpoint.checkpointer import model_tensors
from ..checkpoint.manifest import MANIFEST, published, read_manifest
from ..checkpoint.reader import DCP_INDEX, flat
from ..config import Config, load, override
from ..distributed import Group, parallel
from ..errors import RankError, UserError, exit_code
from ..files import write_json
from ..run.directory import RunDirectory
from ..run.hardware import check_memory, expected_memory
from ..run.logs import log_to_console
from ..train import State, run, setup, start, train_step
from .gates import PACKAGE
from .measuring import record_steps, spread, synchronize

STARTED = time.time()  # the imports are over
STEPS, EVERY = 12, 3  # of a run of the drill, and between its saves
QUIET, SAVES, SECONDS = 8, 11, 15.0  # steps without a save; saves that are timed, and for how long
Digests = dict[str, str]


class Notes(logging.Handler):
    """Hears what this package logs meanwhile, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[float, str]] = []

    def __enter__(self) -> "Notes":
        """Listen."""
        logging.getLogger(PACKAGE).addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        """Listen no longer."""
        logging.getLogger(PACKAGE).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Hear."""
        self.heard.append((record.created, record.getMessage()))


def train(config: Config, folder: Path, name: str) -> None:
    """Train in FOLDER/name by the project's own loop, from wherever it stands there.

    What a restart took is in FOLDER/name.restart.json as soon as its first step is done.
    """
    digests: dict[int, Digests] = {}
    restart: dict[str, Any] = {}

    def look(state: State, record: dict[str, Any] | None) -> None:
        if not restart and state.world.rank == 0:
            restored = [at for at, text in notes.heard if text.startswith("resuming from")]
            restart.update(step=state.step - 1, main=STARTED, first_step=time.time())
            restart["restored"] = restored[-1] if restored else None
            write_json(folder / f"{name}.restart.json", restart)
        if state.step >= STEPS - EVERY and state.step % EVERY == 0:
            digests[state.step] = digests_of(state, Group(state.world))

    with Notes() as notes:
        run(override(config, {"run_dir": folder / name}), [SimpleNamespace(after_step=look)])
    if os.environ.get("RANK", "0") == "0":
        write_json(folder / "train.json", {"digests": digests})


def reload(config: Config, folder: Path, source: str, target: str = "") -> None:
    """Load the newest checkpoint of FOLDER/source, and save it again in FOLDER/target, if any."""
    world = parallel.setup(config.parallel, config.device)
    found: dict[str, Any] = {}
    try:
        state = setup(config, world)
        check_memory(expected_memory(state.model, state.optimizer, 0), world.device)
    except UserError as error:
        found["refused"] = str(error)
    else:
        group = Group(world)
        found["digests"] = load_into(state, folder / source, group)
        if target:
            save_again(state, folder / target, group)
        state.loader.close()
        del state
    if world.rank == 0:
        write_json(folder / "reload.json", found)
    parallel.teardown(world)


def fresh(config: Config, folder: Path, source: str = "") -> None:
    """What one group of processes can do that has never trained: restore, notice, reload, time.

    If there is a `source`, its checkpoint is loaded and saved again in FOLDER/again.
    """
    world = parallel.setup(config.parallel, config.device)
    state, group = setup(config, world), Group(world)
    original = folder / "undisturbed"
    found: dict[str, Any] = {"roundtrip": roundtrip(state, original, group)}
    found["flips"] = flips(state, original, group)
    if source:
        found["reloaded"] = load_into(state, folder / source, group)
        save_again(state, folder / "again", group)
    group.from_first(lambda: shutil.rmtree(original / "checkpoints"))
    found["costs"] = costs(state, folder / "timed", group)
    group.from_first(lambda: shutil.rmtree(folder / "timed"))
    if world.rank == 0:
        write_json(folder / "fresh.json", found)
    state.loader.close()
    del state
    parallel.teardown(world)


def roundtrip(state: State, run_dir: Path, group: Group) -> dict[str, Any]:
    """Restore the last checkpoint but one, and take the steps that the run took behind it."""
    newest = group.from_first(lambda: published(run_dir / "checkpoints")[-1])
    held_back = run_dir / "held-back"
    group.from_first(lambda: os.rename(newest, held_back))
    found: dict[str, Any] = {"restored": load_into(state, run_dir, group), "step": state.step}
    found["losses"] = record_steps(state, EVERY).losses.tolist()
    found["after"] = digests_of(state, group)
    group.from_first(lambda: os.rename(held_back, newest))
    return found


def flips(state: State, run_dir: Path, group: Group) -> list[dict[str, Any]]:
    """Flip one bit of the newest checkpoint, restore, and put all back; for some places."""
    newest = group.from_first(lambda: published(run_dir / "checkpoints")[-1])
    found = []
    for name, place in group.from_first(lambda: places_in(newest)):
        group.from_first(lambda name=name, place=place: flip(newest / name, place))
        outcome: dict[str, Any] = {"file": name, "place": place, "step": None, "problem": ""}
        with Notes() as notes:
            try:
                outcome["digests"] = load_into(state, run_dir, group)
                outcome["step"] = state.step
            except RankError as error:
                outcome["problem"] = str(error)
        outcome["named"] = any("DAMAGED" in text and name in text for _, text in notes.heard)
        outcome["set_aside"] = group.from_first(lambda: put_back(newest))
        group.from_first(lambda name=name, place=place: flip(newest / name, place))
        found.append(outcome)
    return found


def places_in(checkpoint: Path) -> list[tuple[str, int]]:
    """Where to flip a bit: (file, byte). The manifest, any index, the largest file in 3 places."""
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    small = [name for name in (MANIFEST, DCP_INDEX) if name in sizes]
    largest = max(sizes.keys() - small, key=lambda name: (sizes[name], name))
    last = sizes[largest] - 1
    return [(name, sizes[name] // 2) for name in small] + [
        (largest, place) for place in (0, last // 2, last)
    ]


def flip(path: Path, place: int) -> None:
    """Flip the lowest bit of one byte."""
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def put_back(checkpoint: Path) -> bool:
    """Undo that it was set aside, if it was."""
    aside = sorted(checkpoint.parent.glob(f"{checkpoint.name}.damaged-*"))
    for path in aside:
        os.rename(path, checkpoint)
    return bool(aside)


def costs(state: State, run_dir: Path, group: Group) -> dict[str, Any]:
    """Saves with the next one started when the last one is published: what each of them cost.

    Seconds of the slowest rank: `blocked` as the checkpointer counts them (the call, waiting for
    staging, settling), `published` from the call until the checkpoint is there.
    """
    checkpointer = start(state, RunDirectory(run_dir, group), group)
    publish, published_at = checkpointer.snapshots.publish, []

    def publish_and_note(*arguments: Any) -> Path:
        path = publish(*arguments)
        published_at.append(time.perf_counter())
        return path

    checkpointer.snapshots.publish = publish_and_note
    quiet = record_steps(state, QUIET).seconds[1:]
    began = time.perf_counter()
    saves = [timed_save(state, published_at, group)]
    while len(saves) < SAVES and group.from_first(
        lambda: len(saves) < 4 or time.perf_counter() < began + SECONDS
    ):
        saves.append(timed_save(state, published_at, group))
    checkpointer.close()
    blocked, seconds = zip(*saves, strict=True)
    return {
        "blocked_first": blocked[0],
        "blocked_seconds": spread(blocked[1:]),
        "save_seconds": spread(seconds[1:]),
        "step_seconds": spread(quiet),
        "saves": len(saves),
    }


def timed_save(state: State, published_at: list[float], group: Group) -> tuple[float, float]:
    """Save, and train until that is published: (blocked seconds, seconds until published)."""
    checkpointer, count = state.checkpointer, len(published_at)
    synchronize(state.world.device)  # else the save would wait for the steps before it
    before, called = checkpointer.blocked_seconds, time.perf_counter()
    checkpointer.save(state.step)
    over = False
    while not over:
        train_step(state, state.loader.next())
        over = group.from_first(lambda: len(published_at) > count or checkpointer.failed)
    checkpointer.settle()
    blocked = group.agree(lambda: checkpointer.blocked_seconds - before)
    return max(blocked), published_at[-1] - called


def load_into(state: State, run_dir: Path, group: Group) -> Digests:
    """Restore the newest good checkpoint of a run over a state that holds sevens; its digests."""
    with torch.no_grad():
        for tensor in model_tensors(state.model).values():
            tensor.fill_(7)
    state.optimizer.state.clear()
    start(state, RunDirectory(run_dir, group), group).close()
    return digests_of(state, group)


def save_again(state: State, run_dir: Path, group: Group) -> None:
    """Save the state as the only checkpoint of another run."""
    step = state.step
    checkpointer = start(state, RunDirectory(run_dir, group), group)  # finds nothing there
    checkpointer.save(step)
    checkpointer.close()


def digests_of(state: State, group: Group) -> Digests:
    """sha256 of each tensor of model and optimizer, whole, whoever holds the parts.

    Where ranks hold different ones, all of them: no restored state can be equal to that.
    """
    parallel.agree_on_buffers(state.model, state.world)
    mine: Digests = {}
    for name, tensor in flat(state.checkpointer.tensors()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        bits = whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        mine[name] = hashlib.sha256(bits).hexdigest()
    ranks = group.agree(lambda: mine)
    return {name: " ".join(sorted({other[name] for other in ranks})) for name in mine}


def bytes_of(checkpoint: Path) -> int:
    """What a checkpoint takes on disk, by its manifest."""
    return sum(entry["size"] for entry in read_manifest(checkpoint)["files"].values())


def main(words: list[str]) -> int:
    """Do one task."""
    folder, task, *rest = words
    config = load(Path(folder) / "settings.json")
    {"train": train, "reload": reload, "fresh": fresh}[task](config, Path(folder), *rest)
    return 0


if __name__ == "__main__":
    log_to_console()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
