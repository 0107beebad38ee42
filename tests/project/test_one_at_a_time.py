"""What may run at once: runs in threads, two stages on one run; and a run in a notebook."""

import fcntl
import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import Project, bake, project_fixture, records
from tests.project.test_life import TINY, finish, start

project = project_fixture(
    "one_at_a_time", parallelism="single", checkpoint="torch_save", tracker="none"
)


def test_a_second_run_in_a_thread_is_refused_and_changes_nothing(
    project: Project, tmp_path: Path
) -> None:
    """Both would draw from torch's random numbers; the first gets those that it gets alone."""
    run, changes = project.module("train").run, {"train__steps": 4, "train__log_every": 1}
    refused: list[str] = []

    def second_run() -> None:
        try:
            run(project.config(run_dir=tmp_path / "second", **changes))
        except project.module("errors").UserError as error:
            refused.append(str(error))

    def after_step(state: Any, record: Any) -> None:
        thread = threading.Thread(target=second_run)
        thread.start()
        thread.join()

    callback = SimpleNamespace(after_step=after_step)
    run(project.config(run_dir=tmp_path / "first", **changes), [callback])
    assert len(refused) == 4 and not (tmp_path / "second").exists()
    assert refused[0].startswith("another run is active in this process")
    # One after the other they may.
    run(project.config(run_dir=tmp_path / "alone", **changes))
    losses = [[line["loss"] for line in records(tmp_path / name)] for name in ("first", "alone")]
    assert losses[0] == losses[1] and len(losses[0]) == 4


# As a notebook's kernel has it: a stream of text, with neither `reconfigure` nor a buffer.
NOTEBOOK = """
import io, sys

class Output(io.TextIOBase):
    def write(self, text):
        return sys.__stdout__.write(text)

sys.stdout, sys.stderr = Output(), Output()
from one_at_a_time import __main__
for words in (["train", "--preset", "tiny", "--train.steps", "2"], ["verify"]):
    sys.argv = ["notebook", *words, "--name", "in-a-notebook"]
    print("code", __main__.main())
"""


def test_a_notebook_shows_characters_whole(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is a byte of them."""
    infer, shown = project.module("infer"), io.StringIO()
    monkeypatch.setattr(infer, "generate", lambda *given: iter("é€".encode()))
    monkeypatch.setattr(sys, "stdout", shown)
    options = infer.InferConfig(prompt="ü")
    infer.infer(None, SimpleNamespace(encoding="bytes"), project.config(), options)
    assert shown.getvalue() == "üé€\n"


def test_commands_work_in_a_notebook(project: Project) -> None:
    done = project.python("-c", NOTEBOOK)
    assert done.stdout.count("code 0") == 2, done.stdout + done.stderr
    assert "finished at step 2" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("command", ["checkpoint", "workflow"])
def test_a_stage_that_is_under_way_refuses_a_second_one(
    project: Project, tmp_path: Path, command: str
) -> None:
    """In one line, before anything of the first one is removed."""
    words = (command, *project.settings, "--run-dir", str(tmp_path / "run"))
    work = tmp_path / "run/workflow"
    lock = work / f".{command}.lock"
    with subprocess.Popen(
        [sys.executable, "-m", project.name, *words],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": str(project.folder / "src")},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as first:
        try:
            deadline = time.monotonic() + 200
            while not (lock.exists() and lock.read_text()):
                assert time.monotonic() < deadline and first.poll() is None
                time.sleep(0.05)
            # The workflow's own lock keeps none of its stages out.
            while command == "checkpoint" and not (work / ".drill/settings.json").exists():
                assert time.monotonic() < deadline and first.poll() is None
                time.sleep(0.05)
            line = project.refuses(*words)
            assert line.startswith(f"{work}/{command}.json is in use by process {first.pid} on ")
            assert line.endswith("wait for it or stop it, or choose another --name")
            assert first.poll() is None
            if command == "checkpoint":
                assert (work / ".drill/settings.json").exists(), "that of the first one"
        finally:
            first.terminate()
            first.wait(60)


def test_ranks_run_a_stage_as_one(tmp_path: Path) -> None:
    """Only one process may have a stage, and launch.sh starts one process for each rank."""
    project = bake(tmp_path, package_name="one_stage", parallelism="ddp", tracker="none")
    words = ("bash", "launch.sh", "-n", "2", "profile", *TINY, "--name", "traced")
    work = project / "runs/traced/workflow"
    work.mkdir(parents=True)
    with (work / ".profile.lock").open("w") as lock:
        lock.write("process 5 on another-host\n")
        lock.flush()
        fcntl.lockf(lock, fcntl.LOCK_EX)
        with start(project, *words) as process:
            output = finish(process, codes=(2,))
        assert "error: runs/traced/workflow/profile.json is in use by process 5 on anot" in output
    with start(project, *words) as process:
        output = finish(process)
    assert output.count("ok   trace: ") == output.count("profile: pass") == 1
    assert "ranks wait" in output
