"""A console that goes away and a hangup: real starts, plain and under torchrun."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Project

PLAIN = f"{sys.executable} -m of_terminals"
RANKS = "./launch.sh -n 2"
STEPS = 60
PRINTING = """

import sys

_others = callbacks


class Printing:
    def after_step(self, state, record):
        print("to stdout", flush=True)
        print("to stderr", file=sys.stderr, flush=True)


def callbacks(config, run_dir):
    return (*_others(config, run_dir), Printing())
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with Project.imported(tmp_path_factory.mktemp("terminal"), "of_terminals") as project:
        text = "Was ever woman in this humour wooed? Was ever woman in this humour won? "
        (project.folder / "text.txt").write_text(text * 200)
        with (project.folder / "src/of_terminals/callbacks.py").open("a") as file:
            file.write(PRINTING)
        yield project


def train(
    project: Project, run_dir: Path, start: str, *redirections: str, before: str = "", steps: int
) -> list[str]:
    """A line of a shell that trains."""
    words = f"train --preset tiny --device cpu --data.path text.txt --run-dir {run_dir}"
    words += f" --train.steps {steps} --train.log-every 1 --checkpoint.every 100000"
    return ["bash", "-c", f"{before} exec {start} {words} {' '.join(redirections)}"]


def environment(project: Project) -> dict[str, str]:
    source = str(project.folder / "src")
    return {**os.environ, "PYTHONPATH": source, "PYTHON": sys.executable, "GRACE_SECONDS": "60"}


def start(project: Project, command: list[str], **streams: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, cwd=project.folder, env=environment(project), start_new_session=True, **streams
    )


def wait_for(run_dir: Path, steps: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until so many steps are logged."""
    end, path = time.monotonic() + 120, run_dir / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < steps:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def status(run_dir: Path) -> tuple[str, int]:
    content = json.loads((run_dir / "status.json").read_text("utf-8"))
    return content["status"], content["step"]


def finished(run_dir: Path, steps: int) -> bool:
    """Whether the run went on to its end, and its log says so."""
    log = (run_dir / "logs/train.log").read_text("utf-8")
    assert status(run_dir) == ("finished", steps), log[-2000:]
    return f"step {steps}/{steps} " in log


@pytest.mark.parametrize("start_by", [PLAIN, RANKS], ids=["plain", "ranks"])
def test_closed_streams_end_nothing(project: Project, tmp_path: Path, start_by: str) -> None:
    command = train(project, tmp_path, start_by, "<&- >&- 2>&-", steps=3)
    assert start(project, command).wait(300) == 0
    assert finished(tmp_path, 3)


@pytest.mark.parametrize("start_by", [PLAIN, RANKS], ids=["plain", "ranks"])
def test_a_reader_that_leaves_ends_nothing(project: Project, tmp_path: Path, start_by: str) -> None:
    """As after `2>&1 | head -1`; what callbacks print is lost as well."""
    command = train(project, tmp_path, start_by, "2>&1", steps=STEPS)
    process = start(project, command, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline()
    process.stdout.close()
    assert process.wait(300) == 0
    assert finished(tmp_path, STEPS)


def test_a_terminal_that_is_closed_ends_nothing(project: Project, tmp_path: Path) -> None:
    """The hangup is ignored, as after `nohup`."""
    ours, theirs = pty.openpty()
    command = train(project, tmp_path, PLAIN, before="trap '' HUP;", steps=STEPS)
    process = start(project, command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    wait_for(tmp_path, 2, process)
    os.close(ours)
    assert process.wait(300) == 0
    assert finished(tmp_path, STEPS)


@pytest.mark.parametrize("start_by", [PLAIN, RANKS], ids=["plain", "ranks"])
def test_a_hangup_saves_and_stops(project: Project, tmp_path: Path, start_by: str) -> None:
    command = train(project, tmp_path, start_by, "2>&1", steps=100_000)
    process = start(project, command, stdout=subprocess.PIPE)
    wait_for(tmp_path, 2, process)
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == (0 if start_by == PLAIN else 128 + signal.SIGHUP), output
    assert status(tmp_path)[0] == "preempted" and b"SIGHUP: stopping after" in output
    assert len([*(tmp_path / "checkpoints").glob("step_*")]) == 1


@pytest.mark.parametrize("start_by", [PLAIN, RANKS], ids=["plain", "ranks"])
def test_a_hangup_does_nothing_under_nohup(project: Project, tmp_path: Path, start_by: str) -> None:
    command = train(project, tmp_path, start_by, "2>&1", before="trap '' HUP;", steps=STEPS)
    process = start(project, command, stdout=subprocess.PIPE)
    wait_for(tmp_path, 2, process)
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and finished(tmp_path, STEPS), output
