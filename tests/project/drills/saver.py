"""A stand-in for a training run that saves: as a good one does, or with a fault of some kind.

Usage: saver.py FOLDER FAULT (none, torn, forgets, leaves, differs, quick, broken)
"""

import json
import os
import sys
import time
from pathlib import Path

STEPS, EVERY = 12, 3


def main(folder: Path, fault: str) -> None:
    """Go on from the newest checkpoint that is whole, to the end."""
    run = folder / "killed"
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
        if step % EVERY == 0:
            save(checkpoints, step, fault)
    weights = "other" if fault == "differs" and first else "right"
    digests = {"9": {"w": "earlier"}, "12": {"w": weights}}
    (folder / "train.json").write_text(json.dumps({"digests": digests, "restart": marks}))


def save(checkpoints: Path, step: int, fault: str) -> None:
    """Write a checkpoint and publish it, with time for a kill in between unless it is quick."""
    name = f"step_{step:08d}"
    target = checkpoints / name
    reservation = target if fault == "torn" else checkpoints / f".saving-{name}-{os.getpid()}"
    pause = 0.0 if fault == "quick" else 0.05
    if fault == "quick":
        time.sleep(0.01)
        reservation = checkpoints.parent / "elsewhere"
    reservation.mkdir(exist_ok=True)
    time.sleep(pause)
    (reservation / "weights").write_text("w")
    time.sleep(pause)
    (reservation / "manifest.json").write_text("{}")
    if fault != "torn":
        if target.exists():
            os.rename(target, checkpoints.parent / f"gone-{time.time_ns()}")
        os.rename(reservation, target)
    time.sleep(pause)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
