"""The compile stage: each check passes, and fails when it should."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import Project, project_fixture

project = project_fixture("compile_stage_run", parallelism="single")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    forget_compiling()
    yield
    forget_compiling()


def forget_compiling() -> None:
    """Throw away all that was compiled in this process, and the records of it."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


class Breaks(nn.Module):
    """Ends its graph at a data-dependent branch, in a print and inside a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Break three times."""
        x = self.linear(x)
        if x.sum() > 0:  # break: branch
            x = x * 2
        print("a print", end="")  # break: print
        return looping(x)


def looping(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + 1
        print("in a loop", end="")  # break: loop
    return x


class Counts(nn.Module):
    """Is compiled again at each call: a number of its own changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count."""
        self.calls += 1  # the guard
        return self.linear(x) * self.calls


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text("utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def compiled(project: Project, model: nn.Module, calls: int = 3, **settings: Any) -> Any:
    """Call a model some times that the project has compiled; the module that tells of it."""
    compilation = project.module("compile")
    config = compilation.CompileConfig(mode="full", backend="eager", **settings)
    compilation.compile_model(model, [], config)
    for _ in range(calls):
        model(torch.randn(3, 4))
    return project.module("workflow.compile_trial")


def test_graph_breaks_are_named_with_their_place(project: Project) -> None:
    told = compiled(project, Breaks())
    found = {int(it["where"].rpartition(":")[2]): it for it in told.findings()["graph_breaks"]}
    assert {Path(it["where"].rpartition(":")[0]).name for it in found.values()} == {
        Path(__file__).name
    }
    assert "Data-dependent" in found[line_of("break: branch")]["reason"]
    for mark in ("break: print", "break: loop"):
        assert "builtin" in found[line_of(mark)]["reason"]
    assert len(found) == 3, "each place once"
    counted = re.search(r"graph breaks: (\d+)", project.module("compile").compile_summary())
    assert counted and int(counted[1]) >= len(found)  # a place may break more than once


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
def test_a_plain_model_has_nothing_to_tell(project: Project, model: nn.Module) -> None:
    """Though its forward is torch's own, which compile() in place would pass over."""
    told = compiled(project, model)
    assert told.findings() == {"graph_breaks": [], "recompiles": [], "limits_hit": []}
    assert project.module("compile").graphs() == 1
    assert project.module("compile").compile_seconds() > 0


def test_a_run_that_compiles_sums_up_and_leaves_no_code(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changes = {"compile__mode": "full", "compile__backend": "aot_eager", "train__steps": 2}
    project.module("train").run(project.config(run_dir=tmp_path / "run", **changes))
    assert not list((tmp_path / "run").rglob("*.so")) + list((tmp_path / "run").rglob("*.py"))
    assert "graphs in" in caplog.text and "graph breaks: 0" in caplog.text


def test_blocks_that_are_recomputed_are_compiled(project: Project) -> None:
    compilation, model = project.module("compile"), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compilation.checkpoint_activations(model)
    config = compilation.CompileConfig(mode="blocks", backend="aot_eager")
    compilation.compile_model(model, model, config)
    model(torch.randn(3, 4)).sum().backward()
    assert compilation.graphs() == 2


def test_recompiles_are_named_with_their_guard_until_the_limit(project: Project) -> None:
    found = compiled(project, Counts(), calls=3).findings()
    assert len(found["recompiles"]) == 2 and not found["limits_hit"]
    for finding in found["recompiles"]:
        assert finding["reason"].startswith("self.calls == ")
        assert finding["where"].endswith(f"{Path(__file__).name}:{line_of('the guard')}")
    forget_compiling()
    found = compiled(project, Counts(), calls=12).findings()
    assert len(found["recompiles"]) == torch._dynamo.config.recompile_limit - 1
    (limit,) = found["limits_hit"]
    assert limit["reason"].startswith("self.calls == ") and limit["where"]
    assert "recompile limit exceeded" in project.module("compile").compile_summary()


def test_eager_steps_are_eager(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    model, worker, calls = nn.Linear(4, 4), project.module("workflow.compile_trial"), []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *a: (calls.append(1), graph(*a))[1]

    def steps(count: int) -> float:
        model(torch.ones(2, 4))
        return 1.0

    compilation = project.module("compile")
    compilation.compile_model(model, [], compilation.CompileConfig(mode="full", backend=backend))
    monkeypatch.setattr(worker, "without_loader", lambda state: steps)
    monkeypatch.setattr(worker, "time_interleaved", lambda ways: ways)
    ways = worker.time_windows(SimpleNamespace(loader=SimpleNamespace(close=lambda: None)))
    ways["eager"](1)
    assert not calls
    ways["compiled"](1)
    assert calls


def cold(project: Project, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """The trial of one mode, in this process and without a code generator."""
    worker = project.module("workflow.compile_trial")
    changes = {"compile__mode": "full", "compile__backend": "aot_eager", **changes}
    return worker.attempt("cold", project.config(run_dir=tmp_path, **changes))


@pytest.fixture
def quick(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short windows."""
    interleaved = project.module("workflow.interleaved")
    monkeypatch.setattr(interleaved, "WINDOW", 0.01)
    monkeypatch.setattr(interleaved, "SECONDS", 0.1)


@pytest.fixture
def gate(project: Project, tmp_path: Path) -> Any:
    """Judge figures of modes; the checks by name, and the stage."""

    def judge(modes: dict[str, Any], **changes: Any) -> Any:
        config = project.config(run_dir=tmp_path, **changes)
        stage = project.module("workflow.stage").Stage("compile", config)
        project.module("workflow.compile").judge(stage, modes)
        return SimpleNamespace(stage=stage, **{check["name"]: check for check in stage.checks})

    return judge


def assert_all_but_speed_pass(stage: Any) -> None:
    """Of a real trial; whether its speed can be told depends on what else this machine does."""
    statuses = {check["name"]: check["status"] for check in stage.checks}
    assert statuses.pop("speedup") in ("pass", "not_measured")
    passed = dict.fromkeys(
        ("compiles", "graph_breaks", "recompiles", "recompile_limit", "numerics"), "pass"
    )
    assert statuses == passed, stage.checks


def test_a_mode_is_tried_and_judged(project: Project, tmp_path: Path, quick: None, gate) -> None:
    figures = cold(project, tmp_path)
    judged = gate({"full": figures, "blocks": {"skipped": "blocks(model) returns no blocks"}})
    assert_all_but_speed_pass(judged.stage)
    assert "not tried, blocks(model) returns no blocks" in judged.compiles["measured"]
    full = judged.stage.figures["modes"]["full"]
    assert full["graphs"] >= 1 and full["graph_breaks"] == full["recompiles"] == []
    assert full["compile_seconds"]["warm"] is None
    assert full["speedup"]["low"] <= full["speedup"]["value"] <= full["speedup"]["high"]
    assert set(full["step_seconds"]) == {"median", "p10", "p90", "n"}
    json.dumps(judged.stage.figures)


def test_dropout_is_compared_with_the_same_masks(project: Project, tmp_path: Path, quick) -> None:
    figures = cold(project, tmp_path, model__dropout=0.3, compile__mode="blocks")
    assert figures["difference"]["loss"] < 1e-5


def test_other_numbers_fail(project: Project, tmp_path: Path, quick, gate, monkeypatch) -> None:
    """Compiled code that is a little wrong is found."""
    good = cold(project, tmp_path)
    worker = project.module("workflow.compile_trial")
    first_steps = worker.first_steps

    def wrong(state: Any) -> Any:
        course = first_steps(state)
        if state.config.compile.mode != "none":
            wrong_gradients = [1.05 * gradient for gradient in course.gradients]
            return worker.FirstSteps(losses=course.losses, gradients=wrong_gradients)
        return course

    monkeypatch.setattr(worker, "first_steps", wrong)
    bad = cold(project, tmp_path)
    assert bad["difference"]["gradients"] == pytest.approx(0.05, rel=0.01)
    assert gate({"full": good}).numerics["status"] == "pass"
    assert gate({"full": bad}).numerics["status"] == "fail"
    nan = good | {"difference": {"loss": float("nan"), "gradients": 0.0}}
    assert gate({"full": nan}).numerics["status"] == "fail"
    rounded = good | {"precise": False, "difference": {"loss": 1e-3, "gradients": 0.05}}
    assert gate({"full": rounded}).numerics["status"] == "pass"
    assert gate({"full": rounded | {"precise": True}}).numerics["status"] == "fail"


def test_differences_are_relative(project: Project) -> None:
    worker = project.module("workflow.compile_trial")
    course = worker.FirstSteps(np.array([2.0, 1.0, 0.0]), [torch.ones(4), torch.zeros(2)])
    assert worker.difference(course, course) == {"loss": 0.0, "gradients": 0.0}
    other = worker.FirstSteps(np.array([2.0, 1.1, 0.0]), [torch.ones(4) * 1.5, torch.zeros(2)])
    assert worker.difference(course, other) == pytest.approx({"loss": 0.1, "gradients": 0.5})
    with pytest.raises(ValueError, match="shorter"):
        worker.difference(course, worker.FirstSteps(course.losses, []))


def test_the_steps_of_a_run_follow_from_its_epochs(project: Project, tmp_path: Path) -> None:
    """As in the run itself, whatever the preset says of steps."""
    count = project.module("workflow.timing").steps_of_run
    setup = project.module("train").setup
    assert count(project.config(run_dir=tmp_path, train__steps=7)) == 7
    for changes in ({}, {"train__overfit": 2}):
        config = project.config(run_dir=tmp_path, train__epochs=0.5, **changes)
        assert count(config) == setup(config).config.train.steps != config.train.steps


FIGURES = {
    "windows": {"eager": [1.0] * 8, "compiled": [0.5] * 8},
    "compile_seconds": {"cold": 10.0, "warm": 2.0},
    "graphs": 1,
    "graph_breaks": [],
    "recompiles": [],
    "limits_hit": [],
    "precise": True,
    "difference": {"loss": 0.0, "gradients": 0.0},
}
HERE = {"where": "model.py:7", "reason": "a print"}
NOWHERE = {"where": "", "reason": "a print"}


@pytest.mark.parametrize("check", ["graph_breaks", "recompiles"])
def test_a_finding_must_have_a_place(gate, check: str) -> None:
    fine = gate({"full": FIGURES | {check: [HERE]}})
    assert fine.stage.status == "pass"
    assert "model.py:7: a print" in getattr(fine, check)["measured"]
    assert getattr(gate({"full": FIGURES | {check: [NOWHERE]}}), check)["status"] == "fail"
    many = [HERE | {"where": f"model.py:{line}"} for line in range(20)]
    told = getattr(gate({"full": FIGURES | {check: many}}), check)["measured"]
    assert "full 20; " in told and "model.py:5: a print; 14 more" in told


def test_the_recompile_limit_fails(gate) -> None:
    hit = gate({"full": FIGURES | {"limits_hit": [HERE]}})
    assert hit.recompile_limit["status"] == "fail"
    assert "model.py:7" in hit.recompile_limit["measured"]
    assert gate({"full": FIGURES}).recompile_limit["status"] == "pass"


def test_a_mode_that_breaks_down_fails_and_a_missing_compiler_is_not_measured(gate) -> None:
    broken = gate({"blocks": FIGURES, "full": {"error": "RuntimeError: no such luck"}})
    assert broken.compiles["status"] == "fail" and "no such luck" in broken.compiles["measured"]
    assert broken.stage.figures["best"] == "blocks"
    lacking = {"error": "InductorError: InvalidCxxCompiler: No working C++ compiler found"}
    nothing = gate({"blocks": lacking, "full": lacking})
    assert nothing.stage.status == "not_measured"
    assert {check["status"] for check in nothing.stage.checks} == {"not_measured"}
    assert nothing.stage.figures["best"] == "none"
    assert [c["name"] for c in nothing.stage.checks if c["advice"]] == ["compiles"]
    bug = gate({"full": {"error": "CppCompileError: C++ compile error\nexpected ';' before '}'"}})
    assert bug.compiles["status"] == "fail" and "expected" not in bug.compiles["measured"]
    bare = {"error": "CppCompileError: C++ compile error\nPython.h: No such file or directory"}
    bare_headers = gate({"full": bare})
    assert bare_headers.compiles["status"] == "not_measured"
    assert "python3-dev" in bare_headers.compiles["advice"]
    assert bare_headers.stage.figures["errors"]["full"] == bare["error"], "all of its lines"
    idle = gate({"full": FIGURES | {"graphs": 0}})
    assert idle.compiles["status"] == "fail" and "graphs 0" in idle.compiles["measured"]
    failed = FIGURES | {"error": "OSError: gone"}
    failed["compile_seconds"] = {"cold": 1.0, "warm": None}
    compiles = gate({"full": failed}).compiles
    assert compiles["status"] == "fail" and "OSError: gone" in compiles["measured"]


def test_where_no_mode_was_tried_nothing_is_said_about_speed(gate) -> None:
    skipped = {"skipped": "blocks(model) returns no blocks"}
    untried = gate({"blocks": skipped})
    assert untried.stage.status == "not_measured" == untried.compiles["status"]
    assert "blocks (model.py)" in untried.compiles["advice"]
    assert untried.stage.advice == []
    assert gate({"blocks": skipped, "full": FIGURES}).stage.status == "pass"


def test_what_a_crashed_compiler_printed_is_shown(
    project: Project, gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*words: str, **options: Any) -> None:
        raise project.module("errors").RankError(
            "compile_trial cold ended with exit code -11\n  Fatal Python error: Segmentation fault"
        )

    stage = project.module("workflow.compile")
    monkeypatch.setattr(stage, "run_task", crash)
    result = stage.try_mode(project.config(run_dir=tmp_path), "full", tmp_path / "trial")
    assert "exit code -11: Fatal Python error" in gate({"full": result}).compiles["measured"]


def test_an_error_of_the_compiler_is_a_finding(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no_such" in cold(project, tmp_path, compile__backend="no_such")["error"]
    refused = cold(project, tmp_path, data__path=tmp_path / "nothing")  # a mistake of the user's
    assert set(refused) == {"refused"}
    stage = project.module("workflow.compile")
    monkeypatch.setattr(stage, "run_task", lambda *_, **__: refused)
    with pytest.raises(project.module("errors").UserError, match="nothing"):
        stage.try_mode(project.config(run_dir=tmp_path), "full", tmp_path / "trial")


def test_speedups_need_more_than_noise(project: Project) -> None:
    interleaved = project.module("workflow.interleaved")
    noise = [1 + 0.05 * (-1) ** k for k in range(12)]
    assert interleaved.speedup_of([2 * x for x in noise], [1.0] * 12)[1] == "faster"
    assert interleaved.speedup_of(noise, [1.0] * 12)[1] == "within noise"
    wild = [1 + 0.6 * (-1) ** k for k in range(12)]
    assert interleaved.speedup_of(wild, [1.0] * 12)[1] == "too noisy to tell"
    assert interleaved.speedup_of([0.8 * x for x in noise], [1.0] * 12)[1] == "slower"
    speedup, _ = interleaved.speedup_of([2.0] * 12, [1.0] * 12)
    assert (speedup.low, speedup.value, speedup.high) == (2.0, 2.0, 2.0)


def test_advice_names_the_mode_and_what_it_earns(gate) -> None:
    slow = FIGURES | {"windows": {"eager": [1.0] * 8, "compiled": [2.0] * 8}}
    judged = gate({"blocks": FIGURES, "full": slow})
    assert judged.stage.figures["best"] == "blocks"
    text = " ".join(judged.stage.advice)
    assert "--compile.mode blocks" in text and "after 20 steps" in text
    assert "faster" in judged.speedup["measured"] and "slower" in judged.speedup["measured"]
    assert judged.speedup["status"] == "pass", "told, not judged"
    none = gate({"full": slow})
    assert none.stage.figures["best"] == "none" and "--compile.mode none" in none.stage.advice[0]
    wild = [1 + 0.6 * (-1) ** k for k in range(12)]
    noisy = gate({"full": FIGURES | {"windows": {"eager": wild, "compiled": [1.0] * 12}}})
    assert noisy.speedup["status"] == noisy.stage.status == "not_measured"
    assert noisy.stage.figures["best"] == "none" and not noisy.stage.advice
    much = FIGURES | {"windows": {"eager": [1.0] * 8, "compiled": [0.1] * 8}}
    assert gate({"blocks": FIGURES, "full": much}).stage.figures["best"] == "full"
    assert gate({"blocks": FIGURES, "full": FIGURES}).stage.figures["best"] == "blocks"


def test_a_mode_that_may_still_be_faster_is_not_advised_against(gate) -> None:
    slow = FIGURES | {"windows": {"eager": [1.0] * 8, "compiled": [2.0] * 8}}
    wild = [1 + 0.6 * (-1) ** k for k in range(12)]
    noisy = FIGURES | {"windows": {"eager": wild, "compiled": [1.0] * 12}}
    assert not gate({"blocks": slow, "full": noisy}).stage.advice


def test_fsdp_is_told_what_it_compiles_instead_of_the_whole(
    gate, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = FIGURES | {"windows": {"eager": [1.0] * 8, "compiled": [2.0] * 8}}
    monkeypatch.setattr(project.module("distributed.parallel"), "SHARDED", True)
    stage = gate({"blocks": slow}, compile__mode="full").stage
    assert stage.figures["recommended"]["compile.mode"]["value"] == "none"


def test_a_mode_that_fails_is_not_recommended_and_the_advice_says_why(gate) -> None:
    error = {"error": "RuntimeError: no such luck\nand a traceback"}
    broken = gate({"blocks": error, "full": error}, compile__mode="full").stage
    assert broken.status == "fail" and broken.figures["best"] == "none"
    (advice,) = broken.advice
    assert advice.startswith("train with --compile.mode none: blocks: RuntimeError: no such luck;")
    assert "traceback" not in advice
    assert broken.figures["recommended"]["compile.mode"]["value"] == "none"
    wrong = FIGURES | {"difference": {"loss": 1.0, "gradients": 1.0}}
    looping = FIGURES | {"limits_hit": [HERE]}
    for figures, why in (
        (wrong, "differ from eager steps"),
        (looping, "recompiles up to the limit"),
    ):
        stage = gate({"full": figures}).stage
        assert stage.figures["best"] == "none" and why in stage.advice[0]
        assert "recommended" not in stage.figures, "it is what was given"
        assert gate({"blocks": FIGURES, "full": figures}).stage.figures["best"] == "blocks"


def test_a_compile_that_the_run_does_not_earn_back_is_not_recommended(gate) -> None:
    """It pays off after 20 steps."""
    for mode in ("none", "full"):
        late = gate({"full": FIGURES}, train__steps=19, compile__mode=mode).stage
        assert late.status == "pass" and late.figures["best"] == "none"
        assert "pays off after 20 steps" in late.advice[0]
        assert ("recommended" in late.figures) == (mode == "full")
    costly = FIGURES | {"compile_seconds": {"cold": 99.0, "warm": 2.0}}
    costly["windows"] = {"eager": [1.0] * 8, "compiled": [0.1] * 8}
    assert gate({"blocks": FIGURES, "full": costly}).stage.figures["best"] == "blocks"
