"""Kill training at any moment, start it again, and see that it ends as if nothing had been.

Every parallelism with every kind of checkpoint. `kill -9` goes to one rank, to all of them or to
what launched them; some kills come at a moment drawn at random from the length of a run, more
within a phase that is waited for, so that short ones are met too. Most jobs are forked
(forked_jobs.py, storm.py), on one process, two ranks or three, some compiled per block, some with
data that draws random numbers and with buffers of every sort (own_code.py), which get a stop signal
between saves, too; some have frozen weights that no checkpoint repeats; some go through launch.sh
and torchrun (launched_jobs.py), and some are killed while they prune thousands of checkpoints
(kill_storm_pruning.py).
"""

import dataclasses
import json
import os
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import kill_storm_mutants, kill_storm_pruning, own_code
from .common import Findings, run_topic
from .forked_jobs import PHASES, Plan
from .launched_jobs import Launch
from .storm import (
    ENDS,
    EVERY,
    LOST,
    ORPHANS,
    WHOLE,
    WHOM,
    Storm,
    contents,
    import_all,
    plan_of,
    renders,
)

# With the number of ranks, where there are several.
COMPILED = {"single_dcp_async": 0, "ddp_torch_save": 2, "fsdp_dcp": 2}
COMPILED |= {"ddp_dcp_async": 2, "fsdp_dcp_async": 3}
REAL = ("single_dcp", "ddp_dcp_async", "fsdp_torch_save")
LONGER = {"train.steps": 500, "train.validate_every": 100, "checkpoint.every": 20}
KILLS_LAUNCHED = (
    *("one rank", "all ranks", "one rank", "one rank"),
    *("launcher", "launcher at the start", "all ranks"),
)
FORKED = "a forked run computes the same bits as a normally started one"
Part = Callable[[Findings, Counter[str]], None]


def launched_storm(storm: Storm, source: Path) -> None:
    """Kills of a run that was started as users start it: torchrun restarts it, or we do."""
    run_dir, log = storm.folder / "launched", storm.folder / "launched.log"
    name, launch, seen = storm.plan.package, None, 0
    for whom in KILLS_LAUNCHED if storm.plan.ranks else KILLS_LAUNCHED[:1] * 3:
        launch = launch or Launch(source, storm.plan, run_dir, log)
        if not launch.kill(whom, seen, storm.rng):
            break
        (seen, done), newest = launch.progress(), max(contents(run_dir), default=0)
        saving = bool(list(run_dir.glob("checkpoints/.saving-*")))
        phase = "starting" if "start" in whom else "uploading" if saving else "training"
        storm.hits.update((whom.split(" at ")[0], "kills", "launched kills", phase))
        lost, allowed = done - newest, storm.every * (2 if name.endswith("async") else 1)
        problem = f"{name}, {whom} killed: {lost} steps, {allowed} allowed"
        storm.tally(LOST).count(problem if lost > allowed else None)
        wrong = storm.wrong(run_dir)
        storm.tally(WHOLE).count(f"{name}, {whom}: {wrong}" if wrong else None)
        if "launcher" in whom or not storm.plan.ranks:
            problem = None if launch.gone() else f"{name}, {whom} killed: processes live on"
            storm.tally(ORPHANS).count(problem)
            launch = None
    (launch or Launch(source, storm.plan, run_dir, log)).finish()
    problem = storm.differences(run_dir)
    storm.tally(ENDS, "runs").count(f"{name}, launched: {problem}" if problem else None)


def kill_with_base(findings: Findings, hits: Counter[str], plan: Plan) -> None:
    """Kills of runs whose frozen weights stay in a file, which each restart reads."""
    folder = findings.folder / f"{plan.package}_base"
    folder.mkdir()
    base = folder / "base.safetensors"
    own_code.write_base(plan.package, plan.configuration(folder), base)
    settings = plan.settings | {"init_from": base, "checkpoint.frozen": "no"}
    plan = dataclasses.replace(plan, settings=settings, sabotage=own_code.freeze)
    storm = Storm(plan, folder / "runs", findings, random.Random(folder.name), hits)
    before = hits["kills"]
    storm.kill(1 if findings.bounded else 12)
    hits["with base"] += hits["kills"] - before


def side_by_side(findings: Findings, parts: list[Part]) -> Counter[str]:
    """Do all parts at the same time, each in a fork; what they found comes together."""
    forks = {}
    for number, part in enumerate(parts):
        folder = Path(tempfile.mkdtemp(prefix=f"part-{number}-", dir=findings.folder))
        if (pid := os.fork()) == 0:
            _do(part, Findings(findings.bounded, folder))
        forks[pid] = folder / "found.json"
    hits: Counter[str] = Counter()
    for pid, path in forks.items():
        if os.waitpid(pid, 0)[1]:
            raise RuntimeError("a part of the storm broke down: see above")
        found = json.loads(path.read_text("utf-8"))
        most = max(hits["most lost"], found["hits"].pop("most lost", 0))
        hits.update(found["hits"])
        hits["most lost"] = most
        for tally in found["tallies"]:
            ours = findings.tally(tally["promise"], tally["unit"])
            ours.tried += tally["tried"]
            ours.violations += tally["violations"]
    return hits


# Each parallelism and each way to save once.
IN_PART = ("single_torch_save", "ddp_dcp_async", "fsdp_dcp")


def _do(part: Part, own: Findings) -> None:
    try:
        hits: Counter[str] = Counter()
        part(own, hits)
        found: dict[str, Any] = {"hits": hits, "tallies": [vars(it) for it in own.tallies]}
        (own.folder / "found.json").write_text(json.dumps(found), "utf-8")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(70)


def attempt(findings: Findings) -> None:
    """All nine variants, on two ranks and on three."""
    sources = renders(findings.folder / "renders")
    import_all(sources)

    def forked(names: list[str]) -> Part:
        def part(found: Findings, hits: Counter[str]) -> None:
            for number, name in enumerate(names):
                workers = {} if number % 3 or found.bounded else {"train.loader_workers": 1}
                ranks = 3 if found.bounded and name == "ddp_dcp_async" else 2
                storm(name, name, found, hits, ranks, **workers).kill(1 if found.bounded else 20)
            for name in () if found.bounded else names:
                if not name.startswith("single"):
                    storm(name, f"{name}_3", found, hits, 3).kill(8)
                if name in COMPILED:
                    compiled = {"compile.mode": "blocks"}
                    storm(name, f"{name}_c", found, hits, COMPILED[name], **compiled).kill(4)
            for name in names:
                if name in (IN_PART[1:2] if found.bounded else IN_PART):
                    plan = dataclasses.replace(plan_of(name, sources[name]), sabotage=own_code.add)
                    folder, its = found.folder / f"{name}_own", random.Random(f"{name}_own")
                    own = Storm(plan, folder, found, its, hits, stops=True)
                    own.kill(2 if found.bounded else 16)
                if name in (IN_PART[:1] if found.bounded else IN_PART):
                    kill_with_base(found, hits, plan_of(name, sources[name]))

        return part

    def storm(name: str, run: str, found: Findings, hits: Counter[str], *ranks: int, **more: Any):
        plan = plan_of(name, sources[name], *ranks, **more)
        return Storm(plan, found.folder / run, found, random.Random(run), hits)

    def pruning(found: Findings, hits: Counter[str]) -> None:
        for name in ("single_torch_save", "fsdp_dcp_async")[: 1 if found.bounded else None]:
            kill_storm_pruning.attempt(found, hits, plan_of(name, sources[name]))

    def started(found: Findings, hits: Counter[str]) -> None:
        for name in REAL[: 1 if found.bounded else None]:
            plan = plan_of(name, sources[name], **({} if found.bounded else LONGER))
            storm = Storm(plan, found.folder / name, found, random.Random(name), hits)
            run_dir = storm.folder / "started"
            Launch(sources[name], plan, run_dir, storm.folder / "started.log").finish()
            found.tally(FORKED, "runs").count(storm.differences(run_dir))
            if not found.bounded:
                launched_storm(storm, sources[name])

    def broken(found: Findings, hits: Counter[str]) -> None:
        kill_storm_mutants.attempt(found, sources)

    names = [name for name in sources if name in IN_PART or not findings.bounded]
    parts = [forked(names[::2]), forked(names[1::2]), started, broken, pruning]
    hits = side_by_side(findings, parts)
    figures, kills = findings.figures, hits["kills"]
    figures["kills"], figures["kills through real starts"] = kills, hits["launched kills"]
    forked = kills - hits["launched kills"] - hits["auto kills"]
    lost = hits["lost"] - hits["auto lost"]
    figures["steps repeated after a kill, mean (forked jobs)"] = round(lost / forked, 2)
    if hits["auto kills"]:
        figures["kills of runs that save as often as they can"] = hits["auto kills"]
        figures["steps repeated after these, mean"] = round(
            hits["auto lost"] / hits["auto kills"], 2
        )
    figures["steps repeated after a kill, maximum (forked jobs)"] = hits["most lost"]
    figures["save interval, steps"] = EVERY
    figures["kills of runs on 3 ranks"] = hits["3 ranks"]
    figures["kills of runs compiled per block"] = hits["compiled"]
    figures["stops between saves, in runs with random data and changing buffers"] = hits[
        "stops between saves"
    ]
    figures["kills of runs whose frozen weights no checkpoint has"] = hits["with base"]
    figures[kill_storm_pruning.HALF_WAY] = hits[kill_storm_pruning.HALF_WAY]
    figures[kill_storm_pruning.MOST] = hits[kill_storm_pruning.MOST]
    for name in (*WHOM, *PHASES[1:]):
        figures[f"kills {'of' if name in WHOM else 'while'} {name}"] = hits[name]


if __name__ == "__main__":
    run_topic("kill_storm", attempt)
