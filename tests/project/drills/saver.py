"""A stand-in for a training run that saves: as a good one does, or with a fault of some kind.

Usage: saver.py FOLDER TASK FAULT (none, torn, forgets, leaves, differs, broken). With the task
`kill` it dies in its last save, else (`train`) it goes on to the end.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS, EVERY = 12, 3


def main(folder: Path, task: str, fault: str) -> None:
    """Go on from the newest checkpoint that is whole, to the end."""
    run = folder / "run"
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    started = time.time()
    whole = [path for path in checkpoints.glob("step_*") if (path / "manifest.json").exists()]
    first = max((int(path.name[5:]) for path in whole), default=0)
    if fault != "leaves":
        for path in checkpoints.glob(".saving-*"):
            os.rename(path, folder / f"gone-{time.time_ns()}")
    for path in checkpoints.glob("step_*"):
        if path not in whole:
            os.rename(path, checkpoints / f"{path.name}.damaged-1")
    if fault == "forgets" and first:
        first = 0
    if fault == "broken" and first:
        sys.exit("error: no good checkpoint is left")
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)[:first] if log.exists() else []
    log.write_text("".join(lines))
    for step in range(first + 1, STEPS + 1):
        with open(log, "a") as file:
            file.write(json.dumps({"step": step, "loss": 1 / step}) + "\n")
        if step == first + 1:
            marks = dict.fromkeys(("imported", "restored"), started)
            marks |= {"step": first, "first_step": time.time()}
        weights = "other" if fault == "differs" and first else "right"
        result = {"digests": {"9": {"w": "earlier"}, "12": {"w": weights}}, "restart": marks}
        if step % EVERY == 0:
            reservation = write(checkpoints, step, fault)
            if task == "kill" and step == STEPS:
                killed = json.dumps({**result, "killed_at": time.time()})
                (folder / "kill.json").write_text(killed)
                os.kill(os.getpid(), signal.SIGKILL)
            publish(reservation, checkpoints / f"step_{step:08d}")
    (folder / "train.json").write_text(json.dumps(result))


def write(checkpoints: Path, step: int, fault: str) -> Path:
    """Write the files of a checkpoint; where they are."""
    name = f"step_{step:08d}"
    target = checkpoints / name
    reservation = target if fault == "torn" else checkpoints / f".saving-{name}-{os.getpid()}"
    reservation.mkdir(exist_ok=True)
    (reservation / "weights").write_text("w")
    return reservation


def publish(reservation: Path, target: Path) -> None:
    """Write the manifest, and rename the folder unless it has that name already."""
    (reservation / "manifest.json").write_text("{}")
    if reservation != target:
        if target.exists():
            os.rename(target, target.parents[1] / f"gone-{time.time_ns()}")
        os.rename(reservation, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4])
