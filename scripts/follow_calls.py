"""Follow a batch, a save and a restore through a rendered project, and list the calls in order.

python scripts/follow_calls.py PACKAGE      in a render's folder, with its src on PYTHONPATH

Prints JSON: {"batch": {"calls": [[file, function], …], "frames": 5}, "save": …, "restore": …}:
every function of the package that is entered, lambdas and functions inside others included, in the
order of the first entries, those of the main thread before those of the others, whose turns differ
from time to time. Each function counts once. "frames" is how many of them are entered within each
other at most. One plain process trains the tiny preset.

- batch: from `Loader.next` to `compute_loss`;
- save: from `Checkpointer.save` until the checkpoint is published and older ones are pruned;
- restore: `Checkpointer.restore`, from one checkpoint.
"""

import importlib
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

Call = tuple[str, str]


class Followed:
    """The functions of the package that all threads have entered, while `on`."""

    def __init__(self, package: Path) -> None:
        self.package = f"{package}{os.sep}"
        self.calls: dict[int, dict[Call, None]] = {}  # by thread
        self.frames = 0
        self.on = False
        # A thread takes the profiler of its start, so it is there before the first run begins.
        threading.setprofile(self.note)
        sys.setprofile(self.note)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call, if it is of the package: what `sys.setprofile` calls."""
        if not self.on or event != "call" or not self.counts(frame):
            return
        path = frame.f_code.co_filename.removeprefix(self.package)
        name = frame.f_code.co_qualname.replace(".<locals>", "")
        name = name.replace("<lambda>", f"lambda in line {frame.f_lineno}")
        self.calls.setdefault(threading.get_ident(), {}).setdefault((path, name))
        depth, outer = 0, frame
        # Of the loop, which calls what is followed, nothing counts.
        while outer is not None and outer.f_code.co_filename != __file__:
            depth += self.counts(outer)
            outer = outer.f_back
        self.frames = max(self.frames, depth)

    def counts(self, frame: FrameType) -> bool:
        """Whether a frame is of a function of the package, and not of a comprehension."""
        code = frame.f_code
        return code.co_filename.startswith(self.package) and (
            not code.co_name.startswith("<") or code.co_name == "<lambda>"
        )

    def take(self) -> dict[str, Any]:
        """Stop, and return the calls."""
        self.on = False
        main, calls = threading.main_thread().ident, self.calls
        threads = sorted(calls, key=lambda thread: thread != main)
        found = {
            "calls": list(dict.fromkeys(call for thread in threads for call in calls[thread])),
            "frames": self.frames,
        }
        self.calls, self.frames = {}, 0
        return found


def follow(package: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Train a few steps, resume, and follow what happens."""
    config, train = (importlib.import_module(f"{package}.{n}") for n in ("config", "train"))
    seen = Followed(Path(train.__file__).parent)
    result: dict[str, dict[str, Any]] = {}

    def run(steps: int) -> None:
        changes = {"run_dir": folder, "device": "cpu", "track": False, "checkpoint.every": 2}
        changes |= {"train.steps": steps, "train.validate_samples": 8}
        train.run(config.override(config.preset("tiny"), changes))

    kind, compute_loss = train.Checkpointer, train.compute_loss
    save, restore, batch = kind.save, kind.restore, train.Loader.next
    saves = [0]

    def follow_save(checkpointer: Any, *arguments: Any) -> None:
        checkpointer.settle()  # the save before
        saves[0] += 1
        seen.on = saves[0] == 2
        save(checkpointer, *arguments)
        if seen.on:  # what the loop calls next, with nothing of the loop's own in between
            checkpointer.before_optimizer_step()
            checkpointer.writer.settle()  # not a part of the save: waits for its thread
            result["save"] = seen.take()

    def follow_restore(checkpointer: Any, *given: Any, **named: Any) -> int:
        seen.on = (folder / "checkpoints").exists()
        step = restore(checkpointer, *given, **named)
        if seen.on:
            result["restore"] = seen.take()
        return step

    def follow_batch(loader: Any, *stop: Any) -> Any:
        seen.on = "restore" in result and "batch" not in result
        return batch(loader, *stop)

    def follow_loss(*arguments: Any) -> Any:
        if seen.on and "batch" not in result:
            result["batch"] = seen.take()
            result["batch"]["calls"].append(("model.py", "compute_loss"))
        return compute_loss(*arguments)

    kind.save, kind.restore, train.Loader.next = follow_save, follow_restore, follow_batch
    train.compute_loss = follow_loss
    run(5)
    run(7)
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(follow(sys.argv[1], Path(place, "run"))))
