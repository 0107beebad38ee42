"""Runs with thousands of checkpoints in their directory, and kills while they are pruned."""

import dataclasses
import importlib
import json
import os
import random
import shutil
import time
from collections import Counter
from functools import partial
from pathlib import Path

from .common import Findings
from .forked_jobs import Job, Plan
from .storm import WHOM, Storm, copy_run

KEPT = "with thousands of checkpoints, a run resumes and keeps the right ones"
HALF_WAY = "kills while thousands of checkpoints were being pruned"
MOST = "most checkpoints in one directory"
KEEP = 2


def attempt(findings: Findings, hits: Counter[str], plan: Plan) -> None:
    """Kill a run that prunes thousands, and the starts after it; and let one keep them all."""
    storm = thousands(findings, hits, plan)
    assert storm.template
    for number in range(1 if findings.bounded else 12):
        run_dir = storm.begin()
        for phase in ("pruning", "restoring", "restoring")[: 1 if findings.bounded else None]:
            storm.target = (WHOM[number % 2], 0, phase)
            if not storm.kill_once(run_dir):
                break
            left = list(run_dir.glob("checkpoints/.discarded-*"))
            there = list(run_dir.glob("checkpoints/step_*"))
            hits[HALF_WAY] += bool(left) or len(there) > 2 * KEEP
        storm.end(run_dir)
    keep(storm)


def thousands(findings: Findings, hits: Counter[str], plan: Plan) -> Storm:
    """A storm whose chains begin with a run that has a checkpoint of each of its steps."""
    count, every = (100, 10) if findings.bounded else (3000, 20)
    more = {"train.steps": count + 3 * every, "checkpoint.every": every, "checkpoint.keep": KEEP}
    settings = plan.settings | more | {"train.validate_every": 0}
    plan = dataclasses.replace(plan, settings=settings, sabotage=partial(slowly, 0.5 / count))
    folder, rng = findings.folder / f"{plan.package}_thousands", random.Random(plan.package)
    storm = Storm(plan, folder, findings, rng, hits)
    storm.linger = lambda run_dir: linger(run_dir / "checkpoints", rng)
    storm.template = folder / "template"
    copy_run(folder / "undisturbed", storm.template)
    fill(plan.package, storm.template / "checkpoints", count)
    storm.undisturbed |= storm.contents(storm.template)
    hits[MOST] = max(hits[MOST], count)
    return storm


def slowly(seconds: float, package: str) -> None:
    """Take so long for each checkpoint that is pruned, or a kill would often come too late."""
    publish = importlib.import_module(f"{package}.checkpoint.publish")
    discard, remove = publish.Publisher.discard, publish.shutil.rmtree
    publish.Publisher.discard = lambda *rest: (time.sleep(seconds), discard(*rest))
    publish.shutil.rmtree = lambda *rest, **more: (time.sleep(seconds), remove(*rest, **more))


def linger(folder: Path, rng: random.Random) -> None:
    """Wait until checkpoints, or what is left of them, become fewer; then some milliseconds."""

    def names() -> tuple[int, int]:
        found = os.listdir(folder)
        return len(found), sum(name.startswith("step_") for name in found)

    before, deadline = names(), time.monotonic() + 2
    while time.monotonic() < deadline:
        time.sleep(0.001)
        if any(now < then for now, then in zip(names(), before, strict=True)):
            break
    time.sleep(10 ** rng.uniform(-4, -1))


def fill(package: str, folder: Path, count: int) -> None:
    """Give each step up to `count` a checkpoint, with what the next real one has in it."""
    manifests = importlib.import_module(f"{package}.checkpoint.manifest")
    source, content = Path(), {}
    for step in range(count + 1000, 0, -1):
        path = folder / f"step_{step:08d}"
        if path.exists() and step > count:
            shutil.rmtree(path)
        elif path.exists():
            source, content = path, json.loads((path / "manifest.json").read_text("utf-8"))
            del content["digest"]
        elif step < count:
            path.mkdir()
            for name in content["files"]:
                os.link(source / name, path / name)
            (path / "manifest.json").write_bytes(manifests.sealed(content | {"step": step}))


def keep(storm: Storm) -> None:
    """Go on and keep so many: the newest, each as it was."""
    count = len(list((storm.template / "checkpoints").iterdir()))
    settings = storm.plan.settings | {"checkpoint.keep": count}
    run_dir, log = storm.begin(), storm.folder / "kept.log"
    job = Job(dataclasses.replace(storm.plan, settings=settings), run_dir, log)
    good = job.gone() is not None and not job.code
    there = storm.contents(run_dir)
    wanted = sorted(storm.undisturbed)[-count:]
    problem = None if good and sorted(there) == wanted else f"{len(there)} are there, {log}"
    for step in wanted:
        wrong = there.get(step) != storm.undisturbed[step]
        storm.tally(KEPT, "checkpoints").count(problem or (f"step {step}" if wrong else None))
