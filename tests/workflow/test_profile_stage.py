"""The profile stage: whatever holds a step up on purpose is named, and time is divided exactly."""

import contextlib
import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Project, bake, drill

STEPS = ("--train.micro-batch-size", "8", "--profile.wait", "1")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("profile")
    with Project.imported(folder, "profiled", parallelism="single") as it:
        yield it


@pytest.fixture(scope="module")
def traces(project: Project) -> Any:
    return project.module("workflow.trace")


def profile(project: Project, name: str, *words: str, code: int = 0) -> dict[str, Any]:
    """What the stage wrote for a run of its own."""
    place = project.folder / "runs" / name
    dispatch = project.module("__main__").dispatch
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.folder)
        assert dispatch(["profile", *Project.settings, *STEPS, "--name", name, *words]) == code
    return json.loads((place / "workflow/profile.json").read_text())


def statuses(content: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in content["checks"]}


def holds_up(project: Project, patch: pytest.MonkeyPatch, how: str) -> None:
    """Make a step of the project slow in a way of its own."""
    training = project.module("train")
    build, compute_loss = training.build_datasets, training.compute_loss
    lengths = iter(range(32, 0, -1))

    class Slow:
        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __len__(self) -> int:
            return len(self.dataset)

        def __getitems__(self, ids: list[int]) -> Any:
            time.sleep(0.5)  # many times what the rest takes, on a slow machine too
            return self.dataset.__getitems__(ids)

    def slow_datasets(config: Any) -> Any:
        train, *rest = build(config)
        return Slow(train), *rest

    def python(model: Any, batch: Any) -> Any:
        total = 0
        for i in range(3_000_000):
            total += i
        return compute_loss(model, batch)

    def big_kernel(model: Any, batch: Any) -> Any:
        matrix = torch.ones(1500, 1500)
        matrix @ matrix
        return compute_loss(model, batch)

    def varying(model: Any, batch: Any) -> Any:
        return compute_loss(model, {"tokens": batch["tokens"][:, : next(lengths) + 1]})

    if how == "input":
        patch.setattr(training, "build_datasets", slow_datasets)
    else:
        change = {"host": python, "kernel": big_kernel, "recompiling": varying}[how]
        patch.setattr(training, "compute_loss", change)


def test_what_holds_a_step_up_is_named(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for how, part, tip in (
        ("input", "data", "--train.loader-workers"),
        ("host", "host", "to move the Python code at that point out of the step"),
        ("kernel", "kernels", "--compile.mode blocks"),
    ):
        with monkeypatch.context() as patch:
            holds_up(project, patch, how)
            content = profile(project, how)
        figures = content["figures"]
        assert figures["diagnosis"] == f"{how}-bound"
        assert figures["shares"][part] == max(figures["shares"].values()) > 0.5
        assert sum(figures["shares"].values()) == pytest.approx(1)
        assert statuses(content) == {
            "trace": "pass",
            "recompiles": "pass",
            "shares": "pass",
        }
        assert tip in content["advice"][0] and f"{how}-bound: " in content["advice"][0]
        assert figures["recompiles"] == 0 and figures["steps"] == 3
        assert (project.folder / figures["trace"]).exists()
        output = capsys.readouterr().out
        assert "top operators" in output and "https://ui.perfetto.dev" in output
    assert figures["operators"][0]["name"] == "aten::mm"
    assert figures["operators"][0]["calls"] >= 3
    assert figures["step_seconds"]["n"] >= 8


def test_recompiling_wins_over_everything(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds_up(project, monkeypatch, "recompiling")
    torch.compiler.reset()
    few = ("--model.layers", "1", "--profile.warmup", "1", "--profile.active", "2")
    compiled = ("--compile.mode", "full", "--compile.backend", "eager", "--compile.dynamic")
    content = profile(project, "varying", *few, *compiled, "False", code=1)
    assert content["figures"]["diagnosis"] == "recompiling"
    assert content["figures"]["recompiles"] == 2  # one in each traced step
    assert statuses(content)["recompiles"] == "fail"
    assert "--compile.dynamic True" in content["advice"][0]
    torch.compiler.reset()


def test_a_damaged_trace_fails(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = project.module("workflow.profile")
    trace_steps = stage.trace_steps

    def damaging(*arguments: Any) -> Any:
        tracer = trace_steps(*arguments)
        for path in tracer.written:
            path.write_bytes(path.read_bytes()[:-1000])
        return tracer

    monkeypatch.setattr(stage, "trace_steps", damaging)
    content = profile(project, "damaged", code=1)
    assert statuses(content)["trace"] == content["status"] == "fail"
    assert "the trace is incomplete" in content["checks"][0]["measured"]
    assert content["figures"]["diagnosis"] is None


def test_a_damaged_result_of_compile_is_refused_before_anything_is_measured(
    project: Project, tmp_path: Path
) -> None:
    (tmp_path / "workflow").mkdir()
    (tmp_path / "workflow/compile.json").write_text("{}")
    line = project.refuses("profile", *Project.settings, "--run-dir", str(tmp_path))
    assert "compile.json is damaged" in line and line.count("compile.json") == 1
    assert not (tmp_path / "traces").exists()


def test_waits_outside_the_trace_count(project: Project) -> None:
    """The batches of eight workers arrive at once, and eight steps later all of them are late."""
    with_waits = project.module("workflow.profile").with_waits
    traced = {"data": 0.2, "host": 0.2, "kernels": 0.6}
    assert with_waits(traced, 0.1) is traced
    assert with_waits(traced, 0.6) == pytest.approx({"data": 0.6, "host": 0.1, "kernels": 0.3})


def test_what_is_no_trace_is_refused(project: Project, traces: Any, tmp_path: Path) -> None:
    """By an error that all ranks agree on; it fails the check."""
    whole = gzip.compress(json.dumps({"traceEvents": []}).encode())
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    path, group = tmp_path / "trace.json.gz", project.module("distributed").Group()
    for content in (b"", b"{}", whole[:-3], bytes(flipped), gzip.compress(b"[]"), whole):
        path.write_bytes(content)
        with pytest.raises(project.module("errors").RankError), group.together():
            traces.breakdown(traces.read_trace(path))
    with pytest.raises(ValueError, match="no step"):
        traces.breakdown(traces.read_trace(path))


def test_a_device_that_no_trace_tells_of(project: Project, traces: Any, tmp_path: Path) -> None:
    stage = project.module("workflow.profile")
    for unseen, status in ((False, "pass"), (True, "not_measured")):
        gate = project.module("workflow.stage").Stage("profile", project.config(run_dir=tmp_path))
        events = [step(0, 100), event("cpu_op", "aten::mm", 10, 20)]
        if not unseen:
            events.append(event("kernel", "gemm", 20, 90))
        gate.figures["trace"] = "trace.json.gz"
        stage.judge_steps(gate, torch.device("cuda"), [traces.breakdown(events)], 1e-4)
        assert {check["name"]: check["status"] for check in gate.checks}["shares"] == status
        assert gate.figures.get("diagnosis") == (None if unseen else "kernel-bound")


def test_what_baseline_rejected_is_not_advised(project: Project, tmp_path: Path) -> None:
    config = project.config(run_dir=tmp_path)
    remedies = project.module("workflow.profile").remedies
    assert remedies("input-bound", {}, None, config, 1) == [
        "--train.loader-workers 2",
        "a cheaper __getitems__",
    ]
    stage = project.module("workflow.stage").Stage("baseline", config)
    stage.figures["rejected"] = ["--train.loader-workers 2: within noise, 1.0 times as fast"]
    stage.check("c", True, measured="so", wanted="such")
    stage.close()
    assert remedies("input-bound", {}, None, config, 1) == ["a cheaper __getitems__"]


def test_windows_of_a_run(project: Project, traces: Any, tmp_path: Path) -> None:
    """They end at multiples of `every`, also after a resume; else torch is left alone."""
    run = project.module("train").run
    tracing = []

    def observe(state: Any, record: Any) -> None:
        tracing.append((state.step, torch.autograd._profiler_enabled()))

    window = {"profile__every": 6, "profile__warmup": 1, "profile__active": 2}
    config = project.config(run_dir=tmp_path, train__steps=9, **window)
    callbacks = [SimpleNamespace(after_step=observe)]
    assert run(config, callbacks).status == "finished"
    override = project.module("config").override
    assert run(override(config, {"train.steps": 20}), callbacks).status == "finished"
    found = sorted((tmp_path / "traces").iterdir())
    assert [path.name[:13] for path in found] == ["step_00000006", "step_00000012", "step_00000018"]
    assert [step for step, _ in tracing] == list(range(1, 21))
    # This callback comes before the profiler: it sees what its step has run under.
    assert {step for step, on in tracing if on} == {5, 6, 11, 12, 17, 18}
    for path in found:
        assert len(traces.breakdown(traces.read_trace(path)).seconds) == 2


def test_a_run_that_resumes_inside_a_window_waits_for_the_next(
    project: Project, traces: Any, tmp_path: Path
) -> None:
    """A trace of a part of its steps would look like a whole one."""
    window = {"profile__every": 5, "profile__warmup": 1, "profile__active": 3}
    run, override = project.module("train").run, project.module("config").override
    config = project.config(run_dir=tmp_path, train__steps=3, **window)
    assert run(config).status == "finished" and not (tmp_path / "traces").exists()
    assert run(override(config, {"train.steps": 10})).status == "finished"
    (found,) = (tmp_path / "traces").iterdir()
    assert found.name.startswith("step_00000010")
    assert len(traces.breakdown(traces.read_trace(found)).seconds) == 3


def test_windows_that_are_longer_than_their_interval(
    project: Project, traces: Any, tmp_path: Path
) -> None:
    """One follows the other, whole."""
    window = {"profile__every": 2, "profile__warmup": 1, "profile__active": 2}
    config = project.config(run_dir=tmp_path, train__steps=7, **window)
    assert project.module("train").run(config).status == "finished"
    found = sorted((tmp_path / "traces").iterdir())
    assert [path.name[:13] for path in found] == ["step_00000003", "step_00000006"]
    for path in found:
        assert len(traces.breakdown(traces.read_trace(path)).seconds) == 2


def test_a_run_with_several_windows_prints_no_warning(project: Project, tmp_path: Path) -> None:
    words = ["--train.steps", "9", "--profile.every", "3", "--profile.warmup", "1"]
    words += ["--profile.active", "1", "--run-dir", str(tmp_path)]
    outcome = project.python("-m", project.name, "train", *project.settings, *words)
    assert outcome.returncode == 0 and outcome.stderr.count("trace of 1 steps") == 3
    assert "WARNING" not in outcome.stderr


def test_a_trace_names_the_parts_of_a_step(project: Project, traces: Any, tmp_path: Path) -> None:
    """In each step, with two micro-batches."""
    window = {"profile__every": 4, "profile__warmup": 1, "profile__active": 2}
    changes = {**window, "train__micro_batch_size": 4}
    project.module("train").run(project.config(run_dir=tmp_path, train__steps=4, **changes))
    (path,) = (tmp_path / "traces").iterdir()
    names = Counter(event["name"] for event in traces.read_trace(path))
    assert (names["waiting for data"], names["forward"], names["backward"]) == (2, 4, 4)
    assert names["optimizer"] == 2


def test_a_window_that_is_cut_off_leaves_nothing(project: Project, tmp_path: Path) -> None:
    profiling = project.module("profiler")
    training = project.module("train")
    state = training.setup(project.config())
    plan = project.module("config").ProfileConfig(every=5, warmup=1, active=3)
    with profiling.Profiler(plan, tmp_path / "traces", state) as profiler:
        for _ in range(3):
            training.train_step(state, state.loader.next())
            profiler.after_step(state)
        assert torch.autograd._profiler_enabled()  # the loader annotates itself then
    assert not torch.autograd._profiler_enabled()
    assert not profiler.written and not (tmp_path / "traces").exists()


def test_advice_knows_what_was_measured(project: Project, traces: Any, tmp_path: Path) -> None:
    stage = project.module("workflow.profile")
    stages = project.module("workflow.stage")
    operator = {"name": "aten::mm", "self_seconds": 0.1, "calls": 9, "share": 0.5}
    empty = traces.Breakdown(np.ones((1, 5)), 0, True, traces.NamedGap(0.0, "a", "b"), [operator])

    def told(name: str, found: Any = empty, shares: Any = (0.2,) * 5, **changes: Any) -> str:
        named = dict(zip(traces.PARTS, shares, strict=True))
        return stage.advice(name, named, found, project.config(run_dir=tmp_path, **changes))

    assert "--compile.mode blocks" in told("kernel-bound")
    assert "--train.precision bf16" in told("kernel-bound", train__precision="fp32")
    assert "bf16" not in told("kernel-bound", empty._replace(device=False))
    assert "--train.micro-batch-size 8" in told("host-bound")
    config = project.config(run_dir=tmp_path)
    alone = dict.fromkeys(traces.PARTS, 0.2)
    # Two ranks have no room for larger micro-batches.
    assert "micro-batch" not in stage.advice("host-bound", alone, empty, config, 2)
    gap = empty._replace(longest_gap=traces.NamedGap(0.9, "aten::mm", "aten::add"))
    assert "after aten::mm and before aten::add" in told("host-bound", gap)
    assert "Python code at" in told("host-bound", gap)
    assert "Python code at" not in told("host-bound")
    # Tracing slows down the host: a gap is compared with the gaps of the same, traced, steps.
    short = empty._replace(longest_gap=traces.NamedGap(0.15, "aten::mm", "aten::add"))
    assert "Python code at" not in told("host-bound", short, shares=(0.2, 0.05, 0.5, 0.2, 0.05))
    assert "the device idles 20% of a step" in told("host-bound")
    on_cpu = told("host-bound", empty._replace(device=False))
    assert "device" not in on_cpu and "Python code outside of operators takes 20%" in on_cpu
    assert "--train.loader-workers 6" in told("input-bound", train__loader_workers=3)
    assert "uint8" in told("input-bound", shares=(0.1, 0, 0.2, 0, 0.7))
    assert "--train.global-batch-size" in told("communication-bound")
    nothing_left = "a smaller model or more devices, since the loop itself has little to gain"
    for best, wanted in (("none", nothing_left), ("full", "mode full (")):
        compiled = stages.Stage("compile", project.config(run_dir=tmp_path))
        compiled.figures["best"] = best
        compiled.close()
        assert wanted in told("kernel-bound")
        # More devices would not make the host faster.
        if best == "none":
            whole_batch = {"train__micro_batch_size": config.train.global_batch_size}
            hosted = told("host-bound", short, **whole_batch)
            assert "Try less Python code in a step" in hosted
    assert "--compile.mode" not in told("kernel-bound", compile__mode="full")
    shares = dict(zip(traces.PARTS, (0.2, 0.3, 0.4, 0.0, 0.1), strict=True))
    assert stage.diagnose(shares, 0) == ["kernel-bound", "input-bound", "host-bound"]
    assert stage.diagnose(shares, 1) == ["recompiling", "input-bound", "host-bound"]
    shares = stage.without_tracing(shares, 1.25)
    assert shares == pytest.approx(
        {"data": 0.25, "host": 0.125, "kernels": 0.5, "communication": 0, "copies": 0.125}
    )


def test_operators_are_those_of_torch(project: Project, traces: Any) -> None:
    """Without the annotations of the loop, and with compiled code, which is an annotation, too."""
    names = ("ProfilerStep#0", "forward", f"{traces.COMPILED} f ##")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as finished:
        x = torch.randn(64, 64, requires_grad=True)
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(torch.profiler.record_function(name))
            torch.nn.functional.gelu(x @ x).sum().backward()
    averages = finished.key_averages()
    found = traces.operators_of(averages, False, 2.0)
    ours = {operator["name"]: operator for operator in found}
    assert {name for name in names if name in ours} == {names[2]}
    for average in (
        it for it in averages if it.key.startswith("aten::") and it.self_cpu_time_total
    ):
        operator = ours[average.key]
        assert operator["calls"] == average.count
        assert operator["self_seconds"] == pytest.approx(average.self_cpu_time_total / 1e6)
        assert operator["share"] == pytest.approx(operator["self_seconds"] / 2)
    seconds = [operator["self_seconds"] for operator in found]
    assert seconds == sorted(seconds, reverse=True)


# Crafted traces, as torch.profiler writes them.


def event(cat: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> dict:
    place = {"pid": 0, "tid": 7} if cat in ("kernel", "gpu_memcpy", "gpu_memset") else {"pid": 50}
    base = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args}
    return base | {"tid": tid} | place


def step(start: float, end: float, number: int = 0) -> dict:
    return event("user_annotation", f"ProfilerStep#{number}", start, end)


def test_a_gpus_time_is_divided_without_counting_twice(traces: Any) -> None:
    events = [
        step(0, 100),
        step(100, 200, 1),
        event("gpu_user_annotation", "ProfilerStep#0", 0, 300, tid=7),
        event("user_annotation", traces.WAITING, 0, 15),
        event("cpu_op", "aten::mm", 15, 18, **{"External id": 3}),
        event("cpu_op", "aten::mm", 19, 20, tid=2, **{"External id": 4}),  # backward's thread
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10, 20),
        event("kernel", "gemm", 20, 60, **{"External id": 3}),
        event("kernel", "gemm", 40, 70, **{"External id": 4}),  # on another stream
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 90),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 85, 95),
        event("kernel", "gemm", 190, 230),  # beyond the last step
    ]
    found = traces.breakdown(events)
    parts = dict(zip(traces.PARTS, (found.seconds * 1e6).round(6).T.tolist(), strict=True))
    assert parts == {
        "data": [10, 0],
        "copies": [10, 0],
        "kernels": [60, 10],  # 20 to 70, 85 to 95; 190 to 200
        "communication": [15, 0],  # 70 to 85
        "host": [5, 90],
    }
    assert found.device
    seconds, after, before = found.longest_gap
    assert seconds == pytest.approx(90e-6)
    assert after.startswith("Memcpy DtoD") and before == "gemm"


def test_a_cpus_time_is_divided_without_counting_twice(traces: Any) -> None:
    events = [
        step(0, 100),
        event("user_annotation", traces.WAITING, 0, 20),
        event("cpu_op", "aten::stack", 5, 15),  # by the loader
        event("cpu_op", "autograd::engine::evaluate_function: AccumulateGrad", 20, 60),
        event("cpu_op", "torch::autograd::AccumulateGrad", 20, 60),  # a hook sleeps in it
        event("cpu_op", "aten::mm", 20, 30),
        event("cpu_op", "aten::linalg_vector_norm", 70, 90),  # of a sharded tensor
        event("cpu_op", "_c10d_functional::wait_tensor", 75, 85),
        event("user_annotation", "gloo:all_reduce", 25, 40, tid=2),
        event("user_annotation", "gloo:all_reduce", 74, 85, tid=3),
        event("user_annotation", "## Call CompiledFxGraph f ##", 95, 100),
    ]
    found = traces.breakdown(events)
    parts = dict(zip(traces.PARTS, (found.seconds[0] * 1e6).round(6).tolist(), strict=True))
    assert parts == {"data": 20, "kernels": 25, "communication": 20, "host": 35, "copies": 0}
    assert not found.device and found.longest_gap[0] == pytest.approx(30e-6)


# What each kind of event is, in a trace with a GPU and in one without, and how it ranks there.
KINDS = {
    ("user_annotation", "waiting for data"): ((3, "data"), (0, "data")),
    ("user_annotation", "gloo:all_reduce"): (None, (3, "communication")),
    ("cpu_op", "aten::mm"): (None, (2, "kernels")),
    ("cpu_op", "c10d::allreduce_"): (None, (1, "communication")),
    ("cpu_op", "autograd::engine::evaluate_function: X"): (None, None),
    ("cpu_op", "_compile.compile_inner (dynamo_timed)"): (None, None),
    ("kernel", "gemm"): ((0, "kernels"), None),
    ("kernel", "ncclDevKernel_AllGather"): ((1, "communication"), None),
    ("gpu_memcpy", "Memcpy HtoD"): ((2, "copies"), None),
    ("gpu_memset", "Memset"): ((0, "kernels"), None),
}
TIMES = st.tuples(st.integers(-50, 350), st.integers(0, 200))


@given(
    st.lists(st.tuples(st.sampled_from(list(KINDS)), TIMES, st.booleans()), max_size=25),
    st.lists(st.integers(1, 100), min_size=1, max_size=3),
)
def test_shares_add_up_whatever_happened(traces: Any, crafted: Any, lengths: list[int]) -> None:
    ends = np.cumsum(lengths).tolist()
    steps = [step(e - n, e, i) for i, (e, n) in enumerate(zip(ends, lengths, strict=True))]
    events = [event(*kind, at, at + n, tid=1 + away) for kind, (at, n), away in crafted]
    found = traces.breakdown(steps + events)
    shares = found.fractions
    assert sum(shares.values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in shares.values())
    assert found.seconds.sum(axis=1) * 1e6 == pytest.approx(lengths)
    assert 0 <= found.longest_gap[0] <= shares["host"] * found.seconds.sum() + 1e-12

    counted = dict.fromkeys(traces.PARTS, 0)  # moment by moment, where no interval is cut
    for moment in range(ends[-1]):
        layers = [
            KINDS[kind][not found.device]
            for kind, (at, n), away in crafted
            if at <= moment < at + n
            and (not away or kind[0] not in ("cpu_op", "user_annotation") or "gloo" in kind[1])
        ]
        counted[min(filter(None, layers), default=(9, "host"))[1]] += 1
    for part, share in shares.items():
        assert share * ends[-1] == pytest.approx(counted[part], abs=1e-6)


def test_ranks_that_wait_are_told_why(tmp_path: Path) -> None:
    """A slow all-reduce is communication; a rank that is late is judged by what makes it late."""
    names = {"profiled_ddp": "ddp", "profiled_fsdp": "fsdp"}
    sources = {n: bake(tmp_path / n, package_name=n, parallelism=p) for n, p in names.items()}
    sources = {name: folder / "src" for name, folder in sources.items()}
    (tmp_path / "text.txt").write_text("Was ever woman in this humour wooed? " * 100)
    output = drill("profiled.py", (2, str(tmp_path), *names), sources=sources)
    for name in names:
        assert f"{name} was profiled on 2 ranks" in output, output
    slow, late = (
        json.loads((tmp_path / name / "workflow/profile.json").read_text())["figures"]
        for name in names
    )
    assert slow["diagnosis"] == "communication-bound"
    assert {max(shares, key=shares.get) for shares in slow["ranks"]} == {"communication"}
    assert late["diagnosis"] == "input-bound"
    assert late["shares"] == late["ranks"][1]
    assert [max(it, key=it.get) for it in late["ranks"]] == ["communication", "data"]
    assert late["waiting_for_ranks"] > 0.1
    assert "mostly for rank 1" in output
