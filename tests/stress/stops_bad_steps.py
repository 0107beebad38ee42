"""Numbers that go wrong: a part of tests.stress.stops, mostly within this process."""

import contextlib
import json
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .common import Findings
from .jobs import Render, started

NAMED = "a run that stops at a bad step names exactly its samples"
CLEAN = "a skipped step leaves no trace in weights, optimizer state or buffers"
PUBLISHED = "a non-finite state is never published as a checkpoint"
TOGETHER = "all ranks stop at the same bad step"
SHORT = ("--train.steps", "20", "--train.log-every", "1")


def attempt(findings: Findings, render: Render) -> None:
    """Samples whose loss or gradient is not finite, and states that are not."""
    draw = random.Random(0)
    for case in range(2 if findings.bounded else 12):
        step = draw.randrange(3, 18) if case else 10  # at which there is a save, too
        count = draw.choice([1, 2, 3])
        poisoned(findings, render, f"poison-{case}", step, count, case % 2 == 0, draw)
    for what in ("weight", "moment", "buffer"):
        published(findings, render, what, math.nan)
    for what in () if findings.bounded else ("weight", "buffer"):
        for value in (math.inf, -math.inf):
            published(findings, render, what, value)


def poisoned(
    findings: Findings,
    render: Render,
    run: str,
    step: int,
    count: int,
    in_loss: bool,
    draw: random.Random,
) -> None:
    """Some samples of one batch are bad: skipped, nothing of them stays; or stopped, and named."""
    named, clean = findings.tally(NAMED, "samples"), findings.tally(CLEAN, "steps")
    ids = _batch(render, step)
    bad = sorted(draw.sample(ids, count))
    with poison(render, set(bad), in_loss):
        states: dict[int, dict[str, torch.Tensor]] = {}

        def keep(state: Any, record: Any) -> None:
            if state.step in (step - 1, step):
                tensors = dict(_tensors(render, state))
                states[state.step] = {k: v.clone() for k, v in tensors.items()}

        result = run_here(render, f"{run}-skip", keep, *SHORT)
        before, after = states[step - 1], states[step]
        differing = [n for n in before if not torch.equal(before[n], after[n])]
        skipped = sum(r["skipped_steps"] for r in _records(render, f"{run}-skip"))
        right = result == "finished" and not differing and skipped == 1
        clean.count(None if right else f"{result}, {skipped} skipped, changed: {differing[:3]}")

        result = run_here(render, f"{run}-stop", None, *SHORT, **{"train.on_bad_step": "stop"})
        shown = ", ".join(str(i) for i in ids if i in bad)
        told = f"step {step} is not finite; each of the samples {shown} causes it." in result
        at, _, problems = render.checkpoint(f"{run}-stop")
        for _ in bad:
            named.count(None if told and at < step and not problems else f"{bad}: {result}")


def published(findings: Findings, render: Render, what: str, value: float) -> None:
    """A state that is not finite, however it came about, is not published; a mask may be -inf."""
    tally = findings.tally(PUBLISHED, "states")
    run = f"published-{what}-{value}"

    def spoil(state: Any, record: Any) -> None:
        if state.step == 12:
            tensors = dict(_tensors(render, state))
            name = next(n for n in tensors if _kind(n, state) == what)
            tensors[name].view(-1)[-1] = value

    with poison(render, set(), True):  # for its buffer
        outcome = run_here(render, run, spoil, *SHORT)
    newest, _, problems = render.checkpoint(run)
    if what == "buffer" and math.isinf(value):
        right = outcome == "finished" and newest == 20
    else:
        right = "NaN or infinite values" in outcome and newest == 10
    good = right and not problems
    tally.count(None if good else f"{what} {value}: {outcome}, newest {newest} {problems}")


def on_ranks(findings: Findings, renders: list[Render]) -> None:
    """Two ranks, of which one meets the bad sample, stop at the same step and tell the same."""
    tally = findings.tally(TOGETHER, "jobs")
    for render in renders:
        for step, place in ((5, 0), (8, 7)):
            bad = _batch(render, step)[place]
            faults = {"poison": bad}
            run = f"ranks-{step}"
            options = ("--train.on-bad-step", "stop")
            with started(render, 2, run, *options, faults=faults, MAX_RESTARTS="0") as job:
                job.end(120)
                told = f"step {step} is not finite; each of the samples {bad} causes it."
                right = told in job.output and job.process.returncode
                tally.count(None if right else job.output[-3000:])


@contextlib.contextmanager
def poison(render: Render, bad: set[int], in_loss: bool) -> Iterator[None]:
    """These samples have a loss, or only a gradient, that is not finite; a buffer sees it too."""
    sampling, training = render.module("sampling"), render.module("train")
    fetch, loss, build = sampling.fetch, training.compute_loss, training.build_model

    def fetch_marked(dataset: Any, ids: Any, *keys: Any, **options: Any) -> Any:
        batch = fetch(dataset, ids, *keys, **options)
        return batch | {"bad": torch.tensor([i in bad for i in ids.tolist()])}

    def compute_marked(model: Any, batch: Any) -> Any:
        marked = batch.pop("bad", None)
        found = loss(model, batch)
        if model.training and marked is not None:
            wrong = torch.full((), torch.nan) if marked.any() else torch.zeros(())
            model.running.mul_(0.9).add_(found.total.detach() + wrong)
            if marked.any():
                weight = next(model.parameters())
                odd = wrong if in_loss else (weight.sum() * 0).abs().sqrt()
                found = found._replace(total=found.total + odd)
        return found

    def build_running(*arguments: Any) -> Any:
        model = build(*arguments)
        model.register_buffer("running", torch.zeros(()))
        return model

    with (
        mock.patch.object(sampling, "fetch", fetch_marked),
        mock.patch.object(training, "compute_loss", compute_marked),
        mock.patch.object(training, "build_model", build_running),
    ):
        yield


def run_here(render: Render, run: str, observer: Any, *options: str, **changes: Any) -> str:
    """How a run in this process ended, or in what words it failed."""
    config, errors = render.module("config"), render.module("errors")
    ground = {"device": "cpu", "run_dir": render.run_dir(run), "train.steps": 60}
    ground |= {"data.path": render.folder / "text.txt"} | changes
    for name, value in zip(options[::2], options[1::2], strict=True):
        ground[name.removeprefix("--").replace("-", "_")] = int(value)
    settings = config.override(config.preset("tiny"), ground)
    callbacks = [SimpleNamespace(after_step=observer)] if observer else []
    try:
        return str(render.module("train").run(settings, callbacks).status)
    except (errors.UserError, errors.RankError) as error:
        return str(error)


def _tensors(render: Render, state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return render.module("checkpoint.tensors").flat(state.checkpointer.tensors())


def _kind(name: str, state: Any) -> str:
    if name.startswith("optimizer."):
        return "step" if name.endswith(".step") else "moment"
    parameters = dict(state.model.named_parameters())
    return "weight" if name.removeprefix("model.") in parameters else "buffer"


def _batch(render: Render, step: int) -> list[int]:
    """The ids of the batch of a step (counted from 1), in a run of these settings."""
    config, data = render.module("config"), render.module("data")
    changes = {"data.path": render.folder / "text.txt"}
    settings = config.override(config.preset("tiny"), changes)
    train, _, _ = data.build_datasets(settings)
    order = render.module("sampling").GlobalBatches(len(train), 8, settings.train.seed)
    return order.ids(step - 1).tolist()


def _records(render: Render, run: str) -> list[dict[str, Any]]:
    lines = (render.run_dir(run) / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]
