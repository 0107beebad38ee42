"""The chain: what a stage recommends reaches the stages after it, and the sum is measured."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project, project_fixture

project = project_fixture("chained")
STAGES = ["baseline", "compile", "profile", "scale", "checkpoint"]
FASTER = "baseline: 1.2 (1.1 to 1.3) times as fast"


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


class Chain:
    """`workflow` with stages that recommend what a test says."""

    def __init__(self, project: Project, patch: pytest.MonkeyPatch) -> None:
        self.project, self.chain = project, project.module("workflow.chain")
        self.recommend: dict[str, dict[str, Any]] = {}
        self.failing: set[str] = set()
        self.ran: dict[str, tuple[Any, list[str]]] = {}
        """Settings and arguments of each stage that was run."""
        patch.setattr(self.chain, "run_stage", self.run_stage)
        patch.setattr(self.chain, "measure_together", lambda *_: "pass")
        patch.setattr(self.chain.signal, "signal", lambda *_: None)

    def run_stage(self, config: Any, name: str, arguments: list[str]) -> dict[str, Any]:
        self.ran[name] = config, arguments
        found, passed = self.recommend.get(name, {}), name not in self.failing
        return json.loads(finished(self.project, config, name, passed, **found).read_text())

    def __call__(self, given: Any, *words: str) -> list[str]:
        self.ran.clear()
        self.chain.run_stages(given, list(words))
        return list(self.ran)


def test_a_stopped_workflow_leaves_no_results_of_other_code(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report would show them as those of this code; what was measured with it stays."""
    workflow = Chain(project, monkeypatch)
    given = project.config(run_dir=tmp_path)
    old, current = (finished(project, given, name) for name in ("compile", "scale"))
    old.write_text(json.dumps(json.loads(old.read_text()) | {"code": "other"}))
    workflow.failing = {"baseline"}
    assert workflow(given) == ["baseline"]
    assert not old.exists() and current.exists()


def test_a_stage_is_of_the_cores_that_it_began_with(project: Project, tmp_path: Path) -> None:
    """`setup` may pin it to some of them."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    stages = project.module("workflow.stage")
    stage = stages.Stage("compile", project.config(run_dir=tmp_path))
    before = stage.cores
    os.sched_setaffinity(0, {min(cores)})
    try:
        stage.close()
    finally:
        os.sched_setaffinity(0, cores)
    assert json.loads(stage.file.read_text())["machine"]["cores"] == before > 1


def test_a_stage_goes_on_from_those_before_it(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    workflow, override = Chain(project, monkeypatch), project.module("config").override
    given = project.config(run_dir=tmp_path)
    workflow.recommend["baseline"] = {"train__micro_batch_size": 4, "checkpoint__every": 7}
    assert workflow(given, "--fresh") == STAGES
    assert workflow.ran["baseline"] == (given, ["--fresh"])
    loaded = override(given, {"train.micro_batch_size": 4, "checkpoint.every": 7})
    options = ["--fresh", "--train.micro-batch-size", "4", "--checkpoint.every", "7"]
    for name in STAGES[1:]:
        assert workflow.ran[name] == (loaded, options)
    assert f"     with --train.micro-batch-size 4 ({FASTER}), " in capsys.readouterr().out
    assert workflow(given) == []  # all of it is there
    # A stage measured on other settings than it would go on from now counts for nothing.
    (tmp_path / "workflow/compile.json").unlink()
    workflow.recommend["compile"] = {"compile__mode": "full"}
    assert workflow(given) == STAGES[1:]
    assert workflow.ran["compile"][0] == loaded
    assert workflow.ran["profile"][0] == override(loaded, {"compile.mode": "full"})
    assert workflow(override(given, {"train.seed": 5})) == STAGES


def test_what_is_typed_stays(project: Project, tmp_path: Path) -> None:
    chain, given = project.module("workflow.chain"), project.config(run_dir=tmp_path)
    path = finished(project, given, "baseline", train__micro_batch_size=4, checkpoint__every=7)
    file = tmp_path / "own.toml"
    file.write_text("[train]\nmicro-batch-size = 8\n")
    for words in (
        ["--train.micro-batch-size", "8"],
        ["--train.micro_batch_size=8"],
        ["--config", str(file)],
        [f"--config={file}", "--fresh"],
    ):
        typed, taken = chain.typed_settings(["compile", *words]), {}
        config = chain.take_recommended(given, json.loads(path.read_text()), typed, taken)
        assert config.train.micro_batch_size == given.train.micro_batch_size
        assert config.checkpoint.every == 7 and [*taken] == ["checkpoint.every"]


def test_only_a_gate_that_held_hands_on(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow = Chain(project, monkeypatch)
    workflow.failing.add("baseline")
    workflow.recommend["baseline"] = {"train__micro_batch_size": 2}
    given = project.config(run_dir=tmp_path, workflow__keep_going=True)
    assert workflow(given) == STAGES and workflow.ran["compile"] == (given, [])
    workflow.failing.clear()
    assert workflow(given) == STAGES and workflow.ran["compile"][0] != given
    assert workflow(given) == []
    path = tmp_path / "workflow/baseline.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "code": "another"}))
    assert workflow(given) == ["baseline"]
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
        content["figures"]["recommended"], taken = found, {}
        config = workflow.chain.take_recommended(given, content, set(), taken)
        assert (config, taken) == (given, {}), found


def test_a_compile_mode_that_fails_stops_nothing(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    workflow, override = Chain(project, monkeypatch), project.module("config").override
    given = project.config(run_dir=tmp_path, compile__mode="full")
    workflow.failing.add("compile")
    workflow.recommend["compile"] = {"compile__mode": "none"}
    assert workflow.chain.run_stages(given, []) == 1
    assert [*workflow.ran] == STAGES
    assert workflow.ran["profile"] == (
        override(given, {"compile.mode": "none"}),
        ["--compile.mode", "none"],
    )
    assert "stopped at" not in capsys.readouterr().out


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
    why = f"--train.micro-batch-size 4 ({FASTER})"
    texts = {"train.micro_batch_size": chain.Recommendation(4, why)}
    final = config.override(given, {"train.micro_batch_size": 4})
    together = (given, final, texts)
    windows = {"given": [0.3] * 8, "recommended": [0.2] * 8}

    def time_steps(configs: dict[str, Any]) -> dict[str, list[float]]:
        assert [*configs] == ["given", "recommended"]
        if not windows:
            raise RuntimeError("both together do not fit into the memory")
        return windows

    monkeypatch.setattr(chain, "time_steps", time_steps)
    assert chain.measure_together(*together) == "pass"
    said = capsys.readouterr().out
    assert "1.5 (1.5 to 1.5) times as fast as your settings: faster" in said
    file = tmp_path / "workflow/recommended.toml"
    assert f"train --run-dir {tmp_path} --config {file}" in said, "the run that was measured"
    used = vars(config.override(config.load(file), {"run_dir": tmp_path}))
    wanted = config.override(given, {"train.micro_batch_size": 4})
    assert used == {name: value for name, value in vars(wanted).items() if name != "workflow"}
    project("report", "--run-dir", str(tmp_path))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "1.5 (1.5 to 1.5) times as fast as your settings" in page
    assert f"--train.micro-batch-size 4 ({FASTER})" in page
    windows = {}
    assert chain.measure_together(*together) == "not_measured" and file.exists()
    windows = {"given": [1.0, 3.0] * 4, "recommended": [3.0, 1.0] * 4}
    assert chain.measure_together(*together) == "not_measured"
    project("report", "--run-dir", str(tmp_path))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "as your settings" not in page and "Recommended:" in page  # too noisy to tell
    assert f"train --run-dir {tmp_path} --config {file}" in page
    windows = {"given": [0.2] * 8, "recommended": [0.3] * 8}
    # Not compiling costs speed, but there are other reasons for it.
    uncompiled = texts | {"compile.mode": chain.Recommendation("none", "other numbers")}
    assert chain.measure_together(given, final, uncompiled) == "pass" and file.exists()
    file.unlink()  # as `workflow` does before its first stage
    assert chain.measure_together(*together) == "fail" and not file.exists()
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


def test_a_workflow_may_start_from_what_an_earlier_one_recommended(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is read by each stage, so it stays; without --config it is removed."""
    workflow = Chain(project, monkeypatch)
    given = project.config(run_dir=tmp_path)
    file = project.module("workflow.stage").stage_file(tmp_path, "recommended").with_suffix(".toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("train.micro_batch_size = 4\n")
    workflow(given, "--config", str(file), "--workflow.force")
    assert file.read_text() == "train.micro_batch_size = 4\n"
    workflow(given, "--workflow.force")
    assert not file.exists()
