"""Follow a batch, a save and a restore through a rendered project, and list the calls in order.

python scripts/follow_calls.py PACKAGE      in a render's folder, with its src on PYTHONPATH

Prints JSON: {"batch": [[file, function], …], "save": …, "restore": …}. A function inside another
counts as the outer one, and each function counts once.

- batch: every function of the package that is entered from `Loader.next` to `compute_loss`;
- save: the functions on the stack whenever a save makes, opens, syncs or renames something in the
  checkpoints' folder, or hands work to a thread: from the loop to the published folder;
- restore: the same from `Checkpointer.restore` to the last file that is read.
"""

import importlib
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

Call = tuple[str, str]
LOOP = "_run"  # of train.py


class Followed:
    """The calls seen so far, while `on`."""

    def __init__(self, package: Path, folder: Path) -> None:
        self.package, self.folder = str(package), str(folder)
        self.calls: dict[Call, None] = {}
        self.on = False

    def note(self, frame: FrameType | None) -> None:
        """Note a frame's function, if it is of the package."""
        path = frame.f_code.co_filename if frame else ""
        if self.on and path.startswith(self.package):
            name = frame.f_code.co_qualname.split(".<locals>")[0]
            if name != "<module>" and "<lambda>" not in name:
                self.calls.setdefault((os.path.relpath(path, self.package), name))

    def note_stack(self) -> None:
        """Note all functions on the stack from the loop on, the outermost first."""
        frame, stack = sys._getframe(1), []
        while frame:
            stack.append(frame)
            frame = None if frame.f_code.co_name == LOOP else frame.f_back
        for outer in reversed(stack):
            self.note(outer)

    def effect(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook: what concerns the folder has its stack noted."""
        concerned = any(self.folder in str(argument) for argument in arguments[:2])
        if self.on and event in ("os.mkdir", "os.rename", "open") and concerned:
            self.note_stack()

    def take(self) -> list[Call]:
        """Stop, and return the calls."""
        self.on = False
        calls, self.calls = list(self.calls), {}
        return calls


def follow(package: str, folder: Path) -> dict[str, list[Call]]:
    """Train a few steps, resume, and follow what happens."""
    config, train = (importlib.import_module(f"{package}.{n}") for n in ("config", "train"))
    checkpoints = folder / "checkpoints"
    seen = Followed(Path(train.__file__).parent, checkpoints)
    result: dict[str, list[Call]] = {}
    sys.addaudithook(seen.effect)

    def run(steps: int) -> None:
        changes = {"run_dir": folder, "device": "cpu", "track": False, "checkpoint.every": 2}
        changes |= {"train.steps": steps, "train.validate_samples": 8}
        train.run(config.override(config.preset("tiny"), changes))

    sync, submit, rename = os.fsync, ThreadPoolExecutor.submit, os.rename
    compute_loss = train.compute_loss
    saves, kind = [0], train.Checkpointer
    save, restore, batch = kind.save, kind.restore, train.Loader.next

    def follow_sync(descriptor: int) -> None:
        # Not the loop's own files, which it syncs while a save is under way.
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(checkpoints):
            seen.note_stack()
        sync(descriptor)

    def follow_submit(pool: ThreadPoolExecutor, *arguments: Any, **named: Any) -> Any:
        seen.note_stack()
        return submit(pool, *arguments, **named)

    def follow_rename(source: Any, target: Any, **named: Any) -> None:
        rename(source, target, **named)
        if seen.on and Path(target).parent == checkpoints and Path(target).name[:5] == "step_":
            result.setdefault("save", seen.take())

    def follow_save(checkpointer: Any, *arguments: Any) -> None:
        saves[0] += 1
        checkpointer.settle()  # the save before
        seen.on = saves[0] == 2
        save(checkpointer, *arguments)

    def follow_restore(checkpointer: Any) -> int:
        seen.on = checkpoints.exists()
        step = restore(checkpointer)
        if seen.on:
            result["restore"] = seen.take()
        return step

    def follow_batch(loader: Any) -> Any:
        if "restore" in result and "batch" not in result:
            seen.on = True
            sys.setprofile(lambda frame, event, _: seen.note(frame) if event == "call" else None)
        return batch(loader)

    def follow_loss(*arguments: Any) -> Any:
        if "restore" in result and "batch" not in result and seen.on:
            sys.setprofile(None)
            result["batch"] = [*seen.take(), ("model.py", "compute_loss")]
        return compute_loss(*arguments)

    os.fsync, os.rename, ThreadPoolExecutor.submit = follow_sync, follow_rename, follow_submit
    kind.save, kind.restore, train.Loader.next = follow_save, follow_restore, follow_batch
    train.compute_loss = follow_loss
    run(5)
    run(7)
    own = {"follow_save", "follow_restore"}
    return {name: [c for c in calls if c[1] not in own] for name, calls in result.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(follow(sys.argv[1], Path(place, "run"))))
