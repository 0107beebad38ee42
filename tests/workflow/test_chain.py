"""The chain: what a stage recommends reaches the stages after it, and the sum is measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project, project_fixture

project = project_fixture("chained")


def finished(project: Project, config: Any, name: str, passed: bool = True, **found: Any) -> Path:
    """A stage that recommends settings, as in train__loader_workers=2."""
    stages, chain = project.module("workflow.stage"), project.module("workflow.chain")
    stage = stages.Stage(name, config)
    for setting, value in found.items():
        times = project.module("workflow.interleaved").Interval(1.2, 1.1, 1.3)
        chain.recommend(stage, setting.replace("__", "."), value, times)
    stage.check("c", passed, measured="so", wanted="such")
    stage.close()
    return stages.stage_file(config.directory, name)


def test_a_stage_goes_on_from_those_before_it(project: Project, tmp_path: Path) -> None:
    chain, override = project.module("workflow.chain"), project.module("config").override
    given = project.config(run_dir=tmp_path)
    finished(project, given, "baseline", train__micro_batch_size=4, checkpoint__every=7)
    assert chain.with_recommended(given, "baseline", set()) == (given, {})
    loaded = override(given, {"train.micro_batch_size": 4, "checkpoint.every": 7})
    config, taken = chain.with_recommended(given, "compile", set())
    assert config == loaded and [*taken] == ["train.micro_batch_size", "checkpoint.every"]
    text = "--train.micro-batch-size 4 (baseline: 1.2 (1.1 to 1.3) times as fast)"
    assert taken["train.micro_batch_size"] == (4, text)
    # A stage measured on other settings than it would go on from now counts for nothing.
    finished(project, given, "compile", compile__mode="full")
    assert chain.with_recommended(given, "profile", set())[0] == loaded
    finished(project, loaded, "compile", compile__mode="full")
    whole = override(loaded, {"compile.mode": "full"})
    assert (
        chain.with_recommended(given, "profile", set())[0]
        == chain.with_recommended(given, "", set())[0]
        == whole
    )
    assert chain.with_recommended(override(given, {"train.seed": 5}), "", set())[1] == {}


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
        typed = chain.typed_settings(["compile", *words])
        config, taken = chain.with_recommended(given, "compile", typed)
        assert config.train.micro_batch_size == given.train.micro_batch_size
        assert [*taken] == ["checkpoint.every"]


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
    assert chain.with_recommended(given, "compile", set()) == (given, {})
    path = finished(project, given, "baseline", train__micro_batch_size=4)
    assert chain.with_recommended(given, "compile", set())[1]
    content = json.loads(path.read_text())
    one = {"value": 2, "text": "--train.micro-batch-size 2 (baseline)"}
    for found in (
        [],
        "all",
        {"train.micro_batch_size": 2},
        {"train.micro_batch_size": {"text": "--train.micro-batch-size 2"}},
        {"train.micro_batch_size": {**one, "value": "2"}},
        {"train.micro_batch_size": {**one, "value": -2}},
        {"run_dir": one},
        {"checkpoint.url": {**one, "value": "s3://theirs"}},
    ):
        content["figures"]["recommended"] = found
        path.write_text(json.dumps(content))
        assert chain.with_recommended(given, "compile", set()) == (given, {}), found
    content["figures"]["recommended"] = {"train.micro_batch_size": one}
    path.write_text(json.dumps({**content, "code": "another"}))
    assert chain.with_recommended(given, "compile", set()) == (given, {})


@pytest.mark.parametrize("workers, multiple", [((3, 4), 12), ((0, 2), 2), ((2, 2), 2), ((0, 0), 1)])
def test_windows_with_other_workers_are_whole_bursts(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: tuple[int, int],
    multiple: int,
) -> None:
    chain, found = project.module("workflow.chain"), []
    settings = {
        name: project.config(run_dir=tmp_path, train__loader_workers=count)
        for name, count in zip(("given", "recommended"), workers, strict=True)
    }
    monkeypatch.setattr(
        chain, "time_interleaved", lambda ways, multiple=1: found.append((sorted(ways), multiple))
    )
    chain.time_steps(settings)
    assert found == [(["given", "recommended"], multiple)]


def test_windows_with_a_loader_have_workers_of_their_own(project: Project, tmp_path: Path) -> None:
    """Nothing is read ahead between them, and no sample is left out."""
    interleaved = project.module("workflow.interleaved")
    config = project.config(run_dir=tmp_path, train__loader_workers=2)
    state = project.module("train").setup(config)
    way, seen, read = interleaved.with_loader(state), [], state.loader.next

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

    def time_steps(configs: dict[str, Any]) -> dict[str, list[float]]:
        assert [*configs] == ["given", "recommended"]
        if not windows:
            raise RuntimeError("both together do not fit into the memory")
        return windows

    monkeypatch.setattr(chain, "time_steps", time_steps)
    assert chain.measure_together(given, set()) == "pass"
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
    assert chain.measure_together(given, set()) == "not_measured" and file.exists()
    windows = {"given": [1.0, 3.0] * 4, "recommended": [3.0, 1.0] * 4}
    assert chain.measure_together(given, set()) == "not_measured"
    project("report", "--run-dir", str(tmp_path))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "as your settings" not in page and "Recommended:" in page  # too noisy to tell
    windows = {"given": [0.2] * 8, "recommended": [0.3] * 8}
    file.unlink()  # as `workflow` does before its first stage
    assert chain.measure_together(given, set()) == "fail" and not file.exists()
    project("report", "--run-dir", str(tmp_path))
    assert "as your settings" not in (tmp_path / "report.html").read_text("utf-8")


def test_both_settings_are_timed_in_one_process(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, interleaved = project.module("workflow.chain"), project.module("workflow.interleaved")
    monkeypatch.setattr(interleaved, "SECONDS", 0.1)
    configs = {
        name: project.config(run_dir=tmp_path, train__micro_batch_size=size)
        for name, size in (("given", 8), ("recommended", 1))
    }
    training, sizes = project.module("train"), []
    compute = training.compute_loss

    def counting(model: Any, batch: Any) -> Any:
        sizes.append(len(batch["tokens"]))
        return compute(model, batch)

    monkeypatch.setattr(training, "compute_loss", counting)
    seconds = chain.time_steps(configs)
    assert len(seconds["given"]) == len(seconds["recommended"]) >= 6
    assert set(sizes) == {1, 8} and sizes.count(1) == 8 * sizes.count(8)  # as many steps of each
