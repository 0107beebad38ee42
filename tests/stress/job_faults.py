"""Copied into a render by jobs.py: makes moments last, so that they can be hit, or for ever.

JOB_FAULTS in the environment says what, as JSON: "at" a moment ("start-up", "validation", "save",
"step"), touch the file "mark" and wait for "seconds" (0: loop for ever; none: until a stop signal
is heard, or the mark's namesake with .go is there), though not before "step", only on "rank", and
each time or "once". That rank may also take the folder "own_disk" for its working directory, as if
it were on another machine. "patience": seconds in place of PHASE_LIMIT. "poison": a sample whose
loss is not finite. "worker": what a loader worker does at its batch "step": it "hangs", "dies", or
makes a batch that "cannot be sent". "deaf": stop signals are not heard, which is to be noticed.
"""

import importlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from . import callbacks, sampling, validation
from .checkpoint import publish
from .distributed import stop

HEARD: list[tuple[Any, ...]] = []


def arm(training: Any) -> None:
    """Do as JOB_FAULTS says to the module of the loop."""
    what = json.loads(os.environ.get("JOB_FAULTS", "{}"))
    callbacks.Sample.length = 2  # tokens; more take longer than all that is tried
    stop.Stop._handle = hearing(stop.Stop._handle, what.get("deaf"))
    if "patience" in what:
        watchdog = importlib.import_module(f"{__package__}.distributed.watchdog")
        watchdog.PHASE_LIMIT = timedelta(seconds=what["patience"])
    if "poison" in what:
        sampling.fetch = poisoned(sampling.fetch, what["poison"])
        training.compute_loss = spoiled(training.compute_loss)
    if what.get("rank", 0) != int(os.environ.get("RANK", "0")):
        return
    if "own_disk" in what:
        os.chdir(what["own_disk"])
    if "worker" in what:
        build = training.build_datasets
        training.build_datasets = lambda config: (Failing(build(config), what), *build(config)[1:])
    places: dict[str, tuple[Any, str]] = {
        "start-up": (training, "resume"),
        "validation": (validation, "fetch"),
        "save": (publish.Publisher, "publish"),
        "step": (training, "train_step"),
    }
    if "at" in what:
        holder, name = places[what["at"]]
        make = lingering_saves if what["at"] == "save" else linger
        setattr(holder, name, make(getattr(holder, name), what))


def linger(function: Callable[..., Any], what: dict[str, Any]) -> Callable[..., Any]:
    """The function, but it takes its time."""

    def lingering(*arguments: Any, **named: Any) -> Any:
        mark = Path(what["mark"])
        over = what.get("once") and mark.exists()
        if getattr(arguments[0], "step", 0) >= what.get("step", 0) and not over:
            mark.touch()
            if "seconds" not in what:
                wait_for_a_signal(mark)
                return function(*arguments, **named)
            time.sleep(what["seconds"])
            while not what["seconds"]:
                sum(range(1000))  # as a mistake in a model would
        return function(*arguments, **named)

    return lingering


def lingering_saves(publish: Callable[..., Any], what: dict[str, Any]) -> Callable[..., Any]:
    """Saves, but between their beginning and what a rank writes it takes its time."""

    def publishing(self: Any, step: int, write: Callable[..., Any], facts: Any) -> Any:
        return publish(self, step, linger(write, what), facts)

    return publishing


class Failing:
    """Samples of training data, and a loader worker that fails at one of its batches."""

    draws = False

    def __init__(self, built: tuple[Any, ...], what: dict[str, Any]) -> None:
        self.samples, self.what, self.batches = built[0], what, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, numbers: list[int]) -> dict[str, Any]:
        batch = self.samples.__getitems__(numbers)
        self.batches += multiprocessing.parent_process() is not None
        if self.batches == self.what["step"]:
            Path(self.what["mark"]).touch()
            if self.what["worker"] == "cannot be sent":
                return batch | {"more": lambda: None}
            if self.what["worker"] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1e6)
        return batch


def hearing(handle: Callable[..., None], deaf: bool) -> Callable[..., None]:
    """The handler of stop signals, noting that there was one."""

    def noting(*arguments: Any) -> None:
        HEARD.append(arguments)
        if not deaf:
            handle(*arguments)

    return noting


def wait_for_a_signal(mark: Path) -> None:
    """Until one has come, to this process or (says who sent it) to another."""
    deadline = time.monotonic() + 60
    while not HEARD and not mark.with_suffix(".go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def poisoned(fetch: Callable[..., Any], bad: int) -> Callable[..., Any]:
    """Batches say whether they have the sample."""

    def marked(dataset: Any, ids: Any, *keys: Any, **options: Any) -> Any:
        batch = fetch(dataset, ids, *keys, **options)
        return batch | {"bad": torch.tensor([bad in ids.tolist()])}

    return marked


def spoiled(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of a batch that has it is not finite."""

    def spoiling(model: Any, batch: Any) -> Any:
        found = compute_loss(model, batch)
        odd = torch.nan if model.training and batch.get("bad", torch.zeros(1)).any() else 1.0
        return found._replace(total=found.total * odd)

    return spoiling
