"""What the tests share: the tiny preset, and runs of it in this process or under torchrun."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from {{ cookiecutter.package_name }} import config
from {{ cookiecutter.package_name }}.config import override
from {{ cookiecutter.package_name }}.train import State, run

PACKAGE = config.__package__


def tiny(run_dir: Path, **changes: Any) -> config.Config:
    """The tiny preset on the CPU in `run_dir`; changes as in train__steps=7."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    quiet = {"run_dir": run_dir, "device": "cpu", "track": False}
    return override(config.preset("tiny"), quiet | named)


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by step, from metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def train(settings: config.Config) -> dict[str, torch.Tensor]:
    """Run to the end in this process; the final weights."""
    final: dict[str, torch.Tensor] = {}

    def keep(state: State, record: dict | None) -> None:
        if state.step == settings.train.steps:
            final.update({k: v.clone() for k, v in state.model.state_dict().items()})

    run(settings, [after_step(keep)])
    return final


def after_step(call: Callable[[State, dict | None], None]) -> SimpleNamespace:
    """A callback of this method alone."""
    return SimpleNamespace(after_step=call)


def launch(ranks: int, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command on `ranks` processes of this machine; nothing of it outlives the call."""
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    with subprocess.Popen(
        [*command, PACKAGE, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{arguments} took more than {timeout} s:\n{process.communicate()[0]}")
    return subprocess.CompletedProcess(process.args, process.returncode, output)
