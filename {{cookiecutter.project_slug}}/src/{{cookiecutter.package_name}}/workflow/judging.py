"""What the restore drill found, against the run that nothing has disturbed: its four checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

from . import timing as measuring
from .drill import EVERY, STEPS, Digests
from .killing import MOMENTS, Killing
from .stage import Stage

NEAR = 1e-3  # of losses by kernels that are not deterministic, relative


@dataclass(frozen=True)
class Undisturbed:
    """The run that the others are compared with."""

    losses: dict[int, float]
    middle: Digests
    """At its last save but one."""
    end: Digests
    exact: bool
    """Whether the same steps give the same bits on this device, with these settings."""

    def same_losses(self, found: Sequence[float]) -> tuple[bool, str]:
        """Compare the losses of its last steps, however many were found; and in words."""
        expected = [self.losses[step] for step in sorted(self.losses)][-len(found) :]
        far = measuring.differences(found, expected).max()
        if not far:
            return True, f"{len(found)} losses the same to the bit"
        if not self.exact and far < NEAR:
            return True, f"{len(found)} losses within {far:.0e} (--train.deterministic: to the bit)"
        return False, f"losses differ by up to {far:.0e}, relative"

    def same_end(self, found: Digests) -> tuple[bool, str]:
        """Compare the final tensors; where the same steps may give other bits there is no telling.

        Then the losses alone have to do.
        """
        differing = differences(found, self.end)
        if differing and self.exact:
            return False, f"in the end {in_words(differing)}"
        return True, "" if differing else "the same tensors in the end"


def differences(found: Digests, expected: Digests) -> list[str]:
    """The names of tensors that are not the same to the bit, or not there."""
    names = found.keys() | expected.keys()
    return sorted(name for name in names if found.get(name) != expected.get(name))


def in_words(differing: list[str]) -> str:
    """Some of them, by name."""
    return f"{len(differing)} tensors differ, such as {differing[0]}"


def judge_roundtrip(stage: Stage, found: dict[str, Any], truth: Undisturbed) -> None:
    """Restored into fresh processes: the same tensors, then the same steps."""
    differing = differences(found["restored"], truth.middle)
    same_losses, losses = truth.same_losses(found["losses"])
    same_end, end = truth.same_end(found["after"])
    tensors = f"{len(truth.middle)} tensors the same to the bit"
    parts = [in_words(differing) if differing else tensors, losses, end]
    if found["step"] != STEPS - EVERY:
        parts.insert(0, f"it came back at step {found['step']}, not {STEPS - EVERY}")
    stage.check(
        "roundtrip",
        not differing and same_losses and same_end and found["step"] == STEPS - EVERY,
        measured="; ".join(filter(None, parts)),
        wanted="model and optimizer bit for bit, and the steps behind them",
        advice="look for state that is in no parameter and no persistent buffer, and for random "
        "numbers that do not come from torch's generators",
    )


def judge_reshard(
    stage: Stage,
    saved_by: int,
    loads: list[tuple[int, dict[str, Any]]],
    truth: Undisturbed,
    why_one: str,
) -> None:
    """Loaded by other world sizes, one after the other, each from what the one before saved.

    `saved_by` is 0 where there can be but one process; `why_one` says why.
    """
    loaded = [(ranks, found["digests"]) for ranks, found in loads if "digests" in found]
    refused = [
        f"{ranks} cannot: {found['refused']}" for ranks, found in loads if "refused" in found
    ]
    wrong = [
        f"on {ranks}: {in_words(differing)}"
        for ranks, digests in loaded
        if (differing := differences(digests, truth.end))
    ]
    others = any(ranks != saved_by for ranks, _ in loaded)
    if not saved_by:
        measured = why_one
    elif not others:
        measured = "; ".join(refused)
    else:
        chain = " -> ".join(map(str, (saved_by, *(ranks for ranks, _ in loaded))))
        text = "; ".join(wrong) or f"{len(truth.end)} tensors the same to the bit"
        measured = "; ".join([f"{chain} processes: {text}", *refused])
    stage.check(
        "reshard",
        not wrong if saved_by and others else None,
        measured=measured,
        wanted="the same tensors whatever the number of processes",
        advice="look for tensors whose shape or content depends on the number of ranks"
        if wrong
        else "",
    )


def judge_flips(stage: Stage, flips: list[dict[str, Any]], truth: Undisturbed) -> None:
    """A flipped bit: noticed, named, set aside, and the checkpoint before it used."""
    problems = []
    for flip in flips:
        if flip["problem"]:
            problem = flip["problem"]
        elif flip["step"] != STEPS - EVERY:
            problem = f"not noticed, restored step {flip['step']}"
        elif differing := differences(flip["digests"], truth.middle):
            problem = f"fell back, but {in_words(differing)}"
        elif not flip["named"]:
            problem = "noticed, but no warning names the file"
        elif not flip["set_aside"]:
            problem = "noticed, but the checkpoint was not set aside"
        else:
            continue
        problems.append(f"{flip['file']}, byte {flip['place']:,}: {problem}")
    files = len({flip["file"] for flip in flips})
    good = f"{len(flips)} bits of {files} files: each noticed, named, set aside, gone back from"
    stage.check(
        "corrupt_newest",
        bool(flips) and not problems,
        measured="; ".join(problems) or good,
        wanted="a damaged checkpoint is never loaded, the one before it is",
        advice="restore only what its manifest and every hash confirm (checkpoint/manifest.py)",
    )


def judge_kills(stage: Stage, found: Killing, truth: Undisturbed) -> None:
    """Killed in a save: on from the newest published checkpoint, to the same end."""
    problems = []
    for kill in found.kills:
        where = f"killed in the save of step {kill.saving}, {kill.moment}"
        if kill.restart["step"] != kill.newest:
            problems.append(f"{where}: went on from step {kill.restart['step']}, not {kill.newest}")
        if kill.saving - kill.newest > EVERY:
            problems.append(f"{where}: the newest checkpoint is of step {kill.newest}")
    words = ""
    for end in found.ends:
        losses = [end.losses.get(step, nan) for step in sorted(truth.losses)]
        same_losses, words = truth.same_losses(losses)
        same_end, last = truth.same_end(end.digests)
        problems += [text for same, text in ((same_losses, words), (same_end, last)) if not same]
        if end.leftovers:
            problems.append(f"left over: {', '.join(end.leftovers)}")
    inside = [kill for kill in found.kills if kill.moment != MOMENTS[-1]]
    good = (
        f"{len(found.kills)} kills ({', '.join(kill.moment for kill in found.kills)}), at most "
        f"{max((kill.lost for kill in found.kills), default=0)} steps done again, {words}"
    )
    if missing := len(MOMENTS) - len({kill.moment for kill in found.kills}):
        good += f"; {missing} moments were not met"
    none = f"no kill met a save in {found.launches} launches: they are too short here"
    stage.check(
        "killed_while_saving",
        False if problems else True if inside else None,
        measured="; ".join(problems) or (good if inside else none),
        wanted="no more than one save lost, the same end, nothing left over",
        advice="publish by one rename, when all of it is on disk (checkpoint/publish.py)"
        if problems
        else "",
    )
