"""The part of the kill storm that goes through scripts/launch.sh and torchrun, or plain starts."""
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path


def start(source, plan, run_dir, **environment):
    words = ["train", "--preset", "tiny", "--device", "cpu", "--run-dir", str(run_dir)]
    for name, value in plan.settings.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    command = [sys.executable, "-m", plan.package]
    if plan.ranks:
        command = ["bash", str(source.parent / "scripts/launch.sh"), "-n", str(plan.ranks)]
    return subprocess.Popen([*command, *words], env={**os.environ, "PYTHONPATH": str(source), "PYTHON": sys.executable, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(process):
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    return out
