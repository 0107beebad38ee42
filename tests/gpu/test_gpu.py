"""What has to hold on a CUDA device: by `make gpu`, or with TEST_DEVICE=cpu on what is there."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common import beside_own_packages
from tests.conftest import Project, project_fixture

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "TEST_DEVICE" not in os.environ and not torch.cuda.is_available(),
        reason="no CUDA device (TEST_DEVICE=cpu tries it on the CPU)",
    ),
]
# On a CPU the whole workflow is tested, which has these two in it.
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="test_whole_workflow.py has it on a CPU")
project = project_fixture("on_gpu", checkpoint="dcp_async", tracker="none")
sharded = project_fixture("on_gpus", parallelism="fsdp", text="tokenizer", tracker="none")


def train(project: Project, run_dir: Path, *words: str) -> str:
    """Train in a process of its own, as deterministic kernels ask for; what it prints."""
    command = [sys.executable, "-u", "-m", project.name, "train", "--preset", "tiny"]
    command += ["--device", DEVICE, "--data.path", "text.txt", "--run-dir", str(run_dir)]
    outcome = subprocess.run(
        [*command, *words],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": beside_own_packages("src")},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return outcome.stdout + outcome.stderr


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """A synchronisation of the host with the device is an error."""
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def test_a_resume_is_exact(project: Project, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(project, whole, "--train.deterministic")
    shutil.copytree(whole, resumed)
    for step in (15, 20):
        shutil.rmtree(resumed / f"checkpoints/step_{step:08}")
    train(project, resumed, "--train.deterministic")
    one, other = (project.tensors(where, 20) for where in (whole, resumed))
    assert one and same(one, other)


def test_a_bad_step_is_skipped_without_waiting_for_the_device(project: Project) -> None:
    loop, loss = project.module("train"), project.module("loss")
    config = project.config(device=DEVICE, compile__mode="none")
    state = loop.setup(project.module("config").override(config, {"device": DEVICE}))
    compute = project.module("model").compute_loss

    def nan(model: torch.nn.Module, batch: Any) -> Any:
        found = compute(model, batch)
        return loss.LossSum(found.total * float("nan"), found.count, found.metrics)

    loop.train_step(state, state.loader.next())  # makes what the first step makes
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    batches = [state.loader.next() for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch, no_waiting():
        patch.setattr(loop, "compute_loss", nan)
        loop.train_step(state, batches[0])
        loop.train_step(state, batches[1])
    assert same(state.model.state_dict(), before)
    assert int(state.bad_steps) == 2
    with no_waiting():
        loop.train_step(state, batches[2])
    assert not same(state.model.state_dict(), before)
    state.loader.close()


def test_what_is_staged_is_the_step_that_was_saved(project: Project, tmp_path: Path) -> None:
    """However many steps follow at once while the copies are made and written."""
    loop, config = project.module("train"), project.config(device=DEVICE, run_dir=tmp_path)
    state = loop.setup(project.module("config").override(config, {"device": DEVICE}))
    (tmp_path / "checkpoints").mkdir()
    group = project.module("distributed").Group(state.world)
    with loop.resume(state, tmp_path, group) as checkpointer:
        for _ in range(5):
            loop.train_step(state, state.loader.next())
            wanted = {name: value.clone() for name, value in state.model.state_dict().items()}
            checkpointer.save(state.step)
            for _ in range(3):
                loop.train_step(state, state.loader.next())
            checkpointer.settle()
            found = project.tensors(tmp_path, checkpointer.last_good)
            for name, value in wanted.items():
                (saved,) = [v for key, v in found.items() if key.endswith(name) and "model" in key]
                assert torch.equal(saved.cpu(), value.cpu()), name
        checkpointer.close()
    state.loader.close()


@on_a_gpu
def test_a_restart_compiles_warm(project: Project, tmp_path: Path) -> None:
    """From what the first start has left in the compile cache, in a process of its own."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    try:
        seconds = []
        for name in ("cold", "warm"):
            output = train(project, tmp_path / name, "--compile.mode", "full", "--train.steps", "3")
            (found,) = re.findall(r"compiled \d+ graphs in ([\d.]+) s", output)
            seconds.append(float(found))
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert seconds[1] < 0.7 * seconds[0], seconds


@on_a_gpu
@pytest.mark.parametrize("mode", ["none", "blocks"])
def test_a_rank_on_each_gpu_trains_and_resumes(sharded: Project, tmp_path: Path, mode: str) -> None:
    """By torchrun and NCCL, under FSDP, with a mask for separate documents by FlexAttention."""
    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        generator.integers(0, 300, 40_000, dtype=np.uint16).tofile(tmp_path / f"{part}.bin")
    words = ["train", "--preset", "tiny", "--data.path", str(tmp_path), "--data.vocabulary", "300"]
    words += ["--data.documents", "separate", "--data.end-of-text", "0", "--device", DEVICE]
    words += ["--compile.mode", mode, "--run-dir", str(tmp_path / "run"), "--train.steps"]
    own = {"PYTHONPATH": beside_own_packages("src"), "PYTHON": sys.executable}
    for steps in ("10", "20"):
        outcome = subprocess.run(
            ["bash", "launch.sh", *words, steps],
            cwd=sharded.folder,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=300,
        )
        output = outcome.stdout + outcome.stderr
        assert outcome.returncode == 0, output[-3000:]
        assert f"finished at step {steps}" in output
        assert "flex_attention called without" not in output  # the sample, too
    assert f"ranks: {torch.cuda.device_count()}" in output
    assert "resumed at step 10" in output


@on_a_gpu
def test_all_stages_end_and_none_fails(project: Project, tmp_path: Path) -> None:
    words = ("--preset", "tiny", "--device", DEVICE, "--data.path", "text.txt")
    project("workflow", *words, "--run-dir", str(tmp_path))
    results = [json.loads(file.read_text()) for file in tmp_path.glob("workflow/*.json")]
    statuses = {content["stage"]: content["status"] for content in results if "stage" in content}
    assert {"baseline", "compile", "profile", "scale", "checkpoint"} <= set(statuses)
    assert "fail" not in statuses.values(), statuses
    assert list(tmp_path.glob("traces/*.json.gz"))


@on_a_gpu
def test_the_memory_of_a_rank_is_measured(project: Project, tmp_path: Path) -> None:
    words = ("--preset", "tiny", "--device", DEVICE, "--data.path", "text.txt")
    project("scale", *words, "--run-dir", str(tmp_path), "--workflow.ranks", "1")
    content = json.loads((tmp_path / "workflow/scale.json").read_text())
    statuses = {check["name"]: check["status"] for check in content["checks"]}
    assert statuses["memory"] == "pass", content["checks"]
