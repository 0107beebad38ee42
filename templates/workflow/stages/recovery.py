"""Test recovery on a short run: kill, resume, damage and reshard it (the checkpoint stage).

The short run trains this run's model for a few steps in RUN_DIR/workflow/.drill; the run's own
checkpoints are not touched. Each task runs in separate processes (drill.py).
"""

import math
import mmap
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import PUBLISHED
from ..config import override
from ..device import pick_device
from ..errors import RankError, UserError
from ..files import read_json, to_json, write_json
from ..run.hardware import in_units
from ..run.journal import read_records
from .chain import advise, recommend
from .drill import EVERY, STEPS, Digests
from .processes import most_ranks, named, refusal, run_task
from .stage import Stage, StageConfig
from .timing import describe, differences, steps_of_run

# Time limit of a task in seconds.
TIMEOUT = 1800.0
# Allowed relative difference of losses, if kernels are not deterministic.
NEAR = 1e-3
# The phases of a restart, in order. A key is the event that ends a phase, and also names the phase;
# the value is the phase's label.
RESTART = {
    "imported": "processes started, torch imported",
    "restored": "model built, checkpoint loaded",
    "first_step": "first step",
}
# The checks in their order, each with its requirement.
WANTED = {
    "roundtrip": "model and optimizer restored bit for bit, and the same steps afterwards",
    "killed_while_saving": "at most one save lost, the same final state, no files left over",
    "corrupt_newest": "a damaged checkpoint is never loaded; the previous one is loaded instead",
    "reshard": "the same tensors on any number of processes",
}
ADVICE = {
    "roundtrip": "look for state outside parameters and buffers, and random numbers not from torch",
    "killed_while_saving": "publish with one rename after everything is on disk (publish.py)",
    "corrupt_newest": "restore only files that match manifest and hashes (manifest.py)",
    "reshard": "look for tensors whose shape or content depends on the number of processes",
}


@dataclass(frozen=True)
class Outcome:
    """The losses of a run by step, and the digests of its tensors at the end."""

    losses: dict[int, float]
    digests: Digests


def measure(config: StageConfig) -> int:
    """Run the stage; return 1 if a check failed, else 0."""
    stage = Stage("checkpoint", config)
    folder = config.directory / "workflow/.drill"
    # An earlier stage that was killed may have left this folder.
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        Drill(stage, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return stage.close()


class Drill:
    """The test: a short run in `folder` that is killed during its last save, and started again."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage = stage
        self.folder = folder
        self.run_dir = folder / "run"
        config = stage.config
        self.device = pick_device(config.device)
        # `why_one` is the reason why there can be only one rank, or "" if there can be more.
        self.ranks, self.why_one = most_ranks(config, self.device)
        # Whether repeated steps must be equal bit for bit, since all kernels are deterministic.
        self.exact = self.device.type == "cpu" or config.train.deterministic
        short_run = {
            "train.steps": STEPS,
            "train.epochs": 0.0,
            "train.log_every": 1,
            "train.validate_every": 0,
            # The last step still validates, so use few samples.
            "train.validate_samples": config.train.global_batch_size,
            "checkpoint.every": EVERY,
            # `damage` needs the newest checkpoint and the one before.
            "checkpoint.keep": 2,
            "track": False,
        }
        write_json(folder / "settings.json", to_json(override(config, short_run)))

    def run(self) -> None:
        """Run all checks in the order of `WANTED`.

        If a process fails, the current check and all later ones fail with the error of the process.
        """
        stage = self.stage
        processes = named(self.ranks, "process")
        try:
            plan = f"saving every {EVERY} steps, killed in the last save"
            say(f"training {STEPS} steps on {processes}, {plan}")
            killed = self.kill()
            say("starting it again")
            stage.figures["restart_seconds"] = self.restart(killed)
            say("flipping a bit, timing saves")
            stage.figures |= self.damage()
            conclude(stage)
            self.reshard()
        except RankError as error:
            reason = "; ".join(str(error).splitlines()[:3])
            # `stage.checks` has the checks that were judged before: the first ones of `WANTED`.
            checks_left = list(WANTED)[len(stage.checks) :]
            for name in checks_left:
                self.judge(name, False, reason)

    def kill(self) -> dict[str, Any]:
        """Train until the run kills itself; return the record that it wrote before.

        Raises RankError if the run failed for another reason.
        """
        # The run writes this file just before it kills itself.
        record = self.folder / "kill.json"
        try:
            self.child(self.ranks, "kill")
        except RankError:
            # `child` raises this error after the kill, too. Then the file exists.
            if not record.exists():
                raise
        return read_json(record)

    def restart(self, killed: dict[str, Any]) -> dict[str, float]:
        """Start the killed run again; check how it resumed and ended.

        `killed` is the record of the killed run. Returns the seconds of each phase of the restart.
        """
        # Read the losses now, since the resumed run overwrites the losses of repeated steps.
        losses = losses_of(self.run_dir)
        result = self.child(self.ranks, "train")
        restart = result["restart"]
        if not restart:
            raise RankError(f"the restart found step {STEPS} published, and had nothing to train")
        resume_step = restart["step"]
        # The digests of saved or restored tensors by step. A step is a string here, since it is a
        # key in JSON. If both runs have digests of a step, use those of the resumed run.
        self.saved: dict[str, Digests] = killed["digests"] | result["digests"]
        last = str(STEPS)
        repeated = {step: loss for step, loss in losses.items() if step > resume_step}
        first = Outcome(repeated, killed["digests"][last])
        again = Outcome(losses_of(self.run_dir), self.saved[last])
        problems, same = compare(first, again, self.exact)
        # The run was killed in the save of step STEPS, so the newest checkpoint is the one before.
        if resume_step != STEPS - EVERY:
            problems.append(f"resumed from step {resume_step}, not {STEPS - EVERY}")
        before_kill = killed["digests"].get(str(resume_step), {})
        restored = result["digests"].get(str(resume_step), {})
        wrong_tensors = differing(restored, before_kill)
        about_tensors = wrong_tensors or f"{len(restored)} tensors bit for bit"
        about_steps = "; ".join(problems) or same
        measured = f"step {resume_step}: {about_tensors}; {about_steps}"
        self.judge("roundtrip", not problems and not wrong_tensors, measured)

        # The next check fails for the same problems, and for files left over.
        left = self.left_over()
        if left:
            problems.append(f"left over: {', '.join(left)}")
        good = f"1 kill, in the save of step {STEPS}; {STEPS - resume_step} steps repeated, {same}"
        self.judge("killed_while_saving", not problems, "; ".join(problems) or good)
        return seconds_of(restart, killed["killed_at"])

    def left_over(self) -> list[str]:
        """Return the names that an interrupted save has left next to the checkpoints, sorted."""
        names: list[str] = []
        for path in (self.run_dir / "checkpoints").iterdir():
            if not PUBLISHED.fullmatch(path.name):
                names.append(path.name)
        return sorted(names)

    def damage(self) -> dict[str, Any]:
        """Flip a bit in the newest checkpoint, and restore; return the size and times of saves."""
        newest = max((self.run_dir / "checkpoints").glob("step_????????"))
        sizes = {file: file.stat().st_size for file in newest.iterdir()}
        largest = max(sizes, key=sizes.__getitem__)
        with open(largest, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as content:
            content[len(content) // 2] ^= 1
        result = self.child(self.ranks, "damage")
        # The short run has trained with these settings. If they are refused now, the check fails.
        if "refused" in result:
            raise RankError(result["refused"])
        problems: list[str] = []
        messages = result["messages"]
        if not any("DAMAGED" in text and largest.name in text for text in messages):
            problems.append("no warning names the damaged file")
        if newest.exists():
            problems.append("the checkpoint was not set aside")
        wrong_tensors = differing(result["digests"], self.saved[str(STEPS - EVERY)])
        if wrong_tensors:
            problems.append(wrong_tensors)
        good = "detected and named, checkpoint set aside, previous one restored"
        measured = f"a bit flipped in {largest.name}: {'; '.join(problems) or good}"
        self.judge("corrupt_newest", not problems, measured)
        return {"bytes": sum(sizes.values()), **result["costs"]}

    def reshard(self) -> None:
        """Load the newest checkpoint with other numbers of processes."""
        loaded: list[str] = []
        problems: list[str] = []
        refused: list[str] = []
        if self.why_one:
            refused.append(self.why_one)
        for ranks in other_sizes(self.ranks, self.device.type):
            say(f"loading into {named(ranks, 'process')}")
            result: dict[str, Any] = {}
            reason = refusal(self.stage.config, ranks)
            if not reason:
                result = self.child(ranks, "reload")
                reason = result.get("refused")
            if reason:
                refused.append(f"not by {ranks}: {reason}")
                continue
            wrong_tensors = differing(result["digests"], self.saved[str(result["step"])])
            if wrong_tensors:
                problems.append(f"on {ranks}: {wrong_tensors}")
            # `loaded` is shown only if no number of processes has a problem.
            loaded.append(f"by {ranks} ({len(result['digests'])} tensors bit for bit)")
        if problems:
            measured = "; ".join(problems)
        elif loaded:
            good = f"saved by {self.ranks}, loaded {' and '.join(loaded)}"
            measured = "; ".join([good, *refused])
        else:
            measured = "; ".join(refused)
        # If no other number of processes is allowed, the check is not possible (None).
        passed: bool | None = None
        if loaded:
            passed = not problems
        self.judge("reshard", passed, measured)

    def judge(self, name: str, passed: bool | None, measured: str) -> None:
        """Add a check of `WANTED` to the stage."""
        advice = "" if passed is None else ADVICE[name]
        self.stage.check(name, passed, measured=measured, wanted=WANTED[name], advice=advice)

    def child(self, ranks: int, task: str) -> dict[str, Any]:
        """Run a task of drill.py on this number of ranks, and return its result.

        The project may refuse the settings, for example if a batch is too small for the ranks. If
        the task is "kill" or "train", this then raises UserError. For other tasks, it returns
        {"refused": reason}. Raises RankError if a process fails.
        """
        file = self.folder / f"{task}.json"
        # An earlier call with the same task may have left a result.
        file.unlink(missing_ok=True)
        try:
            result = run_task("drill", self.folder, task, ranks=ranks, seconds=TIMEOUT)
        except RankError:
            # With several ranks, a refusal ends the processes with an error. Before that, rank 0
            # writes the reason to the file.
            result = read_json(file) if file.exists() else {}
            if "refused" not in result:
                raise
        if task in ("kill", "train") and "refused" in result:
            # The settings are at fault. This is not a failed check of checkpoints.
            raise UserError(result["refused"])
        return result


def other_sizes(ranks: int, device: str) -> list[int]:
    """Return numbers of processes other than `ranks` to load with; [] if there can be only one."""
    if ranks == 1:
        return []
    # A CPU can run one more process. More GPUs may not exist, so use half of them.
    another = ranks + 1 if device == "cpu" else ranks // 2
    return sorted({1, another} - {ranks})


def losses_of(run_dir: Path) -> dict[int, float]:
    """Return the losses by step, from metrics.jsonl.

    A loss that was not finite is None, which becomes NaN in an array of floats.
    """
    return {record["step"]: record["loss"] for record in read_records(run_dir)}


def seconds_of(restart: dict[str, float], killed_at: float) -> dict[str, float]:
    """Return the seconds of each phase of a restart, and their "total".

    `restart` has the time at which each phase ended; the first phase starts at `killed_at`.
    """
    seconds: dict[str, float] = {}
    phase_start = killed_at
    for phase in RESTART:
        phase_end = restart[phase]
        seconds[phase] = phase_end - phase_start
        phase_start = phase_end
    # The last phase has ended at `phase_start`.
    seconds["total"] = phase_start - killed_at
    return seconds


def compare(first: Outcome, again: Outcome, exact: bool) -> tuple[list[str], str]:
    """Compare steps that were taken twice; return the problems, and a text about what is the same.

    Losses of `again` at other steps than those of `first` are ignored. If kernels are deterministic
    (`exact`), losses and tensors must be equal. Otherwise only losses count, with a tolerance.
    """
    # `dtype` turns None into NaN.
    losses = np.array([*first.losses.values()], dtype=float)
    losses_again = [again.losses.get(step, math.nan) for step in first.losses]
    largest = differences(losses_again, losses).max()
    wrong_tensors = differing(again.digests, first.digests)
    problems: list[str] = []
    if not np.isfinite(losses).any():
        problems.append("no loss is finite, so that nothing was trained")
    tolerance = 0.0 if exact else NEAR
    if largest > tolerance:
        problems.append(f"losses differ by up to {largest:.0e}, relative")
    if exact and wrong_tensors:
        problems.append(f"at the end {wrong_tensors}")
    same = f"{len(losses_again)} losses bit for bit"
    if largest:
        same = f"{len(losses_again)} losses within {largest:.0e}"
        same += " (--train.deterministic: exactly)"
    if not wrong_tensors:
        same += ", the same tensors at the end"
    return problems, same


def differing(digests: Digests, expected: Digests) -> str:
    """Describe tensors that are missing, new or not equal bit for bit; "" if there are none."""
    # The pairs (name, digest) that only one of the two dictionaries has.
    unequal = digests.items() ^ expected.items()
    names = sorted({name for name, _ in unequal})
    if not names:
        return ""
    return f"{len(names)} tensors differ, such as {names[0]}"


def best_interval(cost: float, failures: float, least: float = 0.0) -> float:
    """Return the optimal seconds between saves (Young, 1974; Daly, 2006).

    `cost` is the seconds of training that a save costs, and `failures` the mean seconds between
    failures. The result is at least `least`, the seconds from a save's start until it is published.
    """
    return max(math.sqrt(2 * cost * failures), least)


def lost_fraction(interval: float, cost: float, restart: float, failures: float) -> float:
    """Return the fraction of time lost to saves, repeated steps and restarts.

    All arguments are seconds: between saves, per save, per restart, and between failures. The
    result is an approximation for small fractions (first order).
    """
    # On average, a failure happens in the middle of an interval, and half an interval is repeated.
    return cost / interval + (interval / 2 + restart) / failures


def conclude(stage: Stage) -> None:
    """Report the costs of saving and restarting, and recommend how often to save."""
    figures = stage.figures
    size = in_units(figures["bytes"])
    say(f"a save of {size} blocks training for {describe(figures['blocked_seconds'])}")
    # Steps are slower while a save is written. This cost includes the slowdown.
    say(f"with slower steps beside it, it costs {describe(figures['cost_seconds'])} of training")
    say(f"it is published after {describe(figures['save_seconds'])}")
    restart = figures["restart_seconds"]
    phases = ", ".join(f"{name} {restart[phase]:.1f}" for phase, name in RESTART.items())
    say(f"from the kill to the next step {restart['total']:.1f} s: {phases}")
    advise_interval(stage)


def advise_interval(stage: Stage) -> None:
    """Recommend how often to save, if the current setting is far from the optimum."""
    config = stage.config
    figures = stage.figures
    step_seconds = figures["step_seconds"]["median"]
    cost = figures["cost_seconds"]["median"]
    # The seconds until a save is published.
    published = figures["save_seconds"]["median"]
    restart = figures["restart_seconds"]["total"]
    hours = config.workflow.hours_between_failures
    failures = 3600 * hours

    best = best_interval(cost, failures, published)
    figures["hours_between_failures"] = hours
    figures["interval_seconds"] = best
    best_steps = max(1, math.ceil(best / step_seconds))
    total_steps = steps_of_run(config)
    # The steps and the seconds between saves with the current setting. With --checkpoint.every 0,
    # the run saves only at the end.
    steps_between = min(config.checkpoint.every or total_steps, total_steps)
    interval = steps_between * step_seconds
    lost = f"{lost_fraction(best, cost, restart, failures):.2%}"
    fraction_now = lost_fraction(interval, cost, restart, failures)
    lost_now = f"{fraction_now:.2%}"
    # `lost_fraction` is an approximation for small fractions, so its result can exceed 1.
    if fraction_now >= 1:
        lost_now = "nearly all"
    often = f"save every {best_steps} steps"
    say(f"with a failure every {hours:g} h, {often}: {lost} of the time is lost")
    # An interval within a factor of two of the best one loses hardly more time.
    if interval >= published and 0.5 <= interval / best <= 2:
        return
    if steps_between == total_steps and best_steps >= total_steps:
        # The current interval and the best one both save only at the end.
        return
    why = f"loses {lost} of the time, instead of {lost_now} now"
    if interval < published:
        between = f"the {steps_between} steps between saves"
        why = f"a save takes longer than {between}, so training waits"
    # Round up to two digits: 490 rather than 487 steps.
    unit = 10 ** max(0, len(str(best_steps)) - 2)
    rounded = math.ceil(best_steps / unit) * unit
    validate_every = config.train.validate_every
    # Whether the run validates before its end.
    validates = 0 < validate_every < total_steps
    if validates and rounded < total_steps:
        # The steps until a save is published.
        least = math.ceil(published / step_seconds)
        rounded = with_validations(rounded, validate_every, least)
    if rounded == config.checkpoint.every:
        return
    if rounded >= total_steps:
        why = f"this run of {total_steps} steps then saves only at its end, and {why}"
    advise(stage, f"--checkpoint.every {rounded}: {why}")
    # The workflow uses the settings that are recommended, but not those that are only advised. A
    # run that validates, but saves only at its end, could not keep its best checkpoint. So do not
    # recommend that.
    if rounded < total_steps or not validates:
        recommend(stage, "checkpoint.every", rounded)


def with_validations(steps: int, validate_every: int, least: int = 1) -> int:
    """Round `steps`, the interval between saves, so that some steps are both saved and validated.

    Only a step that is both validated and saved can be the best checkpoint. The result is the
    nearest multiple or divisor of `validate_every` that is at least `least`. If none is within a
    factor of two of `steps`, the result is `steps`.
    """
    # In ascending order: the divisors, then the two nearest multiples. The lower one may be 0.
    candidates = [each for each in range(1, validate_every) if validate_every % each == 0]
    below = steps // validate_every * validate_every
    candidates += [below, below + validate_every]
    best = steps
    # Start with the limit, a factor of two. If two ratios are equal, the larger interval is used.
    smallest_ratio = 2.0
    for each in candidates:
        if each >= max(1, least):
            ratio = max(each / steps, steps / each)
            if ratio <= smallest_ratio:
                best = each
                smallest_ratio = ratio
    return best


def say(text: str) -> None:
    """Print one line of progress or of a result."""
    print(f"     {text}", flush=True)
