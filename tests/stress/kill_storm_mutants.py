"""Code that breaks a promise of the kill storm, one way each: the storm has to notice it."""

import contextlib
import dataclasses
import importlib
import io
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import kill_storm_pruning, own_code
from .common import Findings
from .mutants import count_mutant
from .storm import ENDS, EVERY, LOST, NEWEST, ORPHANS, STOPPED, WHOLE, Storm, plan_of

OWN, STOP = ", own", "a stop"
NOTICED = "code that breaks one of these promises is detected"


def _lets_orphans_live(package: str) -> None:
    control = importlib.import_module(f"{package}.distributed.world")
    control.die_with_the_launcher = lambda: None


def _restores_no_moments(package: str) -> None:
    checkpointer = importlib.import_module(f"{package}.checkpoint.checkpointer").Checkpointer
    restore = checkpointer.restore

    def forgetful(self, *given: Any, **named: Any) -> int:
        step = restore(self, *given, **named)
        self.optimizer.state.clear()
        return step

    checkpointer.restore = forgetful


def _trains_otherwise(package: str) -> None:
    training = importlib.import_module(f"{package}.train")
    set_rate = training.set_schedule
    training.set_schedule = lambda optimizer, config, step: set_rate(optimizer, config, step + 1)


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


def _sums_otherwise_at_first(package: str) -> None:
    importlib.import_module(f"{package}.distributed.parallel").warm_up = lambda *_: None


def _prunes_in_place(package: str) -> None:
    publisher = importlib.import_module(f"{package}.checkpoint.publish").Publisher

    def in_place(self, path: Path) -> None:
        (path / "manifest.json").unlink()
        time.sleep(0.005)
        shutil.rmtree(path)

    publisher.discard = in_place


def _draws_anew(package: str) -> None:
    sampling = importlib.import_module(f"{package}.sampling")
    seed = sampling.seed_random
    sampling.seed_random = lambda *words, device=None: device and seed(*words, device=device)


def _leaves_buffers_apart(package: str) -> None:
    parallel = importlib.import_module(f"{package}.distributed.parallel")
    parallel.agree_on_buffers = lambda *_: None


def _stops_unsaved(package: str) -> None:
    checkpointer = importlib.import_module(f"{package}.checkpoint.checkpointer").Checkpointer
    save = checkpointer.save

    def seldom(self, step: int, *rest) -> None:
        if step % EVERY == 0:
            save(self, step, *rest)

    checkpointer.save = seldom


BREAKS: dict[Callable[[str], None], tuple[str, str, str]] = {
    _lets_orphans_live: ("ddp_dcp", ORPHANS, "training"),
    _sums_otherwise_at_first: ("ddp_dcp on 3", ENDS, "validating"),
    _restores_no_moments: ("single_dcp", ENDS, "validating"),
    _trains_otherwise: ("single_dcp", WHOLE, "validating"),
    _saves_only_at_the_end: ("single_dcp", LOST, "validating"),
    _overlooks_the_newest: ("single_dcp", NEWEST, "validating"),
    _prunes_in_place: ("single_torch_save", WHOLE, "pruning"),
    _draws_anew: ("single_dcp, own", WHOLE, "validating"),
    _leaves_buffers_apart: ("ddp_dcp, own", WHOLE, "validating"),
    _stops_unsaved: ("single_dcp, own", STOPPED, STOP),
}
"""What is broken; in which variant (of three ranks, or with many checkpoints if they are pruned),
which promise that is of, and the phase to kill in. `own`: with what owners write (own_code.py)."""
IN_FULL = (
    _sums_otherwise_at_first,
    _trains_otherwise,
    _saves_only_at_the_end,
    _overlooks_the_newest,
    _prunes_in_place,
    _leaves_buffers_apart,
    _stops_unsaved,
)


def attempt(findings: Findings, sources: dict[str, Path]) -> None:
    """Break each promise; `findings` counts those that were not noticed."""
    storms: dict[str, Storm] = {}
    for sabotage, (name, promise, phase) in BREAKS.items():
        if findings.bounded and sabotage in IN_FULL:
            continue
        own = Findings(findings.bounded, findings.folder)
        if name not in storms:
            package, _, ranks = name.removesuffix(OWN).partition(" on ")
            plan = plan_of(package, sources[package], int(ranks or 2))
            plan = dataclasses.replace(plan, sabotage=own_code.add if OWN in name else None)
            if phase == "pruning":
                few = Findings(True, findings.folder)
                storms[name] = kill_storm_pruning.thousands(few, Counter(), plan)
            else:
                folder = findings.folder / f"broken_{name}"
                kind = {"stops": True} if OWN in name else {}
                storms[name] = Storm(plan, folder, own, random.Random(0), Counter(), **kind)
        storm = storms[name]
        storm.findings, storm.stops = own, phase == STOP
        storm.target = "launcher" if storm.plan.ranks else "one rank", 0, phase

        def both(package: str, sabotage: Any = sabotage, name: str = name) -> None:
            if OWN in name:
                own_code.add(package)
            sabotage(package)

        storm.plan = dataclasses.replace(storm.plan, sabotage=both)
        noticed = False
        for _ in range(3):  # a kill that comes late, on a busy machine, tells nothing
            with contextlib.redirect_stderr(io.StringIO()):
                storm.kill(1)
            noticed = own.violated(promise)
            if noticed:
                break
        count_mutant(findings, sabotage, noticed, promise=NOTICED)
