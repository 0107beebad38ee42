"""Code that breaks a promise of the kill storm, one way each: the storm has to notice it."""

import contextlib
import dataclasses
import importlib
import io
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from .common import Findings
from .storm import ENDS, LOST, NEWEST, ORPHANS, WHOLE, Storm, plan_of

NOTICED = "A template that breaks one of these promises is found out"


def _lets_orphans_live(package: str) -> None:
    control = importlib.import_module(f"{package}.distributed.world")
    control.die_with_the_launcher = lambda: None


def _restores_no_moments(package: str) -> None:
    checkpointer = importlib.import_module(f"{package}.checkpoint.checkpointer").Checkpointer
    restore = checkpointer.restore

    def forgetful(self) -> int:
        step = restore(self)
        self.optimizer.state.clear()
        return step

    checkpointer.restore = forgetful


def _trains_otherwise(package: str) -> None:
    training = importlib.import_module(f"{package}.train")
    set_rate = training.set_learning_rate
    training.set_learning_rate = lambda optimizer, config, step: set_rate(
        optimizer, config, step + 1
    )


def _saves_only_at_the_end(package: str) -> None:
    publisher = importlib.import_module(f"{package}.checkpoint.publish").Publisher
    publish = publisher.publish

    def lazy(self, step: int, write, facts) -> None:
        if step == facts["schedule"]["steps"]:
            publish(self, step, write, facts)

    publisher.publish = lazy


def _overlooks_the_newest(package: str) -> None:
    publish = importlib.import_module(f"{package}.checkpoint.publish")
    published = publish.published
    publish.published = lambda directory: published(directory)[:-1]


BREAKS: dict[Callable[[str], None], tuple[str, str, str]] = {
    _lets_orphans_live: ("ddp_dcp", ORPHANS, "training"),
    _restores_no_moments: ("single_dcp", ENDS, "validating"),
    _trains_otherwise: ("single_dcp", WHOLE, "validating"),
    _saves_only_at_the_end: ("single_dcp", LOST, "validating"),
    _overlooks_the_newest: ("single_dcp", NEWEST, "validating"),
}
"""What is broken; in which variant, which promise that is of, and the phase to kill in."""


def attempt(findings: Findings, sources: dict[str, Path]) -> None:
    """Break each promise; `findings` counts those that were not noticed."""
    storms: dict[str, Storm] = {}
    for sabotage, (name, promise, phase) in BREAKS.items():
        own = Findings(findings.bounded, findings.folder)
        if name not in storms:
            plan = plan_of(name, sources[name])
            folder = findings.folder / f"broken_{name}"
            storms[name] = Storm(plan, folder, own, random.Random(0), Counter())
        storm = storms[name]
        storm.findings, storm.target = (
            own,
            ("launcher" if storm.plan.ranks else "one rank", 0, phase),
        )
        storm.plan = dataclasses.replace(storm.plan, sabotage=sabotage)
        noticed = False
        for _ in range(3):  # a kill that comes late, on a busy machine, tells nothing
            with contextlib.redirect_stderr(io.StringIO()):
                storm.kill(1)
            if noticed := any(it.violations for it in own.tallies if it.promise == promise):
                break
        problem = None if noticed else f"nothing was noticed of {sabotage.__name__}"
        findings.tally(NOTICED, "ways to break one").count(problem)
