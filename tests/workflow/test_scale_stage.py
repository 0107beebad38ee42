"""The scale stage: every check passes where it should, fails where it should, and says why not.

A real run of two gloo ranks (FSDP whose model looks at its rank; DDP that is right runs in
test_whole_workflow.py); the rest judges made-up records or measures in this process.
"""

import copy
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from tests.conftest import Project, project_fixture

pytestmark = pytest.mark.usefixtures("one_thread")
project = project_fixture("scaled")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """With a loss that is a thousandth larger on rank 1."""
    where = tmp_path_factory.mktemp("sharded")
    with Project.imported(where, "sharded", parallelism="fsdp") as it:
        model = it.folder / "src/sharded/model.py"
        text = model.read_text("utf-8").replace("import math\n", "import math\nimport os\n")
        right = "total = model(inputs, targets)\n"
        assert right in text
        wrong = right + '    total = total * (1 + 1e-3 * int(os.environ.get("RANK", 0)))\n'
        model.write_text(text.replace(right, wrong), "utf-8")
        yield it


def stage_of(project: Project, run: str) -> dict[str, Any]:
    with_path = project.folder / "runs" / run / "workflow/scale.json"
    return json.loads(with_path.read_text("utf-8"))


def statuses(content: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in content["checks"]}


def test_what_depends_on_the_rank_is_found(
    sharded: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = sharded.module("workflow.scale")
    start = scale.run_task

    def run_task(module: str, folder: Path, task: str, **options: Any) -> dict[str, Any]:
        """One rank in this process, which has imported all that it needs."""
        if task != "1":
            return start(module, folder, task, **options)
        monkeypatch.setattr(scale.sys, "argv", ["scale", str(folder)])
        assert scale.main() == 0
        return json.loads((folder / "1.json").read_text("utf-8"))

    monkeypatch.setattr(scale, "run_task", run_task)
    with pytest.raises(AssertionError):
        sharded("scale", *sharded.settings, "--workflow.ranks", "2", "--name", "wrong")
    content = stage_of(sharded, "wrong")
    assert content["status"] == "fail"
    assert {name for name, status in statuses(content).items() if status == "fail"} == {
        "same_losses"
    }
    (failed,) = (check for check in content["checks"] if check["status"] == "fail")
    assert "depends on the rank" in failed["advice"]
    for ranks in ("1", "2"):
        assert content["figures"]["ranks"][ranks]["memory"]["measured"] > 1e6
    change = """cruft update --variables-to-update '{"parallelism": "ddp"}'"""
    assert any(change in text for text in content["advice"])


def test_what_one_process_cannot_measure_is_said(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = record(1.0)
    for kind in ("strong", "weak"):
        found[kind] |= {"samples_per_second": 8.0}
    monkeypatch.setattr(project.module("workflow.scale"), "run_task", lambda *_, **__: found)
    project("scale", *project.settings, "--workflow.ranks", "1", "--name", "one")
    content = stage_of(project, "one")
    assert content["status"] == "not_measured"
    checks = {check["name"]: check for check in content["checks"]}
    assert checks.pop("memory")["status"] == "pass"
    for check in checks.values():
        assert check["status"] == "not_measured"
        assert "--workflow.ranks is 1" in check["measured"]
    assert list(content["figures"]["ranks"]) == ["1"] and not content["figures"]["weak_efficiency"]
    assert any("which this project uses" in text for text in content["advice"])


def test_a_model_too_large_for_one_process(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale, errors = project.module("workflow.scale"), project.module("errors")

    def run_task(*arguments: Any, **options: Any) -> None:
        raise errors.RankError(f"it ended with exit code 1:\n{problem}")

    monkeypatch.setattr(scale, "run_task", run_task)
    problem = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    project("scale", *project.settings, "--name", "large")
    content = stage_of(project, "large")
    assert set(statuses(content).values()) == {"not_measured"}
    assert "out of memory" in content["checks"][0]["measured"]
    assert '{"parallelism": "fsdp"}' in content["advice"][0]
    # A project with FSDP is not told to change to it.
    monkeypatch.setattr(scale.parallel, "SHARDED", True)
    project("scale", *project.settings, "--name", "sharded")
    (advice,) = stage_of(project, "sharded")["advice"]
    assert "fit --name sharded" in advice and "fsdp" not in advice
    problem = "ZeroDivisionError"
    assert "ZeroDivisionError" in project.refuses("scale", *project.settings)


def test_too_little_memory_for_float32_costs_the_comparison_alone(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale, errors = project.module("workflow.scale"), project.module("errors")

    def compare(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def run_task(module: str, folder: Path, task: str, **options: Any) -> None:
        monkeypatch.setattr(scale.sys, "argv", ["scale", str(folder)])
        try:
            scale.main()
        except torch.OutOfMemoryError as error:
            raise errors.RankError(f"it ended with exit code 1:\n{error}") from error

    monkeypatch.setattr(scale, "compare", compare)
    monkeypatch.setattr(scale, "run_task", run_task)
    project("scale", *project.settings, "--workflow.ranks", "1", "--name", "tight")
    content = stage_of(project, "tight")
    assert statuses(content)["memory"] == "pass"
    measured = {check["name"]: check["measured"] for check in content["checks"]}
    assert "float32, in which losses are compared, ran out of memory" in measured["same_losses"]
    assert content["figures"]["ranks"]["1"]["strong"]["samples_per_second"] > 0


def test_numbers_of_processes(project: Project, sharded: Project) -> None:
    def sizes(which: Project, **changes: Any) -> tuple[list[int], str]:
        scale = which.module("workflow.scale")
        config = which.config(**{"train__global_batch_size": 64, **changes})
        return scale.world_sizes(config, torch.device("cpu"))

    assert sizes(project) == ([1, 2], "")
    assert sizes(project, workflow__ranks=5) == ([1, 2, 4, 5], "")
    assert sizes(project, workflow__ranks=8) == ([1, 2, 4, 8], "")
    assert sizes(project, workflow__ranks=1)[0] == [1] and sizes(project, workflow__ranks=1)[1]
    only, reason = sizes(project, train__global_batch_size=1)
    assert only == [1] and "cannot be divided" in reason
    assert sizes(sharded, workflow__ranks=8, parallel__replicate=4) == ([1, 4, 8], "")
    only, reason = sizes(sharded, workflow__ranks=6, parallel__replicate=4)
    assert only == [1] and "6 ranks cannot be divided evenly among 4 copies" in reason
    with pytest.raises(project.module("errors").UserError, match="global-batch-size is 64"):
        sizes(project, workflow__ranks=65)


def record(step: float, memory: int = 500) -> dict[str, Any]:
    """What a rank of a well-behaved project leaves."""
    pace = {"interval": [step, 0.9 * step, 1.1 * step]}
    return {
        "random": False,
        "losses": [3.0, 2.0],
        "gradient_norms": [1.0, 0.5],
        "strong": dict(pace),
        "weak": dict(pace),
        "memory": {"measured": memory},
    }


class Judged:
    """The functions of `scale` on records, with the one check that each leaves."""

    def __init__(self, project: Project, name: str) -> None:
        self.project, self.name = project, name

    def __call__(self, *arguments: Any) -> tuple[str, str, str]:
        """Status, what was measured, advice."""
        module, scale = (self.project.module(f"workflow.{name}") for name in ("stage", "scale"))
        run_dir = self.project.folder / "runs/judged"
        stage = module.Stage("scale", self.project.config(run_dir=run_dir))
        getattr(scale, self.name)(stage, *arguments)
        (check,) = stage.checks
        return check["status"], check["measured"], check["advice"]


def test_losses_are_judged(project: Project) -> None:
    judged = Judged(project, "judge_losses")
    records = {1: record(1.0), 2: record(0.5), 4: record(0.3)}
    assert judged(records, "")[0] == "pass"
    assert judged(records, "why not")[:2] == ("not_measured", "why not")
    for key, value, status in (
        ("losses", 2.0 * (1 + 5e-5), "pass"),
        ("losses", 2.0 * (1 + 2e-4), "fail"),
        ("losses", float("nan"), "fail"),
        ("gradient_norms", 0.5 * (1 + 5e-4), "pass"),
        ("gradient_norms", 0.5 * (1 + 2e-3), "fail"),
    ):
        changed = copy.deepcopy(records)
        changed[2][key][1] = value
        assert judged(changed, "")[0] == status, (key, value)
    nothing = copy.deepcopy(records)
    for each in nothing.values():
        each["losses"] = [None] * len(each["losses"])  # as JSON has a NaN
    assert judged(nothing, "")[0] == "fail"
    records[1]["random"] = True
    status, measured, _ = judged(records, "")
    assert status == "not_measured" and "in evaluation mode too" in measured


def test_a_declared_loss_is_not_compared(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project.module("workflow.scale"), "need_not_add_up", lambda: True)
    records = {1: record(1.0), 2: record(0.5) | {"losses": [9.0, 9.0]}}
    status, measured, _ = Judged(project, "judge_losses")(records, "")
    assert status == "not_measured" and "ADDS_UP = False" in measured


def test_efficiencies_are_judged(project: Project) -> None:
    judged = Judged(project, "judge_efficiency")
    records = {1: record(1.0), 2: record(0.625)}
    measured = judged("strong", records, "", "cpu")[1]
    assert (found := re.fullmatch(r"2 ranks 80% \((\d+)% to (\d+)%\)", measured))
    assert int(found[1]) < 80 < int(found[2])
    assert judged("weak", records, "", "cpu")[1].startswith("2 ranks 160% (")
    for device, kind, step, status in (
        ("cpu", "weak", 3.0, "pass"),  # recorded, whatever it is
        ("cpu", "weak", float("nan"), "fail"),
        ("cuda", "weak", 1.2, "pass"),
        ("cuda", "weak", 1.3, "fail"),
        ("cuda", "strong", 0.9, "pass"),
        ("cuda", "strong", 1.1, "fail"),  # two are slower than one
    ):
        records = {1: record(1.0), 2: record(step)}
        assert judged(kind, records, "", device)[0] == status, (device, kind, step)
    assert judged("weak", records, "why not", "cuda")[:2] == ("not_measured", "why not")
    slow = {1: record(1.0), 2: record(2.0)}
    assert "synchronizations" in judged("weak", slow, "", "cuda")[2]


def test_memory_is_judged_and_ddp_or_fsdp_follows(
    project: Project, sharded: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(peaks: tuple[int, int], device: str = "cuda", which: Project = project) -> Any:
        """Status, and advice, of a rank of one and of two, where there are 1,000 bytes."""
        scale = which.module("workflow.scale")
        properties = SimpleNamespace(total_memory=1000)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(scale, "free_host_memory", lambda: 1000)
        config = which.config(run_dir=which.folder / "runs/judged")
        stage = which.module("workflow.stage").Stage("scale", config)
        records = {ranks: record(1.0, peak) for ranks, peak in enumerate(peaks, 1)}
        scale.judge_memory(stage, records, torch.device(device))
        return stage.checks[0]["status"], stage.checks[0]["measured"], *stage.advice

    status, measured, advice = judged((900, 940))
    counted = r"; `fit` predicts (\d[\d.]* [kM]B), (\d[\d.]* [kM]B)"
    beginning = "peak per rank: 1 rank 900 B, 2 ranks 940 B, of 1 kB"
    assert status == "pass" and re.fullmatch(re.escape(beginning) + counted, measured)
    assert (
        advice == "one process with the whole state needs 900 B: use DDP, which this project uses"
    )
    status, _, advice = judged((900, 960))
    assert status == "fail" and "use FSDP" in advice
    assert '{"parallelism": "fsdp"}' in advice
    status, _, advice = judged((960, 500), which=sharded)  # of a GPU each
    assert status == "fail" and "use FSDP, which this project uses" in advice
    assert '{"parallelism": "ddp"}' in judged((900, 500), which=sharded)[2]
    status, measured, advice = judged((470, 470), "cpu")
    assert status == "pass" and measured.endswith("of 1 kB shared by all ranks")
    assert judged((470, 480), "cpu")[0] == "fail"  # the two together
    assert "`fit`" not in measured, "that is of tensors, and this of the process"
    status, _, advice = judged((480, 300), "cpu", sharded)
    assert status == "pass" and "use FSDP, which this project uses" in advice


def test_a_model_without_blocks_is_told_to_name_some(
    sharded: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parallel = sharded.module("distributed.parallel")
    for name in (
        "check_ranks",
        "build_mesh",
        "fully_shard",
        "move_to_device",
        "check_replaced",
    ):
        monkeypatch.setattr(parallel, name, lambda *args, **options: None)
    for rank, named in ((0, True), (1, False)):
        caplog.clear()
        world = SimpleNamespace(distributed=True, rank=rank, size=2)
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        parallel.wrap(model, [model[1]], sharded.config().parallel, world, torch.float32)
        assert ("blocks(model) in model.py returns no modules" in caplog.text) == named
        parallel.wrap(model, [model[0]], sharded.config().parallel, world, torch.float32)
        assert caplog.text.count("blocks(model)") == named


class Statistics(nn.Module):
    """Batch statistics, in a module that is known for them or in a buffer of one's own."""

    def __init__(self, norm: nn.Module, width: int, own: bool) -> None:
        super().__init__()
        self.norm, self.own = norm, own
        self.batch = nn.Identity() if own else nn.BatchNorm1d(width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise; x is [batch, time, width]."""
        x = self.batch(self.norm(x).transpose(1, 2)).transpose(1, 2)
        if self.own and self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
            x = x - self.mean
        return x


class Noise(nn.Module):
    """Draws in training, or always."""

    def __init__(self, norm: nn.Module, always: bool) -> None:
        super().__init__()
        self.norm, self.always = norm, always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise; x is [batch, time, width]."""
        x = self.norm(x)
        return x + 0.1 * torch.rand_like(x) if self.always or self.training else x


@pytest.mark.parametrize(
    ("module", "random"),
    [
        (None, False),
        (lambda norm: Statistics(norm, 32, own=False), False),
        (lambda norm: Statistics(norm, 32, own=True), False),
        (lambda norm: Noise(norm, False), False),
        (lambda norm: Noise(norm, True), True),
    ],
)
def test_losses_do_not_depend_on_what_training_draws_or_averages(
    project: Project, monkeypatch: pytest.MonkeyPatch, module: Any, random: bool
) -> None:
    """Dropout and batch statistics by rank change no loss; drawing in evaluation is noticed."""
    training, scale = project.module("train"), project.module("workflow.scale")
    build, seed, compared = training.build_model, training.seed_random, []

    def changed(config: Any, spec: Any) -> nn.Module:
        model = build(config, spec)
        model.norm = module(model.norm) if module else model.norm
        return model

    monkeypatch.setattr(training, "build_model", changed)
    config = project.config()
    world = training.join(config.parallel, config.device)
    for rank, size in ((0, 4), (1, 2)):  # as if it were of that rank, and other micro-batches

        def as_rank(*words: int, device: Any, rank: int = rank) -> None:
            seed(*words[:-1], rank, device=device)

        monkeypatch.setattr(training, "seed_random", as_rank)
        changes = {"train.micro_batch_size": size}
        override = project.module("config").override
        compared.append(scale.compare(override(config, changes), world))
    assert compared[0]["random"] == random
    same = compared[0]["losses"] == pytest.approx(compared[1]["losses"], rel=1e-5)
    assert same == (not random)


def test_settings_that_are_right_only_together_travel(project: Project, tmp_path: Path) -> None:
    """As the settings of a run and of the stage's processes do."""
    config = project.module("config")
    odd = config.override(config.Config(), {"model.heads": 5, "model.width": 100})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(project.module("files").to_json(odd)), "utf-8")
    assert config.load(file) == odd
    with pytest.raises(project.module("errors").UserError, match=r"model\.size is not a setting"):
        config.override(odd, {"model.size": 3})


RANK = """
import os, time
from pathlib import Path
from scaled.distributed.world import die_with_the_launcher
die_with_the_launcher()  # as `join` does
Path(f"new-{os.environ['RANK']}").write_text(f"{os.getpid()} {os.getppid()}")
os.rename(f"new-{os.environ['RANK']}", f"rank-{os.environ['RANK']}")
time.sleep(600)
"""
STAGE = """
from scaled.workflow.processes import run_module
run_module("rank", ranks=2, seconds=600)
"""


def test_a_stage_that_is_killed_leaves_nothing_behind(project: Project, tmp_path: Path) -> None:
    """By SIGKILL, after which it can end nothing itself: torchrun and its ranks end with it."""
    (tmp_path / "rank.py").write_text(RANK)
    paths = os.pathsep.join([str(project.folder / "src"), str(tmp_path)])
    command, environment = [sys.executable, "-c", STAGE], os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as stage:
        deadline = time.monotonic() + 300
        while len(files := [*tmp_path.glob("rank-*")]) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        left = {int(pid) for file in files for pid in file.read_text().split()}
        stage.kill()
    assert len(left) == 3  # torchrun, and two ranks
    deadline = time.monotonic() + 60
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if runs(pid)}
        time.sleep(0.1)
    assert not left


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
