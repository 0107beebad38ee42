"""What torchrun, as launch.sh starts it, promises of its ranks: how they start, restart and end."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import free_ports
from tests.conftest import bake
from tests.project.test_life import (
    bake_slow,
    environment,
    finish,
    launch,
    manifest,
    records,
    start,
    trainers,
)

PACKAGE = "launched"
# Ranks without torch: they say what they are like. In the first attempt they fail while the
# launcher does not look (it is stopped), so that it sees both ends at once.
PROBE = """
import json, os, random, signal, sys, time
from pathlib import Path

import numpy

from . import edited_first, edited_last

folder, attempt = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
facts = {
    "pid": os.getpid(),
    "parent": os.getppid(),
    "leads_its_session": os.getsid(0) == os.getpid(),
    "launcher": os.environ["LAUNCHER_PID"],
    "random": [numpy.random.random(), random.random()],
    "code": [edited_first.NAME, edited_last.NAME],
    "threads": os.environ["OMP_NUM_THREADS"],
}
path = folder / f"{attempt}-{rank}.json"
path.with_suffix(".part").write_text(json.dumps(facts))
path.with_suffix(".part").rename(path)
print(f"said by rank {rank}")
if attempt == 0:
    while len(list(folder.glob("0-*.json"))) < ranks:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGSTOP)
    sys.exit(3 + rank)
"""


def wait_until(condition: Callable[[], Any], seconds: float = 300) -> None:
    """Fail when it has not come about in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(pid: int) -> str:
    """Of a process, as /proc has it; Z: it has ended and its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def test_ranks_that_fail_are_named_and_start_again_with_the_code_as_it_is(tmp_path: Path) -> None:
    project = bake(tmp_path, package_name=PACKAGE)
    package = project / "src" / PACKAGE
    (package / "probe.py").write_text(PROBE)
    (package / "edited_first.py").write_text("NAME = 'old'\n")
    (package / "edited_last.py").write_text("from .edited_first import NAME as NAME\n")
    words = ("-m", f"{PACKAGE}.distributed.launch", "--nproc-per-node=2", "--max-restarts=1")
    command = (environment(project)["PYTHON"], "-u", *words, "-m", f"{PACKAGE}.probe")

    def facts(attempt: int) -> list[dict[str, Any]]:
        return [json.loads((tmp_path / f"{attempt}-{rank}.json").read_text()) for rank in (0, 1)]

    command = ("bash", "-c", 'exec "$@"', "-", *command)  # a Python of its own, not forked
    with start(project, *command, str(tmp_path)) as process:
        wait_until(lambda: len(list(tmp_path.glob("0-*.json"))) == 2)
        wait_until(lambda: {state(rank["pid"]) for rank in facts(0)} == {"Z"})
        # Both modules change together: a rank with one of them old could not import the other.
        (package / "edited_first.py").write_text("NAME = RENAMED = 'new code'\n")
        (package / "edited_last.py").write_text("from .edited_first import RENAMED as NAME\n")
        os.kill(process.pid, signal.SIGCONT)
        said = finish(process, timeout=300)
    assert "Traceback" not in said
    (again,) = re.findall(r"^.*restarting all ranks.*$", said, re.MULTILINE)
    ends = ["rank 0 ended with exit code 3", "rank 1 ended with exit code 4"]
    assert sorted(again.partition(": ")[0].split(", ")) == ends
    assert again.endswith(": restarting all ranks (1 of 1)")
    for attempt, code in enumerate(("old", "new code")):
        for rank in facts(attempt):
            assert rank["code"] == [code, code]
            assert rank["leads_its_session"] and rank["parent"] == process.pid
            assert rank["launcher"] == str(process.pid) and rank["threads"] == "1"
    drawn = [number for attempt in (0, 1) for rank in facts(attempt) for number in rank["random"]]
    assert len({*drawn}) == 8, "neither ranks nor attempts share a state"
    assert all(said.count(f"said by rank {rank}") == 2 for rank in (0, 1))


# Rank 0 freezes itself, as a debugger or a cgroup may freeze a process, and rank 1 fails.
FROZEN = """
import os, signal, sys, time
from pathlib import Path

folder, frozen = Path(sys.argv[1]), Path(sys.argv[1]) / "frozen"
if os.environ["RANK"] == "0":
    frozen.with_suffix(".part").write_text(str(os.getpid()))
    frozen.with_suffix(".part").rename(frozen)
    os.kill(os.getpid(), signal.SIGSTOP)
while not frozen.exists():
    time.sleep(0.01)
own = f"/proc/{os.getppid()}/task/{os.getppid()}/children"
(folder / "children").write_text(" ".join([str(os.getpid()), *Path(own).read_text().split()]))
sys.exit(3)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_frozen_process_does_not_keep_a_launcher_from_its_end(tmp_path: Path) -> None:
    """It has no helper that could be frozen: its children are the ranks."""
    project = bake(tmp_path, package_name=PACKAGE)
    (project / "src" / PACKAGE / "frozen.py").write_text(FROZEN)
    words = ("-m", f"{PACKAGE}.distributed.launch", "--nproc-per-node=2", "--max-restarts=0")
    command = (environment(project)["PYTHON"], "-u", *words, "-m", f"{PACKAGE}.frozen")
    command = ("bash", "-c", 'exec "$@"', "-", *command, str(tmp_path))
    with start(project, *command, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="2") as process:
        said = finish(process, timeout=300, codes=(1,))
    assert "rank 1 ended with exit code 3" in said and "Traceback" not in said
    failed, *children = (tmp_path / "children").read_text().split()
    frozen = (tmp_path / "frozen").read_text()
    assert {*children} == {failed, frozen} and state(int(frozen)) in ("gone", "Z")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux ends orphans")
def test_ranks_end_with_their_launcher_and_save_at_one_ctrl_c(tmp_path: Path) -> None:
    project, slow = bake_slow(tmp_path / "project"), tmp_path / "slow"
    slow.touch()
    options = ("--train.steps", "100000", "--train.log-every", "1", "--data.path", "text.txt")
    options += ("--checkpoint.every", "3")
    run = project / "runs/run"

    def step() -> int:
        lines = records(run)
        return lines[-1]["step"] if lines else 0

    with launch(project, "run", *options, SLOW=str(slow), SLOW_SECONDS="0.1") as process:
        wait_until(lambda: step() > 6)
        ranks = trainers(process.pid)
        assert len(ranks) == 2
        process.kill()  # in mid-step: a step is little else than sleep
        wait_until(lambda: {state(pid) for pid in ranks} == {"gone"}, 30)
    with launch(project, "run", *options, SLOW=str(slow), SLOW_SECONDS="0.1") as process:
        before = step()
        wait_until(lambda: step() > before + 2)
        process.send_signal(signal.SIGINT)
        said = finish(process, codes=(128 + signal.SIGINT,))
    assert "resuming from" in said and "Traceback" not in said
    assert "SIGINT: stopping as soon as the step allows" in said
    assert json.loads((run / "status.json").read_text())["status"] == "preempted"
    assert manifest(run)["step"] == step()


# In each attempt that WRONG names, rank 1 ends in the step after STEPS; it begins a restart late.
FAILING = """
import os, signal, time

ATTEMPT, RANK = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if ATTEMPT != "0" and RANK == "1":
    time.sleep(3)


class Failing:
    def __init__(self):
        self.steps = 0

    def after_step(self, state, record):
        is_wrong = RANK == "1" and ATTEMPT in os.environ["WRONG"]
        if is_wrong and self.steps == int(os.environ["STEPS"]):
            if os.environ["HOW"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            state.nothing_there
        self.steps += 1


def callbacks(config, run_dir):
    return [Failing()]
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = bake(tmp_path_factory.mktemp("failing"), package_name=PACKAGE, tracker="none")
    (project / "src" / PACKAGE / "callbacks.py").write_text(FAILING)
    return project


def attempts(said: str) -> int:
    """How often the ranks were started."""
    return said.count("\nrun    runs/")


def test_an_error_that_would_come_again_ends_the_job_at_once(failing: Path) -> None:
    """A step that was done, or a crash in the first one, is a reason to try again."""
    for how, steps, starts, code in (
        ("raised", 0, 1, 1),
        ("raised", 2, 2, 0),
        ("killed", 0, 2, 0),
    ):
        run = f"{how}-{steps}"
        settings = {"HOW": how, "STEPS": str(steps), "WRONG": "0", "MAX_RESTARTS": "1"}
        with launch(failing, run, "--train.steps", "8", **settings) as process:
            said = finish(process, codes=(code,))
        assert attempts(said) == starts, said
        assert ("restarting all ranks" in said) == (starts == 2)
        assert said.count("has no attribute 'nothing_there'") == (how == "raised")
        if not steps and how == "raised":
            ends = ["no restart, since an error before the end of the first step would repeat"]
            assert [line.partition("code 1: ")[2] for line in said.split("\n") if ends[0] in line]


def test_plain_torchrun_restarts_its_ranks(failing: Path) -> None:
    """Its own store outlives them: a restart would read the addresses of ranks that are gone."""
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = (environment(failing)["PYTHON"], *words, "--max-restarts=2", "-m", PACKAGE, "train")
    options = ("--preset", "tiny", "--device", "cpu", "--name", "plain", "--train.steps", "12")
    settings = {"HOW": "killed", "STEPS": "2", "WRONG": "01"}
    with start(failing, *command, *options, "--checkpoint.every", "1", **settings) as process:
        said = finish(process, timeout=200)
    assert attempts(said) == 3 and "finished at step 12" in said
    assert json.loads((failing / "runs/plain/status.json").read_text())["status"] == "finished"


CANNOT_CONNECT = (
    "error: cannot connect to no.such.host:29500 (RDZV_ENDPOINT): run the same line on that "
    "machine first, and open the port between the machines"
)
DID_NOT_MEET = (
    "error: the 2 machines of NNODES did not meet in time: run the same line, with the same "
    "RDZV_ENDPOINT and RDZV_ID, on each of them"
)


@pytest.mark.parametrize("is_reached", [False, True])
def test_machines_that_do_not_meet_are_one_line(failing: Path, is_reached: bool) -> None:
    """Whether no machine has the address, or this one waits in vain for another."""
    if is_reached:
        (port,) = free_ports(1)
        endpoint, patience, wanted = f"127.0.0.1:{port}", "join_timeout=3", DID_NOT_MEET
    else:
        endpoint, patience, wanted = "no.such.host:29500", "read_timeout=2", CANNOT_CONNECT
    meeting = {"NNODES": "2", "RDZV_ENDPOINT": endpoint, "PET_RDZV_CONF": patience}
    command = ("bash", "launch.sh", "-n", "1", "train", "--preset", "tiny", "--device", "cpu")
    with start(failing, *command, **meeting) as process:
        said = finish(process, timeout=200, codes=(1,))
    assert said.splitlines()[-1] == wanted
    assert "Traceback" not in said
