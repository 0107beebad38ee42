"""The checkpoint stage: a drill that restores, reshards, damages and kills a short run.

The drill trains this run's model for a few steps in RUN_DIR/workflow/.drill; the run's own
checkpoints are not touched. Each task runs in processes of its own (drill.py).
"""

import contextlib
import json
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import PUBLISHED
from ..checkpoint.publish import RESERVED
from ..config import override
from ..data import build_datasets
from ..device import pick_device
from ..distributed import Group
from ..errors import RankError, UserError
from ..files import to_json, write_json
from ..model import build_model
from ..run.directory import RunDirectory
from ..run.hardware import in_units
from . import processes
from .chain import flag, recommend
from .drill import EVERY, STEPS, Digests, complete, losses_of
from .processes import most_ranks, named, refusal
from .stage import Stage, StageConfig
from .timing import describe, differences

ON_DISK = 5  # checkpoints that the drill keeps at once, at most
TIMEOUT = 1800.0  # seconds for one task
LAUNCHES = 3  # tries to kill a run during a save
GROWTH = (2, 4, 10)  # times the parameters, for which saves and restores are predicted
NEAR = 1e-3  # relative; between losses of kernels that are not deterministic
RESTART = {  # the parts of a restart in their order: the moment that ends each, and its name
    "imported": "processes started, torch imported",
    "restored": "model built, checkpoint loaded",
    "first_step": "first step",
}
CHECKS = {  # name: (wanted, advice)
    "roundtrip": (
        "model and optimizer bit for bit, and the same steps after them",
        "look for state in no parameter or persistent buffer, and random numbers not from torch",
    ),
    "reshard": (
        "the same tensors on any number of processes",
        "look for tensors whose shape or content depends on the number of processes",
    ),
    "corrupt_newest": (
        "a damaged checkpoint is never loaded; the previous one is loaded instead",
        "restore only what its manifest and every hash confirm (checkpoint/manifest.py)",
    ),
    "killed_while_saving": (
        "at most one save lost, the same end, nothing left over",
        "publish by one rename, when everything is on disk (checkpoint/publish.py)",
    ),
}


def measure(config: StageConfig) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not. UserError for a full disk."""
    stage, run_dir = Stage("checkpoint", config), config.directory
    model = build_model(config, build_datasets(config)[2])
    weights_and_moments = 3 * sum(parameter.nbytes for parameter in model.parameters())
    del model
    with RunDirectory(run_dir / "workflow/.drill", Group()) as locked:  # removed if left empty
        folder = locked.path / "runs"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier drill that was killed
        needed, free = ON_DISK * weights_and_moments, shutil.disk_usage(run_dir).free
        if free < needed:
            raise UserError(
                f"the drill needs about {in_units(needed)} in {run_dir} for {ON_DISK} checkpoints, "
                f"and {in_units(free)} are free: make room there, or choose another --run-dir"
            )
        try:
            folder.mkdir()
            Drill(stage, folder).run()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return stage.close()


def world_sizes(config: StageConfig, device: torch.device) -> tuple[int, int, str]:
    """Ranks to train on, another number to load into (0: none), and why only one, if so."""
    ranks, why_one = most_ranks(config, device)
    third = ranks + 1 if device.type == "cpu" else ranks // 2
    if ranks == 1 or not 1 < third <= config.train.global_batch_size or refusal(config, third):
        third = 0
    return ranks, third, why_one


class Drill:
    """The parts of the drill in `folder`, each compared with a run that nothing disturbs.

    If a part breaks down, its check fails and the rest goes on.
    """

    def __init__(self, stage: Stage, folder: Path) -> None:
        config, self.stage, self.folder = stage.config, stage, folder
        device = pick_device(config.device)
        self.ranks, self.third, self.why_one = world_sizes(config, device)
        self.exact = device.type == "cpu" or config.train.deterministic
        short_run = {
            "train.steps": STEPS,
            "train.log_every": 1,
            "train.validate_every": 0,
            "train.validate_samples": config.train.global_batch_size,  # the last step validates
            "checkpoint.every": EVERY,
            "checkpoint.keep": 2,
            "checkpoint.keep_every": 0,
            "checkpoint.on_failure": "stop",
            "profile.every": 0,
            "track": False,
        }
        write_json(folder / "settings.json", to_json(override(config, short_run)))

    def run(self) -> None:
        """Run all parts."""
        stage, folder, ranks = self.stage, self.folder, named(self.ranks, "process")
        say(f"training {STEPS} steps undisturbed on {ranks}, saving every {EVERY}")
        digests = self.child(self.ranks, "train", "undisturbed")["digests"]
        before, end = (digests[str(step)] for step in (STEPS - EVERY, STEPS))
        undisturbed = Undisturbed(losses_of(folder / "undisturbed"), before, end, self.exact)
        costs, restart = {}, {}
        with self.part("reshard"):
            self.reshard(end)
        say("flipping bits, timing saves")
        with self.part("corrupt_newest"):
            result = self.child(self.ranks, "damage", "undisturbed", "timed")
            good = f"a bit of each of {len(result['flips'])} files: noticed and named, the "
            good += "checkpoint set aside, the previous one restored"
            judge(stage, "corrupt_newest", [*filter(None, result["flips"])], good)
            costs = result["costs"]
        say(f"resuming in {ranks} that never trained")
        with self.part("roundtrip"):
            shutil.rmtree(complete(folder / "undisturbed/checkpoints")[-1])
            result = self.child(self.ranks, "resume", "undisturbed")
            judge_roundtrip(stage, result, losses_of(folder / "undisturbed"), undisturbed)
        say("killing the run during a save and starting it again")
        with self.part("killed_while_saving"):
            restart = kill_and_restart(stage, self.start, folder, undisturbed)
        if costs and restart:
            stage.figures |= {**costs, "restart_seconds": restart}
            conclude(stage)

    def reshard(self, end: Digests) -> None:
        """Load into other numbers of processes, each from what the one before saved."""
        source, chain, problems, refused = "undisturbed", [self.ranks], [], [self.why_one]
        for size in filter(None, (1, self.ranks, self.third) if self.ranks > 1 else ()):
            say(f"loading into {named(size, 'process')}")
            result = self.child(size, "reload", source, f"from-{size}")
            if "refused" in result:
                refused.append(f"{size} cannot: {result['refused']}")
                continue
            if problem := differing(result["digests"], end):
                problems.append(f"on {size}: {problem}")
            if source != "undisturbed":
                shutil.rmtree(self.folder / source)
            source = f"from-{size}"
            chain.append(size)
        tried = len(set(chain)) > 1
        good = f"{' -> '.join(map(str, chain))} processes: {len(end)} tensors bit for bit"
        good = "; ".join(filter(None, [good if tried else "", *refused]))
        judge(self.stage, "reshard", problems, good, measurable=tried)

    def child(self, ranks: int, *task: str) -> dict[str, Any]:
        """The result of a task of drill.py."""
        return processes.run_task("drill", self.folder, *task, ranks=ranks, seconds=TIMEOUT)

    def start(self) -> contextlib.AbstractContextManager:
        """Start the run that is killed."""
        words = str(self.folder), "train", "killed"
        return processes.started(self.ranks, *words, module=f"{__package__}.drill")

    @contextlib.contextmanager
    def part(self, check: str) -> Iterator[None]:
        """Fail the check if a process inside breaks down."""
        try:
            yield
        except RankError as error:
            judge(self.stage, check, ["; ".join(str(error).splitlines()[:3])])


@dataclass(frozen=True)
class Undisturbed:
    """The run that the others are compared with."""

    losses: dict[int, float]
    before: Digests  # of the checkpoint before the last one
    end: Digests
    exact: bool  # whether the same steps give the same bits on this device, with these settings

    def compare(self, losses: dict[int, float], end: Digests) -> tuple[list[str], str]:
        """The losses and the final tensors of another run: (problems, what is the same).

        If not `exact`, only the losses can tell.
        """
        others = [losses.get(step, math.nan) for step in self.losses]
        apart, other_tensors = (
            differences(others, self.losses.values()).max(),
            differing(end, self.end),
        )
        problems, same = [], f"{len(others)} losses bit for bit"
        if not self.exact and 0 < apart < NEAR:
            same = f"{len(others)} losses within {apart:.0e} (--train.deterministic: exactly)"
        elif apart:
            problems.append(f"losses differ by up to {apart:.0e}, relative")
        if not other_tensors:
            same += ", the same tensors at the end"
        elif self.exact:
            problems.append(f"at the end {other_tensors}")
        return problems, same


def differing(digests: Digests, expected: Digests) -> str:
    """Which tensors are missing, new or not the same bit for bit; empty if none is."""
    names = sorted(digests.keys() | expected.keys())
    names = [name for name in names if digests.get(name) != expected.get(name)]
    return f"{len(names)} tensors differ, such as {names[0]}" if names else ""


def judge(
    stage: Stage, name: str, problems: list[str], good: str = "", measurable: bool = True
) -> None:
    """Add a check that fails with `problems`, or passes with `good`, if it is `measurable`."""
    wanted, advice = CHECKS[name]
    passed = not problems if measurable else None
    measured = "; ".join(problems) or good
    stage.check(name, passed, measured=measured, wanted=wanted, advice=advice if measurable else "")


def judge_roundtrip(
    stage: Stage, result: dict[str, Any], losses: dict[int, float], undisturbed: Undisturbed
) -> None:
    """Resumed in fresh processes: the same tensors, then the same steps."""
    step, digests = result["restart"]["step"], result["digests"]
    other_tensors = differing(digests[str(step)], undisturbed.before)
    restored = other_tensors or f"{len(undisturbed.before)} tensors bit for bit"
    problems, same = undisturbed.compare(losses, digests[str(STEPS)])
    words = f"step {step}: {restored}; {'; '.join(problems) or same}"
    wrong = step != STEPS - EVERY or other_tensors or problems
    judge(stage, "roundtrip", [words] if wrong else [], words)


def kill_and_restart(
    stage: Stage, launch: Callable[[], Any], folder: Path, undisturbed: Undisturbed
) -> dict[str, float]:
    """Kill the run FOLDER/killed during a save, start it again and judge how it ends.

    Returns the seconds of the restart; none if no kill hit a save.
    """
    run_dir, checkpoints, saving = folder / "killed", folder / "killed/checkpoints", None
    for _ in range(LAUNCHES):
        shutil.rmtree(run_dir, ignore_errors=True)
        with launch() as process:
            killed_at = kill_in_save(process, checkpoints)
        if killed_at and (saving := save_under_way(checkpoints)):
            break
    if not saving:
        reason = f"no kill hit a save in {LAUNCHES} launches: saves are too short here"
        judge(stage, "killed_while_saving", [], reason, measurable=False)
        return {}
    interrupted, newest = step_of(saving), step_of(complete(checkpoints)[-1])
    done = max(losses_of(run_dir))
    with launch() as process:
        processes.finish(process, "the restart after the kill", TIMEOUT)
    result = json.loads((folder / "train.json").read_text("utf-8"))
    problems, same = undisturbed.compare(losses_of(run_dir), result["digests"][str(STEPS)])
    if (resumed := result["restart"]["step"]) != newest:
        problems.append(f"resumed from step {resumed}, not {newest}")
    if interrupted - newest > EVERY:
        problems.append(f"only step {newest} was published")
    if left := sorted(p.name for p in checkpoints.iterdir() if not PUBLISHED.fullmatch(p.name)):
        problems.append(f"left over: {', '.join(left)}")
    good = f"1 kill, in the save of step {interrupted}; {done - resumed} steps done again, {same}"
    judge(stage, "killed_while_saving", problems, good)
    times = [killed_at, *(result["restart"][part] for part in RESTART)]
    parts = {part: end - start for part, (start, end) in zip(RESTART, pairwise(times), strict=True)}
    return {**parts, "total": times[-1] - times[0]}


def kill_in_save(process: processes.Process, checkpoints: Path) -> float | None:
    """Kill all processes of a run once a save has written a file: when; None if the run ended.

    They are stopped first to look again: on a fast disk a save is over as soon as it is seen.
    """
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=0.001)  # reads the output, so that no pipe gets full
            processes.finish(process, "training to be killed", TIMEOUT)  # RankError if it failed
            return None
        if save_under_way(checkpoints):
            processes.kill(process, signal.SIGSTOP)
            if save_under_way(checkpoints):
                killed_at = time.time()
                processes.kill(process)
                return killed_at
            processes.kill(process, signal.SIGCONT)
    raise RankError(f"a run of a few steps took more than {TIMEOUT:.0f} s")


def save_under_way(checkpoints: Path) -> Path | None:
    """The folder of a save that has written a file, once an earlier checkpoint is published."""
    if not (published := complete(checkpoints)):
        return None
    folders = {file.parent for file in checkpoints.glob("*/*")}.difference(published)
    begun = (f for f in folders if f.name.startswith(RESERVED) or PUBLISHED.fullmatch(f.name))
    return next(begun, None)


def step_of(folder: Path) -> int:
    """The step of a checkpoint, published or not."""
    return int(folder.name.partition("step_")[2][:8])


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
    blocked, published = figures["blocked_seconds"], figures["save_seconds"]
    restart = figures["restart_seconds"]
    say(
        f"a save of {in_units(figures['bytes'])} blocks training for {describe(blocked)}, the "
        f"first one for {1e3 * figures['blocked_first']:.2f} ms; it is published after "
        f"{describe(published)}"
    )
    parts = ", ".join(f"{name} {restart[part]:.1f}" for part, name in RESTART.items())
    say(f"from the kill to the next step {restart['total']:.1f} s: {parts}")
    upload, load = published["median"], figures["restore_seconds"]
    grown = (f"{n} times: {n * upload:.3g} s and {n * load:.3g} s" for n in GROWTH)
    say(f"with more parameters a save and a restore take about, {'; '.join(grown)}")
    cost, step = blocked["median"], figures["step_seconds"]["median"]
    hours = config.workflow.hours_between_failures
    every = config.checkpoint.every or config.train.steps
    best = best_interval(cost, 3600 * hours, upload)
    figures |= {"interval_seconds": best, "hours_between_failures": hours}
    now, steps = every * step, max(1, math.ceil(best / step))
    lost, lost_now = (lost_share(t, cost, restart["total"], 3600 * hours) for t in (best, now))
    say(
        f"with a failure every {hours:g} h, save every {best:.3g} s: {steps} steps of "
        f"{1e3 * step:.3g} ms; {lost:.2%} of the time is lost then"
    )
    size = 10 ** max(0, len(str(steps)) - 2)  # nobody wants to save every 487 steps
    rounded = math.ceil(steps / size) * size
    if now < upload:
        why = f"a save takes longer than the {every} steps between two, and waits"
    elif not 0.5 <= now / best <= 2:
        why = f"{lost:.2%} of the time is lost then, {lost_now:.2%} as it is"
    else:
        return
    only_end = f" (this run of {config.train.steps} steps then saves only at its end)"
    end = only_end if rounded >= config.train.steps else ""
    stage.advise(f"{flag('checkpoint.every')} {rounded}{end}: {why}")
    recommend(stage, "checkpoint.every", rounded)


def say(text: str) -> None:
    """Print one line, as a part begins or ends."""
    print(f"     {text}", flush=True)
