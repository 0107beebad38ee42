"""metrics.jsonl: what is no line is dropped, what a checkpoint has is on the disk before it."""

import json
import math
import multiprocessing
import os
import re
import signal
import tracemalloc
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Project

STEPS = 12


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder, answers = tmp_path_factory.mktemp("metrics"), {"parallelism": "single"}
    answers |= {"checkpoint": "torch_save", "tracker": "none"}
    with Project.imported(folder, "of_metrics", **answers) as project:
        text = "Was ever woman in this humour won? I'll have her; but I will not keep her long. "
        (project.folder / "text.txt").write_text(text * 200)  # several batches to validate on
        yield project


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train(project: Project, run_dir: Path, *callbacks: Any, **changes: Any) -> Any:
    settings = {"run_dir": run_dir, "train.steps": STEPS, "train.log_every": 1}
    settings |= {"train.validate_every": 4, "checkpoint.every": 4, "device": "cpu"}
    settings |= {"data.path": project.folder / "text.txt"}
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    config = project.module("config")
    return project.module("train").run(
        config.override(config.preset("tiny"), settings), [SimpleNamespace(**c) for c in callbacks]
    )


def test_a_metric_may_have_a_count_of_its_own(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean over the part of a batch that it is about, whatever its micro-batches."""
    training, sampling = project.module("train"), project.module("sampling")
    compute, wanted = training.compute_loss, {}

    def with_metrics(model: Any, batch: Any) -> Any:
        tokens = batch["tokens"].long()
        later = tokens[tokens > 110]
        metrics = {"mean": tokens[:, 1:].sum(), "later": (later.sum(), later.numel())}
        return compute(model, batch)._replace(metrics=metrics | {"none": (tokens.sum(), 0)})

    def work_out(state: Any, record: dict[str, Any]) -> None:
        (batch,) = state.loader.of(state.step - 1, sampling.micro_batches(8, 8, 0, 1))
        tokens = batch["tokens"].double()
        values = {"mean": tokens[:, 1:].mean(), "later": tokens[tokens > 110].mean()}
        wanted[state.step] = {name: float(value) for name, value in values.items()}

    for name in ("train", "validation"):
        monkeypatch.setattr(project.module(name), "compute_loss", with_metrics)
    options = {"train__steps": 3, "train__micro_batch_size": 3, "train__validate_every": 0}
    train(project, tmp_path, {"after_step": work_out}, **options)
    for line in lines(tmp_path):
        for name, value in wanted[line["step"]].items():
            assert line[name] == pytest.approx(value, rel=1e-5)
        assert line["none"] is None, "nothing was counted"
    assert lines(tmp_path)[-1]["validation_later"] > 110


# What compute_loss makes of a sound loss, and what is told of it.
ODD_LOSSES: dict[str, tuple[Any, str]] = {
    "a tensor": (lambda loss: loss.total, "expected LossSum, not Tensor"),
    "a loss per sample": (
        lambda loss: loss._replace(total=loss.total * torch.ones(4)),
        r"the total has the shape \(4,\): wanted one number, the sum",
    ),
    "a detached loss": (
        lambda loss: loss._replace(total=loss.total.detach()),
        "the total has no gradient: wanted the sum of the losses",
    ),
    "a number": (
        lambda loss: loss._replace(total=loss.total.item()),
        "the total is a float: wanted a tensor",
    ),
    "a complex loss": (
        lambda loss: loss._replace(total=loss.total * 1j),
        "the total is complex: wanted a real number",
    ),
    "a loss of few digits": (
        lambda loss: loss._replace(total=loss.total.bfloat16()),
        r"the total is bfloat16, which rounds a large sum: compute the loss from logits\.float\(\)",
    ),
    "several counts": (
        lambda loss: loss._replace(count=torch.ones(4)),
        r"the count has the shape \(4,\): wanted one number",
    ),
    "a negative count": (
        lambda loss: loss._replace(count=-3),
        "the count is -3: wanted how many losses the total adds up",
    ),
    "a count that is no number": (
        lambda loss: loss._replace(count=torch.tensor(torch.nan)),
        "the count is nan: wanted how many",
    ),
    "a count of nothing": (
        lambda loss: loss._replace(count=0),
        "the count of a whole batch is 0: wanted how many",
    ),
    "no count": (
        lambda loss: loss._replace(count=None),
        "the count is a NoneType: wanted a number",
    ),
    "a list as a metric": (
        lambda loss: loss._replace(metrics={"right": [1.0, 2.0]}),
        "the metric 'right' is a list: wanted a number",
    ),
    "a triple as a metric": (
        lambda loss: loss._replace(metrics={"right": (1.0, 2.0, 3.0)}),
        "the metric 'right' is a tuple of 3: wanted a sum, or a pair",
    ),
    "a metric per sample": (
        lambda loss: loss._replace(metrics={"right": (torch.ones(4), 4)}),
        r"the sum of the metric 'right' has the shape \(4,\)",
    ),
    "a complex divisor": (
        lambda loss: loss._replace(metrics={"right": (1.0, torch.tensor(1j))}),
        "the divisor of the metric 'right' is complex",
    ),
    "a list of metrics": (
        lambda loss: loss._replace(metrics=[("right", 1.0)]),
        "the metrics are a list: wanted a dict",
    ),
    "a metric with a number as its name": (
        lambda loss: loss._replace(metrics={1: 1.0}),
        "a metric is named 1: wanted text",
    ),
}


@pytest.mark.parametrize("name", ODD_LOSSES)
def test_a_loss_of_a_wrong_kind_is_one_line(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    training = project.module("train")
    compute, (change, told) = training.compute_loss, ODD_LOSSES[name]
    monkeypatch.setattr(training, "compute_loss", lambda *given: change(compute(*given)))
    with pytest.raises(project.module("errors").UserError) as refused:
        train(project, tmp_path / "run")
    said = str(refused.value)
    assert re.match(rf"what compute_loss \(model\.py\) returns: {told}", said), said
    assert "\n" not in said


def test_a_batch_without_anything_to_predict_is_trained_on(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch without a target has the count 0; numbers may be numpy's."""
    training = project.module("train")
    compute, calls = training.compute_loss, []

    def with_targets_later(*given: Any) -> Any:
        calls.append(given)
        loss = compute(*given)
        metrics = {"a": np.float32(1), "b": (torch.tensor(1.0), np.int64(0)), "c": math.nan}
        if len(calls) == 1:
            return loss._replace(total=loss.total * 0, count=0, metrics=metrics)
        return loss._replace(metrics=metrics)

    monkeypatch.setattr(training, "compute_loss", with_targets_later)
    options = {"train__steps": 2, "train__micro_batch_size": 2, "train__validate_every": 0}
    monkeypatch.setattr(project.module("validation"), "compute_loss", with_targets_later)
    assert train(project, tmp_path / "run", **options).step == 2
    assert all(line["skipped_steps"] == 0 for line in lines(tmp_path / "run"))


def test_a_metric_has_a_name_of_its_own(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No figure of the run's, and the same in each batch; else one line names it."""
    training, refused = project.module("train"), project.module("errors").UserError
    train(project, tmp_path / "run", train__steps=4)
    (line,), compute, batches = lines(tmp_path / "run")[-1:], training.compute_loss, []
    metrics: Any = None
    names = line.keys() - {"bits_per_byte"}  # the task's own metric
    assert all(map(project.module("run.journal").FIGURES.fullmatch, names)), names
    assert len(names) > 12

    def with_metrics(model: Any, batch: Any) -> Any:
        batches.append(batch)
        return compute(model, batch)._replace(metrics=metrics(len(batches)))

    monkeypatch.setattr(training, "compute_loss", with_metrics)
    cases = {"the run itself records 'loss'": lambda number: {"loss": 1.0}}
    cases |= {
        "the run itself records 'validation_x'": lambda number: {"x": 1.0, "validation_x": 1.0}
    }
    cases |= {r"same in each batch: now \('b',\), before \('a',\)": lambda n: {"ab"[n > 2]: 1.0}}
    for number, text in enumerate(cases):
        metrics = cases[text]
        batches.clear()
        with pytest.raises(refused, match=text):
            train(project, tmp_path / str(number))


def test_figures_of_callbacks_are_numbers_of_the_validation(
    project: Project, tmp_path: Path
) -> None:
    """They cannot take the place of a training figure."""
    added = {"auc": 0.5, "loss": 0.25, "validation_f1": 0.75}
    calls = {"after_validation": lambda state, figures: figures.update(added)}
    result = train(project, tmp_path / "run", calls, train__steps=4)
    assert result.validation["validation_auc"] == 0.5
    line = lines(tmp_path / "run")[-1]
    assert (line["validation_auc"], line["validation_f1"]) == (0.5, 0.75) and line["loss"] > 1


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((0, 0.0), (3, 3.0), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0)),
        *((torch.tensor(0.25), 0.25), (torch.tensor([4]), 4.0), (Decimal("0.5"), 0.5)),
        *((math.inf, math.inf), (math.nan, math.nan)),
        *((value, None) for value in (None, "0.5", torch.ones(2), np.ones(2), [1.0], {})),
    ],
    ids=repr,
)
def test_a_figure_of_a_callback_is_a_float_or_refused_by_name(
    project: Project, value: Any, number: float | None
) -> None:
    """It is saved, and compared with others, as a float; 0 once made a checkpoint unreadable."""
    figures = project.module("run.journal").validation_figures
    if number is None:
        told = r"metric 'recall' is .*, which is not a number"
        with pytest.raises(project.module("errors").UserError, match=told):
            figures({"recall": value})
        return
    recorded = figures({"recall": value, "validation_loss": 1})
    assert recorded.keys() == {"validation_recall", "validation_loss"}
    assert all(type(figure) is float for figure in recorded.values())
    assert repr(recorded["validation_recall"]) == repr(number)


def test_a_checkpoint_with_a_score_of_zero_is_good(project: Project, tmp_path: Path) -> None:
    """Also one that an earlier release has written, with the whole number 0."""
    none = {"after_validation": lambda state, figures: figures.update(errors=0)}
    changes = {"checkpoint__best": "validation_errors"}
    train(project, tmp_path, none, train__steps=4, **changes)
    path = tmp_path / "checkpoints/step_00000004/manifest.json"
    manifest = json.loads(path.read_text())
    assert str(manifest["score"]) == "['min validation_errors', 0.0]"
    del manifest["digest"]
    manifest["score"][1] = 0
    path.write_bytes(project.module("checkpoint.manifest").sealed(manifest))
    result = train(project, tmp_path, none, train__steps=5, **changes)
    assert result.step == 5 and not [*tmp_path.glob("checkpoints/*damaged*")]
    assert project.module("checkpoint.manifest").verify(path.parent)[1] == []


@pytest.mark.parametrize("peak, flops", [(1e9, 10), (1e9, None), (None, 10)])
def test_the_share_of_the_peak_is_told_where_both_are_known(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    peak: float | None,
    flops: int | None,
) -> None:
    training = project.module("train")
    monkeypatch.setattr(training.hardware, "peak_flops", lambda device: peak)
    monkeypatch.setattr(training.hardware, "forward_flops", lambda *_: flops)
    train(project, tmp_path, train__steps=2, train__validate_every=0)
    for line in lines(tmp_path):
        if peak and flops:  # backward takes twice what forward does
            assert line["mfu"] == pytest.approx(3 * line["samples_per_second"] * flops / peak)
        else:
            assert "mfu" not in line


def test_what_your_callbacks_add_is_in_the_line(project: Project, tmp_path: Path) -> None:
    """They are called before it is written; what is no finite number is null."""

    def add(state: Any, record: dict[str, Any] | None) -> None:
        if record:
            record |= {"mine": state.step / 4, "tensor": torch.tensor(0.5), "odd": float("nan")}
            record["odd_tensor"] = torch.tensor(float("inf"))

    train(project, tmp_path, {"after_step": add}, train__steps=3)
    for step, line in enumerate(lines(tmp_path), 1):
        assert (line["mine"], line["tensor"]) == (step / 4, 0.5)
        assert line["odd"] is line["odd_tensor"] is None


UNREADABLE = {
    "half": b'{"step": 5, "loss"',
    "not text": b'{"step": 5, "loss": "\xff\xfe"}',
    "nested": b'{"step": 5, "loss": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "no object": b"[5]",
    "no step": b'{"loss": 5}',
    "no number": b'{"step": "5"}',
    "not a number": b'{"step": NaN}',
    "zeros": b"\0" * 5000,
    "empty": b"",
}


def test_a_line_that_cannot_be_read_is_dropped(project: Project, tmp_path: Path) -> None:
    """Wherever it stands, the run goes on; the good lines stay."""
    train(project, tmp_path, train__steps=4)
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes().splitlines()
    bad = list(UNREADABLE.values())
    path.write_bytes(b"\n".join([*bad, *good[:2], *bad, *good[2:], *bad]))
    assert train(project, tmp_path).status == "finished"
    assert path.read_bytes().splitlines()[:4] == good
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("step", [8, STEPS])
@pytest.mark.parametrize("again", [False, True], ids=["", "stopped again"])
def test_a_validation_cut_short_is_made_up_for(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, again: bool
) -> None:
    """In the middle and at the last step; once, before the run goes on, also if stopped again."""
    validation, run_dir = project.module("validation"), tmp_path / "stopped"
    undisturbed = train(project, tmp_path / "whole")
    fetch, armed = validation.fetch, False

    def stopping(*arguments: Any, **options: Any) -> Any:
        nonlocal armed
        if armed and len(lines(run_dir)) >= step - 1:
            armed = False
            os.kill(os.getpid(), signal.SIGTERM)
        return fetch(*arguments, **options)

    monkeypatch.setattr(validation, "fetch", stopping)
    for _ in range(1 + again):
        armed = True
        result = train(project, run_dir)
        assert (result.status, result.step, result.validation) == ("preempted", step, {})
        status = json.loads((run_dir / "status.json").read_text())
        assert (status["status"], status["step"]) == ("preempted", step)
        assert len(lines(run_dir)) == step and "validation_loss" not in lines(run_dir)[-1]
    steps = []

    def add(state: Any, figures: dict[str, Any]) -> None:
        figures |= {"own": torch.tensor(0.5), "own_nan": math.nan}

    begun = {"before_step": lambda state: steps.append(len(lines(run_dir)))}
    result = train(project, run_dir, {**begun, "after_validation": add})
    assert steps == list(range(step, STEPS))
    made_up = lines(run_dir)[step - 1]
    assert (made_up["validation_own"], made_up["validation_own_nan"]) == (0.5, None)
    assert result.validation.pop("validation_own") == 0.5
    assert math.isnan(result.validation.pop("validation_own_nan"))
    assert (result.status, result.validation) == ("finished", undisturbed.validation)
    assert json.loads((run_dir / "status.json").read_text())["status"] == "finished"
    for name in ("step", "loss", "validation_loss"):
        whole, stopped = (
            [line.get(name) for line in lines(run)] for run in (tmp_path / "whole", run_dir)
        )
        assert whole == stopped, name
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert train(project, run_dir).status == "already finished"
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_metrics_that_are_cut_back_are_durable(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a resume: the file is synced, renamed, and then its name."""
    names: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        names.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def replaced(source: Any, target: Any) -> None:
        if Path(target).name == "metrics.jsonl":
            assert str(source) in names, "renamed before it was synced"
            names.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    train(project, tmp_path, train__steps=6)
    names.clear()
    train(project, tmp_path, {"before_step": lambda state: names.append("step")})
    assert str(tmp_path) in names[: names.index("step")], "the name is not durable"


def test_a_report_of_many_lines_is_thinned(project: Project, tmp_path: Path) -> None:
    """A few thousand points of each curve, the last validation among them."""
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 30_001):
            record = {"step": step, "loss": 1 / step, "samples_per_second": 9.0}
            record |= {"validation_loss": step / 7} if step % 3 == 0 else {}
            file.write(json.dumps(record) + "\n")
        file.write('{"half\n[1]\n')
    report, notes = project.module("workflow.report"), []
    tracemalloc.start()
    records = report.read_metrics(tmp_path / "metrics.jsonl", notes)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4_000_000, "read as a stream: of a hundred megabytes no more is kept"
    assert 2000 <= len(records) <= 4002 and "2 damaged lines left out" in notes[0]
    assert records == sorted(records, key=lambda record: record["step"])
    assert records[-1]["step"] == 30_000 and records[-1]["validation_loss"] == 30_000 / 7
    page = report.publish_report(tmp_path).read_text("utf-8")
    assert len(page) < 1_000_000 and "4285.7143" in page


def test_each_line_tells_the_memory(project: Project, tmp_path: Path) -> None:
    """Of this process, and of those it started: of these, what they do not share with it."""
    train(project, tmp_path)
    found = [line["host_bytes"] for line in lines(tmp_path)]
    assert len(found) == STEPS and min(found) > 50e6
    memory = project.module("run.hardware")
    before = memory.host_memory()
    ready, go = multiprocessing.Event(), multiprocessing.Event()

    def work(size: int) -> None:
        held = b"x" * size
        ready.set()
        go.wait()
        assert held

    for size in (1, 100 << 20):
        child = multiprocessing.get_context("fork").Process(target=work, args=(size,))
        ready.clear(), go.clear()
        child.start()
        assert ready.wait(60)
        more = memory.host_memory() - before
        go.set()
        child.join()
        assert size <= more < size + before / 2, "what is shared counts once"


def test_a_vector_in_a_record_is_named(project: Project, tmp_path: Path) -> None:
    def add(state: Any, record: dict[str, Any] | None) -> None:
        if record:
            record["histogram"] = torch.ones(3)

    with pytest.raises(project.module("errors").UserError, match="histogram is not one number"):
        train(project, tmp_path, {"after_step": add})


def test_a_record_may_have_a_number_beyond_floats(project: Project) -> None:
    as_line = project.module("run.journal").as_line
    record = {"large": 10**400, "nan": float("nan"), "tensor": torch.tensor(2.0)}
    assert json.loads(as_line(record)) == {"large": 10**400, "nan": None, "tensor": 2.0}


def test_a_run_that_is_stopped_after_a_validation_saves_its_score(
    project: Project, tmp_path: Path
) -> None:
    """The checkpoint of that step is the best one, though no save was due there."""

    def stop(state: Any, figures: dict[str, Any]) -> None:
        if state.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    result = train(project, tmp_path, {"after_validation": stop}, checkpoint__every=0)
    assert (result.status, result.step) == ("preempted", 4)
    manifest = json.loads((tmp_path / "checkpoints/step_00000004/manifest.json").read_text())
    assert manifest["validation_loss"] == pytest.approx(result.validation["validation_loss"])
    assert manifest["score"][1] == manifest["validation_loss"]
    best = project.module("checkpoint.transfer").best_checkpoint
    assert best(tmp_path / "checkpoints").name == "step_00000004"


def test_a_record_has_the_time_of_a_step(project: Project, tmp_path: Path) -> None:
    config = project.config(run_dir=tmp_path, train__steps=10, train__log_every=5)
    project.module("train").run(config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        samples = line["samples_per_second"] * line["step_seconds"]
        assert samples == pytest.approx(config.train.global_batch_size)
