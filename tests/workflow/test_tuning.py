"""The search of the baseline: micro-batch sizes, and loader workers where steps wait for data."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Project, project_fixture

project = project_fixture("tuned", workflow="full")


def tried(project: Project, run_dir: Path, **changes: Any) -> Any:
    """The stage after the trial of micro-batch sizes."""
    config = project.config(run_dir=run_dir, **changes)
    stage = project.module("workflow.stage").Stage("baseline", config)
    stage.figures["step_seconds"] = {"median": 0.01}
    state = project.module("train").setup(config)
    project.module("workflow.tuning").try_micro_batches(stage, state)
    assert state.loader.iterator is None, "loader workers were started"
    return stage


def timed_as(project: Project, patch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    """Take a step by each way, and say that it takes so long."""

    def time_interleaved(ways: dict[str, Any], **_: Any) -> dict[str, list[float]]:
        for way in ways.values():
            way(1)
        return {name: 8 * [seconds[name]] for name in ways}

    patch.setattr(project.module("workflow.tuning"), "time_interleaved", time_interleaved)


def test_the_smallest_of_the_fastest_micro_batches_is_recommended(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 16 samples on there is no memory; how long the others take is made up."""
    training, largest = project.module("train"), []
    compute = training.compute_loss

    def limited(model: Any, batch: Any) -> Any:
        largest.append(len(batch["tokens"]))
        if largest[-1] >= 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(model, batch)

    monkeypatch.setattr(training, "compute_loss", limited)
    times = {"1": 0.8, "2": 0.4, "4": 0.2, "8": 0.1}
    timed_as(project, monkeypatch, times)
    sizes = {"train__global_batch_size": 32, "train__micro_batch_size": 4}
    stage = tried(project, tmp_path, **sizes)
    figures, (check,) = stage.figures, stage.checks
    assert figures["recommended"]["train.micro_batch_size"]["value"] == 8
    text = "--train.micro-batch-size 8 (baseline: 2 (2 to 2) times as fast)"
    assert figures["recommended"]["train.micro_batch_size"]["text"] == text
    assert set(largest) == {1, 2, 4, 8, 16}
    assert sorted(figures["micro_batch"]["median_step_seconds"]) == [1, 2, 4, 8]
    assert set(figures["micro_batch"]["peak_memory_bytes"]) == {1, 2, 4, 8}
    assert check["measured"].startswith("1: 40 ")
    why = "--train.micro-batch-size 16: OutOfMemoryError: CUDA out of memory"
    assert check["measured"].endswith(f"; {why}")
    assert why in figures["rejected"]
    slower = "--train.micro-batch-size 2: slower, 0.5 (0.5 to 0.5) times as fast"
    assert slower in figures["rejected"]
    times["4"] = 0.102  # as good as the best within 3 %, and smaller
    stage = tried(project, tmp_path, **sizes)
    assert stage.figures["micro_batch"]["best"] == 4 and "recommended" not in stage.figures


def test_little_free_memory_stops_only_larger_micro_batches(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project.module("workflow.tuning"), "free_host_memory", lambda: 1000)
    timed_as(project, monkeypatch, {"1": 0.8, "2": 0.4, "4": 0.2})
    stage = tried(project, tmp_path, train__global_batch_size=32, train__micro_batch_size=4)
    (check,) = stage.checks
    assert sorted(stage.figures["micro_batch"]["peak_memory_bytes"]) == [1, 2, 4]
    assert check["measured"].endswith("; larger sizes not tried: only 1 kB are free")


def test_sizes_go_up_to_the_global_batch_as_time_allows(project: Project) -> None:
    tuning = project.module("workflow.tuning")
    assert tuning.sizes_to_try(4, 48, 0.01) == [4, 1, 2, 8, 16, 32, 48]
    assert tuning.sizes_to_try(1, 1, 0.01) == [1]
    assert tuning.sizes_to_try(16, 16, 0.01) == [16, 4, 8]
    assert tuning.sizes_to_try(4, 48, 4.0) == [4, 8]
    assert tuning.sizes_to_try(4, 48, 100.0) == []


def test_loader_workers_that_end_the_wait_let_the_gate_pass(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch takes 50 ms to read; how long steps take with workers is made up."""
    import numpy as np

    sampling, tuning = project.module("sampling"), project.module("workflow.tuning")
    timing, read, waited = project.module("workflow.timing"), sampling.fetch, 0.0

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return read(*arguments, **options)

    def time_interleaved(ways: dict[str, Any], multiple: int = 1) -> dict[str, list[float]]:
        return {name: 8 * [seconds[name] if multiple > 1 else 1.0] for name in ways}

    def waiting(state: Any, steps: int) -> Any:
        return timing.Steps(np.zeros(steps), np.ones(steps), np.full(steps, waited))

    monkeypatch.setattr(project.module("workflow.baseline"), "MEASURED", 4)
    monkeypatch.setattr(sampling, "fetch", slow)
    monkeypatch.setattr(tuning, "time_interleaved", time_interleaved)
    monkeypatch.setattr(tuning, "record_steps", waiting)
    monkeypatch.setattr(tuning, "usable_cores", lambda: 1)
    config = project.config(run_dir=tmp_path, train__steps=20)
    for seconds, waited, status, value in (  # noqa: B007
        ({"0": 2.0, "2": 1.02, "4": 1.0}, 0.01, "pass", 2),
        ({"0": 2.0, "2": 1.5, "4": 0.9}, 0.5, "fail", 4),
        ({"0": 1.0, "2": 1.0, "4": 1.0}, 0.01, "fail", None),
    ):
        tuning.measure(config)
        content = project.module("workflow.chain").read_stage(tmp_path, "baseline")
        (check,) = (check for check in content["checks"] if check["name"] == "data_wait")
        found = content["figures"].get("recommended", {}).get("train.loader_workers", {})
        assert (check["status"], found.get("value")) == (status, value), check
        assert value is None or check["measured"].startswith(f"{waited:.1%} of the time")
        rejected = [line for line in content["figures"]["rejected"] if "loader-workers" in line]
        assert len(rejected) == (2 if value is None else 1)


def test_workers_to_try_follow_from_the_wait(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = project.module("workflow.tuning")
    for given, waited, cores, counts in (
        (0, 0.1, 2, {1, 2}),
        (0, 0.7, 2, {2, 4}),
        (0, 0.97, 2, {2, 4}),
        (0, 0.97, 16, {16, 32}),
        (2, 0.5, 8, {4}),
        (64, 0.5, 8, None),
    ):
        tried = None

        def time_interleaved(ways: dict[str, Any], multiple: int) -> dict[str, list[float]]:
            nonlocal tried
            tried = set(map(int, ways)) - {given}  # noqa: B023
            assert not any(multiple % max(1, count) for count in map(int, ways))
            return {name: 8 * [1.0] for name in ways}

        monkeypatch.setattr(tuning, "time_interleaved", time_interleaved)
        monkeypatch.setattr(tuning, "usable_cores", lambda: cores)  # noqa: B023
        config = project.config(run_dir=tmp_path, train__loader_workers=given)
        stage = project.module("workflow.stage").Stage("baseline", config)
        stage.figures["step_seconds"] = {"median": 0.001}
        state = project.module("train").setup(config)
        assert tuning.try_loader_workers(stage, state, waited) is None
        assert tried == counts, (given, waited, cores)
    # Steps that take a second are not tried by sixteen at a time.
    assert tuning.workers_to_try(0, 0.97, 1.0, torch.device("cpu")) == [1, 2]
    assert tuning.workers_to_try(0, 0.97, 10.0, torch.device("cpu")) == []


def test_data_that_loader_workers_cannot_read_is_no_crash(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning, sampling = project.module("workflow.tuning"), project.module("sampling")
    fetch, here = sampling.fetch, os.getpid()

    def only_here(*arguments: Any, **options: Any) -> Any:
        if os.getpid() != here:
            raise OSError("this cannot be read\nfrom another process")
        return fetch(*arguments, **options)

    monkeypatch.setattr(sampling, "fetch", only_here)
    config = project.config(run_dir=tmp_path)
    stage = project.module("workflow.stage").Stage("baseline", config)
    stage.figures["step_seconds"] = {"median": 0.001}
    assert tuning.try_loader_workers(stage, project.module("train").setup(config), 0.5) is None
    first, second = stage.figures["rejected"]
    assert first.startswith("--train.loader-workers 1: OSError") and "2: OSError" in second


def test_a_declared_loss_keeps_its_micro_batches(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With others it would be another loss, however fast."""
    tuning = project.module("workflow.tuning")
    monkeypatch.setattr(tuning, "need_not_add_up", lambda: True)
    monkeypatch.setattr(
        tuning, "time_interleaved", lambda ways: {name: 8 * [1 / int(name)] for name in ways}
    )
    sizes = {"train__global_batch_size": 8, "train__micro_batch_size": 2}
    config = project.config(run_dir=tmp_path, **sizes)
    stage = project.module("workflow.stage").Stage("baseline", config)
    stage.figures["step_seconds"] = {"median": 0.001}
    state = project.module("train").setup(config)
    tuning.try_micro_batches(stage, state)
    assert stage.figures["micro_batch"]["best"] == 2 and "recommended" not in stage.figures
    assert any("8: it changes the loss" in line for line in stage.figures["rejected"])
