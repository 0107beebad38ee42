"""The checkpoint stage: a drill that restores, reshards, damages and kills a short run.

The drill trains this run's model for a few steps in RUN_DIR/workflow/.drill; the run's own
checkpoints are not touched. Each task runs in processes of its own (drill.py).
"""

import math
import mmap
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..checkpoint import PUBLISHED
from ..config import override
from ..device import pick_device
from ..errors import RankError
from ..files import read_json, to_json, write_json
from ..run.hardware import in_units
from ..run.journal import read_records
from .chain import advise, recommend
from .drill import EVERY, STEPS, Digests
from .processes import most_ranks, named, refusal, run_task
from .stage import Stage, StageConfig
from .timing import describe, differences

TIMEOUT = 1800.0  # seconds for one task
NEAR = 1e-3  # relative; between losses of kernels that are not deterministic
Ran = tuple[dict[int, float], Digests]  # losses by step, and the tensors at the end
RESTART = {  # the parts of a restart in their order: the moment that ends each, and its name
    "imported": "processes started, torch imported",
    "restored": "model built, checkpoint loaded",
    "first_step": "first step",
}
WANTED = {  # by check, in the order in which they are judged
    "roundtrip": "model and optimizer bit for bit, and the same steps after them",
    "killed_while_saving": "at most one save lost, the same end, nothing left over",
    "corrupt_newest": "a damaged checkpoint is never loaded; the previous one is loaded instead",
    "reshard": "the same tensors on any number of processes",
}
ADVICE = {
    "roundtrip": "look for state outside parameters and buffers, and random numbers not from torch",
    "killed_while_saving": "publish by one rename, once all is on disk (checkpoint/publish.py)",
    "corrupt_newest": "restore only what manifest and hashes confirm (checkpoint/manifest.py)",
    "reshard": "look for tensors whose shape or content depends on the number of processes",
}


def measure(config: StageConfig) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("checkpoint", config)
    folder = config.directory / "workflow/.drill"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier drill that was killed
    try:
        folder.mkdir(parents=True)
        Drill(stage, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return stage.close()


class Drill:
    """The parts of the drill in `folder`: one run, killed in its last save and started again."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        config, self.stage, self.folder = stage.config, stage, folder
        self.run_dir, self.device = folder / "run", pick_device(config.device)
        self.ranks, self.why_one = most_ranks(config, self.device)
        self.exact = self.device.type == "cpu" or config.train.deterministic
        short_run = {
            "train.steps": STEPS,
            "train.epochs": 0.0,
            "train.log_every": 1,
            "train.validate_every": 0,
            "train.validate_samples": config.train.global_batch_size,  # the last step validates
            "checkpoint.every": EVERY,
            "checkpoint.keep": 2,
            "track": False,
        }
        write_json(folder / "settings.json", to_json(override(config, short_run)))

    def run(self) -> None:
        """Run all parts; when a process breaks down, the checks that are left fail."""
        stage, ranks = self.stage, named(self.ranks, "process")
        try:
            say(f"training {STEPS} steps on {ranks}, saving every {EVERY}, killed in the last save")
            killed = self.kill()
            say("starting it again")
            stage.figures["restart_seconds"] = self.restart(killed)
            say("flipping a bit, timing saves")
            stage.figures |= self.damage()
            conclude(stage)
            self.reshard()
        except RankError as error:
            reason = "; ".join(str(error).splitlines()[:3])
            for name in [*WANTED][len(stage.checks) :]:
                self.judge(name, False, reason)

    def kill(self) -> dict[str, Any]:
        """Train until the run kills itself; what it recorded. RankError if it failed otherwise."""
        try:
            return self.child(self.ranks, "kill")
        except RankError:
            if not (record := self.folder / "kill.json").exists():
                raise
            return read_json(record)

    def restart(self, killed: dict[str, Any]) -> dict[str, float]:
        """Start the killed run again, judge what it restored and how it ended; seconds it took."""
        losses = losses_of(self.run_dir)
        result = self.child(self.ranks, "train")
        self.saved, end = killed["digests"] | result["digests"], str(STEPS)
        first, again = (losses, killed["digests"][end]), (losses_of(self.run_dir), self.saved[end])
        problems, same = compare(first, again, self.exact)

        restart, resumed = result["restart"], result["restart"]["step"]
        if resumed != STEPS - EVERY:
            problems.append(f"resumed from step {resumed}, not {STEPS - EVERY}")
        before, after = (ran["digests"].get(str(resumed), {}) for ran in (killed, result))
        other_tensors = differing(after, before)
        restored = other_tensors or f"{len(after)} tensors bit for bit"
        measured = f"step {resumed}: {restored}; {'; '.join(problems) or same}"
        self.judge("roundtrip", not problems and not other_tensors, measured)

        names = sorted(path.name for path in (self.run_dir / "checkpoints").iterdir())
        if left := [name for name in names if not PUBLISHED.fullmatch(name)]:
            problems.append(f"left over: {', '.join(left)}")
        good = f"1 kill, in the save of step {STEPS}; {STEPS - resumed} steps done again, {same}"
        self.judge("killed_while_saving", not problems, "; ".join(problems) or good)
        moments = [killed["killed_at"], *(restart[part] for part in RESTART)]
        seconds = dict(zip(RESTART, (b - a for a, b in pairwise(moments)), strict=True))
        return {**seconds, "total": moments[-1] - moments[0]}

    def damage(self) -> dict[str, Any]:
        """Flip a bit in the newest checkpoint's largest file and restore; what saves cost."""
        newest = max((self.run_dir / "checkpoints").glob("step_????????"))
        sizes = {file: file.stat().st_size for file in newest.iterdir()}
        file = max(sizes, key=sizes.__getitem__)
        with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as content:
            content[len(content) // 2] ^= 1
        result = self.child(self.ranks, "damage")
        if "refused" in result:
            raise RankError(result["refused"])
        warned = any("DAMAGED" in text and file.name in text for text in result["messages"])
        problems = [] if warned else ["not noticed, no warning names it"]
        problems += ["the checkpoint is not set aside"] if newest.exists() else []
        problems += filter(None, [differing(result["digests"], self.saved[str(STEPS - EVERY)])])
        good = "noticed and named, the checkpoint set aside, the previous one restored"
        measured = f"a bit of {file.name}: {'; '.join(problems) or good}"
        self.judge("corrupt_newest", not problems, measured)
        return {"bytes": sum(sizes.values()), **result["costs"]}

    def reshard(self) -> None:
        """Load the newest checkpoint into other numbers of processes."""
        loaded, problems, refused = [], [], [self.why_one]
        for size in other_sizes(self.ranks, self.device.type):
            say(f"loading into {named(size, 'process')}")
            reason = refusal(self.stage.config, size)
            result = {} if reason else self.child(size, "reload")
            if reason := reason or result.get("refused"):
                refused.append(f"{size} cannot: {reason}")
                continue
            if problem := differing(result["digests"], self.saved[str(result["step"])]):
                problems.append(f"on {size}: {problem}")
            loaded.append(f"by {size} ({len(result['digests'])} tensors bit for bit)")
        good = f"saved by {self.ranks}, loaded {' and '.join(loaded)}" if loaded else ""
        measured = "; ".join(problems or filter(None, [good, *refused]))
        self.judge("reshard", not problems if loaded else None, measured)

    def judge(self, name: str, passed: bool | None, measured: str) -> None:
        """Add one of the checks that `WANTED` names."""
        advice = "" if passed is None else ADVICE[name]
        self.stage.check(name, passed, measured=measured, wanted=WANTED[name], advice=advice)

    def child(self, ranks: int, task: str) -> dict[str, Any]:
        """The result of a task of drill.py."""
        return run_task("drill", self.folder, task, ranks=ranks, seconds=TIMEOUT)


def other_sizes(ranks: int, device: str) -> list[int]:
    """Other numbers of processes to load into; none where there can be only one."""
    third = ranks + 1 if device == "cpu" else ranks // 2
    return sorted({1, third} - {ranks}) if ranks > 1 else []


def losses_of(run_dir: Path) -> dict[int, float]:
    """Loss by step; None where it was not finite."""
    return {record["step"]: record["loss"] for record in read_records(run_dir)}


def compare(first: Ran, again: Ran, exact: bool) -> tuple[list[str], str]:
    """Compare losses and final tensors of the same steps, taken twice: (problems, what is equal).

    If they need not give the same bits (not `exact`), only the losses can tell.
    """
    others = [again[0].get(step, math.nan) for step in first[0]]
    apart = differences(others, first[0].values()).max()
    other_tensors, problems = differing(again[1], first[1]), []
    if apart > (0 if exact else NEAR):
        problems.append(f"losses differ by up to {apart:.0e}, relative")
    if exact and other_tensors:
        problems.append(f"at the end {other_tensors}")
    near = f"within {apart:.0e} (--train.deterministic: exactly)" if apart else "bit for bit"
    end = "" if other_tensors else ", the same tensors at the end"
    return problems, f"{len(others)} losses {near}{end}"


def differing(digests: Digests, expected: Digests) -> str:
    """Which tensors are missing, new or not the same bit for bit; empty if none is."""
    names = sorted({name for name, _ in digests.items() ^ expected.items()})
    return f"{len(names)} tensors differ, such as {names[0]}" if names else ""


def best_interval(cost: float, failures: float, least: float = 0.0) -> float:
    """Seconds between saves that lose the least time (Young, 1974; Daly, 2006).

    `cost` is the seconds that a save blocks training, `failures` the mean seconds between two
    failures. Never below `least`, the seconds until a save is published.
    """
    return max(math.sqrt(2 * cost * failures), least)


def lost_share(interval: float, cost: float, restart: float, failures: float) -> float:
    """Expected share of time lost to saving, to steps done again and to restarts (first order)."""
    return cost / interval + (interval / 2 + restart) / failures


def conclude(stage: Stage) -> None:
    """Say what saving and restarting cost, and advise how often to save."""
    config, figures = stage.config, stage.figures
    blocked, published, restart = (figures[f"{n}_seconds"] for n in ("blocked", "save", "restart"))
    say(f"a save of {in_units(figures['bytes'])} blocks training for {describe(blocked)}")
    say(f"it is published after {describe(published)}")
    parts = ", ".join(f"{name} {restart[part]:.1f}" for part, name in RESTART.items())
    say(f"from the kill to the next step {restart['total']:.1f} s: {parts}")

    step, upload = figures["step_seconds"]["median"], published["median"]
    hours = figures["hours_between_failures"] = config.workflow.hours_between_failures
    best = figures["interval_seconds"] = best_interval(blocked["median"], 3600 * hours, upload)
    every, steps = config.checkpoint.every or config.train.steps, max(1, math.ceil(best / step))
    now, costs = every * step, (blocked["median"], restart["total"], 3600 * hours)
    lost, lost_now = (f"{lost_share(interval, *costs):.2%}" for interval in (best, now))
    say(f"with a failure every {hours:g} h, save every {steps} steps: {lost} of the time is lost")
    if now >= upload and 0.5 <= now / best <= 2:
        return
    why = f"{lost} of the time is lost then, {lost_now} as it is"
    if now < upload:
        why = f"a save takes longer than the {every} steps between two, and waits"
    size = 10 ** max(0, len(str(steps)) - 2)  # nobody wants to save every 487 steps
    rounded = math.ceil(steps / size) * size
    if rounded >= config.train.steps:
        why = f"this run of {config.train.steps} steps then saves only at its end; {why}"
    advise(stage, f"--checkpoint.every {rounded}: {why}")
    recommend(stage, "checkpoint.every", rounded)


def say(text: str) -> None:
    """Print one line, as a part begins or ends."""
    print(f"     {text}", flush=True)
