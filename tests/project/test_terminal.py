"""What only real starts show, plain and under torchrun.

A console that goes away, a hangup, what is set before torch is imported, a user without a name.
"""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import Project
from tests.project.test_life import descendants

PLAIN = f"{sys.executable} -m of_terminals"
RANKS = "./launch.sh -n 2"
STEPS = 60
PRINTING = """

import json
import os
import sys

_others = callbacks


class Printing:
    def after_step(self, state, record):
        print("to stdout", flush=True)
        print("to stderr", file=sys.stderr, flush=True)


def callbacks(config, run_dir):
    if "SHOWN" in os.environ:
        print("environment", json.dumps(dict(os.environ)), flush=True)
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
    assert status(tmp_path)[0] == "preempted" and b"SIGHUP: stopping as soon as" in output
    assert len([*(tmp_path / "checkpoints").glob("step_*")]) == 1


@pytest.mark.parametrize("start_by", [PLAIN, RANKS], ids=["plain", "ranks"])
def test_a_hangup_does_nothing_under_nohup(project: Project, tmp_path: Path, start_by: str) -> None:
    command = train(project, tmp_path, start_by, "2>&1", before="trap '' HUP;", steps=STEPS)
    process = start(project, command, stdout=subprocess.PIPE)
    wait_for(tmp_path, 2, process)
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and finished(tmp_path, STEPS), output


def test_what_is_set_for_torch_comes_in_time(project: Project, tmp_path: Path) -> None:
    """Nothing that a start imports sets it first, and OpenMP has read it; the user's own wins.

    A Python of its own, since OpenMP reads its variables when torch is imported.
    """
    world = project.module("distributed.world")
    ours = {*world.NCCL, *world.ON_LOOPBACK, *world.ON_MANY_RANKS}
    others = {name: value for name, value in environment(project).items() if name not in ours}
    for name in ("GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        others.pop(name, None)
    (command,) = train(project, tmp_path / "run", PLAIN, steps=1)[2:]
    theirs = {"GOMP_SPINCOUNT": "7", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    for own in ({}, theirs):
        done = subprocess.run(
            ["bash", "-c", f"{command} --fresh"],
            cwd=project.folder,
            env={**others, "OMP_DISPLAY_ENV": "VERBOSE", "SHOWN": "1", **own},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        if "OPENMP DISPLAY ENVIRONMENT" in done.stderr:  # where OpenMP is GNU's
            assert f"GOMP_SPINCOUNT = '{own.get('GOMP_SPINCOUNT', 3000)}'" in done.stderr
        (shown,) = (line for line in done.stdout.splitlines() if line.startswith("environment "))
        found = json.loads(shown.partition(" ")[2])
        assert not ours & found.keys(), "a rank could no longer set it"
        assert found["GOMP_SPINCOUNT"] == own.get("GOMP_SPINCOUNT", "3000")
        allocator = None if own else "expandable_segments:True"  # which has two names
        assert found.get("PYTORCH_ALLOC_CONF") == allocator


def test_a_name_that_is_no_text_is_shown(project: Project, tmp_path: Path) -> None:
    """On standard output, which would refuse it."""
    command = train(project, tmp_path / "run", PLAIN, steps=1)
    subprocess.run(command, cwd=project.folder, env=environment(project), check=True, timeout=300)
    line = f"exec {PLAIN} export --run-dir {tmp_path}/run --to {tmp_path}/$'\\xff'.pt"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=project.folder,
        env=environment(project) | {"PYTHONUTF8": "1"},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert b"\\udcff.pt" in done.stdout and (tmp_path / "\udcff.pt").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_user_without_name_or_home_trains(project: Project, tmp_path: Path) -> None:
    """As in a container that runs under any number; Python and this render are bound to /mnt."""
    site, python = Path(torch.__file__).parents[1], f"python{sys.version_info[0]}"
    shutil.copytree(project.folder, work := tmp_path / "work")
    for path in (work, *work.rglob("*")):
        os.chown(path, 12345, 12345)
    become = "setpriv --reuid 12345 --regid 12345 --clear-groups env -u HOME -u USER -u LOGNAME"
    words = "train --preset tiny --data.path text.txt --device cpu --run-dir run --train.steps 2"
    words += " --compile.mode blocks --compile.backend eager"
    script = f"""
        mount -t tmpfs none /mnt && cd /mnt && mkdir python site work || exit 99
        mount --bind {sys.base_prefix} python && mount --bind {site} site || exit 99
        mount --bind {work} work && cd work || exit 99
        export PYTHONPATH=/mnt/work/src:/mnt/site LD_LIBRARY_PATH=/mnt/python/lib
        {become} -u XDG_CACHE_HOME /mnt/python/bin/{python} -m of_terminals {words}
    """
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, timeout=300
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert status(work / "run") == ("finished", 2) and not (work / "~").exists()


def test_a_job_that_stands_still_goes_on(project: Project, tmp_path: Path) -> None:
    """As after Ctrl-Z and `fg`, or on a laptop that sleeps: longer than a step may take."""
    limit = "--parallel.timeout-minutes 0.25"
    command = train(project, tmp_path, RANKS, limit, "2>&1", steps=1500)
    process = start(project, command, stdout=subprocess.PIPE)
    wait_for(tmp_path, 5, process)
    everyone = [process.pid, *descendants(process.pid)]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    assert status(tmp_path)[0] == "running"
    time.sleep(25)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and b"restarting all ranks" not in output, output
    assert finished(tmp_path, 1500)
