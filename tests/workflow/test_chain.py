"""The chain: what a stage recommends reaches the stages after it, and the sum is measured."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Project, project_fixture

project = project_fixture("chained")


def finished(project: Project, config: Any, name: str, passed: bool = True, **found: Any) -> Path:
    """A stage that recommends settings, as in train__loader_workers=2."""
    stages, chain = project.module("workflow.stage"), project.module("workflow.chain")
    stage = stages.Stage(name, config)
    for setting, value in found.items():
        times = project.module("workflow.turns").Interval(1.2, 1.1, 1.3)
        chain.recommend(stage, setting.replace("__", "."), value, times)
    stage.check("c", passed, measured="so", wanted="such")
    stage.close()
    return stages.stage_file(config.directory, name)


def test_a_stage_goes_on_from_those_before_it(project: Project, tmp_path: Path) -> None:
    chain, override = project.module("workflow.chain"), project.module("config").override
    given = project.config(run_dir=tmp_path)
    finished(project, given, "baseline", train__micro_batch_size=4, checkpoint__every=7)
    assert chain.go_on(given, "baseline", set()) == (given, [])
    loaded = override(given, {"train.micro_batch_size": 4, "checkpoint.every": 7})
    config, links = chain.go_on(given, "compile", set())
    assert config == loaded and [link.stage for link in links] == ["baseline"] * 2
    assert str(links[0]) == "--train.micro-batch-size 4 (baseline: 1.2 (1.1 to 1.3) times as fast)"
    # A stage measured on other settings than it would go on from now counts for nothing.
    finished(project, given, "compile", compile__mode="full")
    assert chain.go_on(given, "profile", set())[0] == loaded
    finished(project, loaded, "compile", compile__mode="full")
    whole = override(loaded, {"compile.mode": "full"})
    assert chain.go_on(given, "profile", set())[0] == chain.go_on(given, "", set())[0] == whole
    assert chain.go_on(override(given, {"train.seed": 5}), "", set())[1] == []


def test_what_is_typed_stays(project: Project, tmp_path: Path) -> None:
    chain, given = project.module("workflow.chain"), project.config(run_dir=tmp_path)
    finished(project, given, "baseline", train__micro_batch_size=4, checkpoint__every=7)
    file = tmp_path / "own.toml"
    file.write_text("[train]\nmicro-batch-size = 8\n")
    for words in (
        ["--train.micro-batch-size", "8"],
        ["--train.micro_batch_size=8"],
        ["--config", str(file)],
        [f"--config={file}", "--fresh"],
    ):
        config, links = chain.go_on(given, "compile", chain.typed_settings(["compile", *words]))
        assert config.train.micro_batch_size == given.train.micro_batch_size
        assert [link.setting for link in links] == ["checkpoint.every"]


def test_a_stage_that_is_typed_goes_on_but_not_under_torchrun(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """There each rank would decide for itself, by files that may be different ones."""
    words = ("--run-dir", str(tmp_path), "--data.path", str(project.folder / "text.txt"))
    measured: list[Any] = []
    profile = project.module("workflow.profile")
    monkeypatch.setattr(profile, "measure", lambda config: measured.append(config) or 0)
    given = project.config(run_dir=tmp_path)
    finished(project, given, "baseline", train__micro_batch_size=2)
    for ranks, size in (("1", 2), ("2", given.train.micro_batch_size)):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        capsys.readouterr()
        project("profile", "--preset", "tiny", "--device", "cpu", *words)
        assert measured[-1].train.micro_batch_size == size
        assert ("going on from --train.micro-batch-size 2" in capsys.readouterr().out) == (
            size == 2
        )


def test_only_a_gate_that_held_hands_on(project: Project, tmp_path: Path) -> None:
    chain, given = project.module("workflow.chain"), project.config(run_dir=tmp_path)
    path = finished(project, given, "baseline", passed=False, train__micro_batch_size=4)
    assert chain.go_on(given, "compile", set()) == (given, [])
    path = finished(project, given, "baseline", train__micro_batch_size=4)
    assert chain.go_on(given, "compile", set())[1]
    content = json.loads(path.read_text())
    one = {"value": 2, "factor": None}
    for found in (
        [],
        "all",
        {"train.micro_batch_size": 2},
        {"train.micro_batch_size": {"value": "2", "factor": None}},
        {"train.micro_batch_size": {"value": 2, "factor": [1, 2]}},
        {"train.micro_batch_size": {"value": 2, "factor": ["one", "two", "three"]}},
        {"train.micro_batch_size": {"value": -2, "factor": None}},
        {"run_dir": one},
        {"checkpoint.url": {"value": "s3://theirs", "factor": None}},
    ):
        content["figures"]["recommended"] = found
        path.write_text(json.dumps(content))
        assert chain.go_on(given, "compile", set()) == (given, []), found
    content["figures"]["recommended"] = {"train.micro_batch_size": one}
    path.write_text(json.dumps({**content, "code": "another"}))
    assert chain.go_on(given, "compile", set()) == (given, [])


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

    def in_turns(ways: dict[str, Any], **_: Any) -> dict[str, list[float]]:
        for way in ways.values():
            way(1)
        return {name: 8 * [seconds[name]] for name in ways}

    patch.setattr(project.module("workflow.tuning"), "in_turns", in_turns)


def test_the_smallest_of_the_fastest_micro_batches_is_recommended(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 16 samples on there is no memory; how long the others take is made up."""
    import torch

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
    assert figures["recommended"]["train.micro_batch_size"]["factor"] == [2.0, 2.0, 2.0]
    assert set(largest) == {1, 2, 4, 8, 16}
    assert sorted(figures["micro_batch"]["median_step_seconds"]) == [1, 2, 4, 8]
    assert set(figures["micro_batch"]["peak_memory_bytes"]) == {1, 2, 4, 8}
    assert check["measured"].startswith("1: 40 ")
    assert check["measured"].endswith("; 16: OutOfMemoryError: CUDA out of memory")
    why = "--train.micro-batch-size 16: OutOfMemoryError: CUDA out of memory"
    assert why in figures["rejected"]
    slower = "--train.micro-batch-size 2: slower, 0.5 (0.5 to 0.5) times as fast"
    assert slower in figures["rejected"]
    times["4"] = 0.102  # as good as the best within 3 %, and smaller
    stage = tried(project, tmp_path, **sizes)
    assert stage.figures["micro_batch"]["best"] == 4 and "recommended" not in stage.figures


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

    def slow(*arguments: Any) -> Any:
        time.sleep(0.05)
        return read(*arguments)

    def in_turns(ways: dict[str, Any], multiple: int = 1) -> dict[str, list[float]]:
        return {name: 8 * [seconds[name] if multiple > 1 else 1.0] for name in ways}

    def waiting(state: Any, steps: int) -> Any:
        return timing.Steps(np.zeros(steps), np.ones(steps), np.full(steps, waited))

    monkeypatch.setattr(project.module("workflow.baseline"), "MEASURED", 4)
    monkeypatch.setattr(sampling, "fetch", slow)
    monkeypatch.setattr(tuning, "in_turns", in_turns)
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
        assert value is None or f"; {waited:.1%} with the loader workers" in check["measured"]
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

        def in_turns(ways: dict[str, Any], multiple: int) -> dict[str, list[float]]:
            nonlocal tried
            tried = set(map(int, ways)) - {given}  # noqa: B023
            assert not any(multiple % max(1, count) for count in map(int, ways))
            return {name: 8 * [1.0] for name in ways}

        monkeypatch.setattr(tuning, "in_turns", in_turns)
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

    def only_here(*arguments: Any) -> Any:
        if os.getpid() != here:
            raise OSError("this cannot be read\nfrom another process")
        return fetch(*arguments)

    monkeypatch.setattr(sampling, "fetch", only_here)
    config = project.config(run_dir=tmp_path)
    stage = project.module("workflow.stage").Stage("baseline", config)
    stage.figures["step_seconds"] = {"median": 0.001}
    assert tuning.try_loader_workers(stage, project.module("train").setup(config), 0.5) is None
    first, second = stage.figures["rejected"]
    assert first.startswith("--train.loader-workers 1: OSError") and "2: OSError" in second


@pytest.mark.parametrize("workers, multiple", [((3, 4), 12), ((0, 2), 2), ((2, 2), 1), ((0, 0), 1)])
def test_windows_with_other_workers_are_whole_bursts(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: tuple[int, int],
    multiple: int,
) -> None:
    chain, found = project.module("workflow.chain"), []
    files = project.module("files")
    for name, count in zip(("given", "recommended"), workers, strict=True):
        settings = project.config(run_dir=tmp_path, train__loader_workers=count)
        files.write_json(tmp_path / f"{name}.json", files.to_json(settings))
    monkeypatch.setattr(
        chain, "in_turns", lambda ways, multiple=1: found.append((sorted(ways), multiple))
    )
    chain.measure(tmp_path)
    assert found == [(["given", "recommended"], multiple)]


def test_windows_with_reading_have_workers_of_their_own(project: Project, tmp_path: Path) -> None:
    """Nothing is read ahead between them, and no sample is left out."""
    turns = project.module("workflow.turns")
    config = project.config(run_dir=tmp_path, train__loader_workers=2)
    state = project.module("train").setup(config)
    way, seen, read = turns.with_reading(state), [], state.loader.next

    def next_() -> Any:
        seen.append(state.loader.step)
        return read()

    state.loader.next = next_
    for steps in (1, 4):
        assert 0 < way(steps) < 60
        assert state.loader.iterator is None
    assert seen == list(range(7))


def test_the_sum_is_measured_and_written_for_train(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    chain, config = project.module("workflow.chain"), project.module("config")
    given = project.config(run_dir=tmp_path, train__seed=7)
    finished(project, given, "baseline", train__micro_batch_size=4)
    windows = {"given": [0.3] * 8, "recommended": [0.2] * 8}
    monkeypatch.setattr(chain, "run_task", lambda *_, **__: windows)
    assert chain.measure_together(given, set(), given) == "pass"
    said = capsys.readouterr().out
    assert "1.5 (1.5 to 1.5) times as fast as your settings: faster" in said
    file = tmp_path / "workflow/recommended.toml"
    assert f"train --config {file}" in said
    used = vars(config.override(config.load(file), {"run_dir": tmp_path}))
    wanted = config.override(given, {"train.micro_batch_size": 4})
    assert used == {name: value for name, value in vars(wanted).items() if name != "workflow"}
    project("report", "--run-dir", str(tmp_path))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "1.5 (1.5 to 1.5) times as fast as your settings" in page
    assert "--train.micro-batch-size 4 (baseline: 1.2 (1.1 to 1.3) times as fast)" in page
    windows = {}
    assert chain.measure_together(given, set(), given) == "pass", "it was measured again"
    forced = project.config(run_dir=tmp_path, train__seed=7, workflow__force=True)
    windows = {"error": "both together do not fit into the memory"}
    assert chain.measure_together(forced, set(), forced) == "not_measured" and file.exists()
    windows = {"given": [1.0, 3.0] * 4, "recommended": [3.0, 1.0] * 4}
    assert chain.measure_together(forced, set(), forced) == "not_measured"
    project("report", "--run-dir", str(tmp_path))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "as your settings" not in page and "Recommended:" in page  # too noisy to tell
    windows = {"given": [0.2] * 8, "recommended": [0.3] * 8}
    assert chain.measure_together(forced, set(), forced) == "fail" and not file.exists()
    project("report", "--run-dir", str(tmp_path))
    assert "as your settings" not in (tmp_path / "report.html").read_text("utf-8")


def test_both_settings_are_timed_in_one_process(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, turns = project.module("workflow.chain"), project.module("workflow.turns")
    monkeypatch.setattr(turns, "SECONDS", 0.1)
    to_json, write_json = (
        getattr(project.module("files"), name) for name in ("to_json", "write_json")
    )
    for name, size in (("given", 8), ("recommended", 1)):
        config = project.config(run_dir=tmp_path, train__micro_batch_size=size)
        write_json(tmp_path / f"{name}.json", to_json(config))
    training, sizes = project.module("train"), []
    compute = training.compute_loss

    def counting(model: Any, batch: Any) -> Any:
        sizes.append(len(batch["tokens"]))
        return compute(model, batch)

    monkeypatch.setattr(training, "compute_loss", counting)
    seconds = chain.measure(tmp_path)
    assert len(seconds["given"]) == len(seconds["recommended"]) >= 6
    assert set(sizes) == {1, 8} and sizes.count(1) == 8 * sizes.count(8)  # as many steps of each
