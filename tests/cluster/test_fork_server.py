"""Ranks are copies of one process, and as new as if each had been started by itself."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import bake, run

PACKAGE = "forked"
PROBE = """
import atexit, json, os, random, signal, sys, time
from pathlib import Path

import numpy, torch

random_state = random.getrandbits(64)
facts = {
    "argv": sys.argv[1:],
    "command": Path("/proc/self/cmdline").read_text().split("\\0")[:-1],
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "leads_its_session": os.getsid(0) == os.getpid(),
    "open_files": sorted(os.listdir("/proc/self/fd")),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "handlers": {n: repr(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT)},
    "threads": torch.get_num_threads(),
    "name": Path("/proc/self/comm").read_text().strip(),
    "main": __name__,
    "imported": sorted(sys.modules.keys()),
    "random": [random_state, torch.initial_seed()],
    "cuda": torch.cuda.is_initialized(),
}
Path(sys.argv[1]).write_text(json.dumps(facts))
print("said at once")
atexit.register(lambda: Path(sys.argv[1] + ".exit").touch())
if sys.argv[2] == "sleep":
    time.sleep(600)
sys.exit(int(sys.argv[2]))
"""
# What the launcher does. A child of the server comes back from ForkServer(), too, and ends there.
JOB = """
import json, os, signal, sys, time
from pathlib import Path

import torch

from forked.distributed import fork_server

folder, spoilt = Path(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever started the tests may ignore them
signal.signal(signal.SIGINT, signal.default_int_handler)
if spoilt:
    fork_server.PRELOADED = (spoilt,)
    Path(folder / "spoilt.py").write_text(os.environ.get("SPOILT", ""))
    sys.path.insert(0, str(folder))
else:  # nothing that is imported before a fork may ask for a GPU
    torch.cuda.is_available = torch.cuda.device_count = lambda: 1 / 0
server = fork_server.ForkServer()
(server_pid,) = map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
print("parent", os.getpid())


def start(name, code, **more):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ["PYTHONPATH"], **more}
    command = (sys.executable, "-u", "-m", "forked.probe", str(folder / name), code)
    return server.start(command, environment)


first = start("first", "7", RANK="0", OMP_NUM_THREADS="3")
second = start("second", "sleep", RANK="1", OMP_NUM_THREADS="3")
assert first.wait(60) == 7
while not (folder / "second").exists():
    time.sleep(0.01)
assert second.poll() is None
os.killpg(second.pid, signal.SIGTERM)
assert second.wait(60) == second.poll() == -signal.SIGTERM
assert server.start((sys.executable, "-u", "-m", "other"), {}) is None
os.kill(server_pid, signal.SIGKILL)
os.waitpid(server_pid, 0)
assert start("third", "0") is None
assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == ""
"""


# What a stage does; what it starts is told apart by its command line.
STAGE = """
import os, signal, subprocess, sys, time
from pathlib import Path

from forked.workflow import forks

signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever started the tests may ignore it
forks.prepare()
from forked.workflow import processes

here = Path("/proc/self/cmdline").read_bytes()


def start(code, **options):
    return processes.start("forked.task", code, piped=True, **options)


def is_forked(process):
    return Path(f"/proc/{process.pid}/cmdline").read_bytes() == here


before = {*os.listdir("/proc/self/fd")}
process = start("print('out', flush=True); print('err', file=sys.stderr); time.sleep(600)")
assert is_forked(process) and os.getsid(process.pid) == process.pid
while process.poll() is None:
    try:
        process.communicate(timeout=0.3)
    except subprocess.TimeoutExpired:
        if process.written.split() == [b"out", b"err"]:
            process.terminate()
assert process.communicate() == ("out\\nerr\\n", None) and process.returncode == -signal.SIGTERM
process = start("print(os.environ['GIVEN']); sys.exit(3)", GIVEN="so")
assert process.communicate() == ("so\\n", None) and process.returncode == 3
# A process that goes on writing meets its time limit all the same.
process = start("while True: print('more')")
try:
    process.communicate(timeout=0.5)
except subprocess.TimeoutExpired:
    processes.kill(process)
assert process.communicate()[0].startswith("more") and process.returncode == -signal.SIGKILL
# What holds the output is waited for, though the process itself is gone.
began, process = time.monotonic(), start("os.fork() or (time.sleep(1), print('late'))")
assert process.communicate()[0] == "late\\n" and time.monotonic() > began + 1
anew = start("time.sleep(600)", anew=True)
assert not is_forked(anew)
anew.kill()
anew.communicate()
assert {*os.listdir("/proc/self/fd")} == before
with processes.started(1, "time.sleep(600)", module="forked.task") as process:
    assert is_forked(process)
assert process.returncode == -signal.SIGKILL
children = Path(f"/proc/self/task/{os.getpid()}/children")
(server,) = map(int, children.read_text().split())
os.kill(server, signal.SIGKILL)
os.waitpid(server, 0)
process = start("print('anew')")
assert not is_forked(process) and process.communicate()[0] == "anew\\n"
print("all held")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = bake(tmp_path_factory.mktemp(PACKAGE), package_name=PACKAGE)
    (project / "src" / PACKAGE / "probe.py").write_text(PROBE)
    task = "import os, sys, time\nexec(sys.argv[1])\n"
    (project / "src" / PACKAGE / "task.py").write_text(task)
    return project / "src"


def facts(source: Path, folder: Path, preloaded: str = "", code: str = "") -> dict[str, Any]:
    """What a first and a second rank are like, by name; and the launcher's number."""
    script = folder / "job.py"
    script.write_text(JOB)
    words = [sys.executable, str(script), str(folder), preloaded]
    output = run(words, 300, PYTHONPATH=str(source), SPOILT=code)
    assert output.count("said at once") == 2
    assert (folder / "first.exit").exists()
    parent = int(output.partition("parent ")[2].split()[0])
    found = {name: json.loads((folder / name).read_text()) for name in ("first", "second")}
    for rank in found.values():
        assert rank["parent"] == parent and rank["leads_its_session"]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
def test_a_rank_is_a_copy_with_nothing_of_its_server(source: Path, tmp_path: Path) -> None:
    found = facts(source, tmp_path)
    first, second = found["first"], found["second"]
    assert first["argv"] == [str(tmp_path / "first"), "7"]
    assert first["command"][1] == str(tmp_path / "job.py")  # it was forked
    assert first["open_files"] == ["0", "1", "2", "3"]  # the last to list them by
    given = {"PATH", "PYTHONPATH", "RANK", "OMP_NUM_THREADS"}
    assert first["environment"].keys() - {"LC_CTYPE"} == given
    assert first["blocked"] == [] and first["threads"] == 3 and first["main"] == "__main__"
    assert "SIG_DFL" in first["handlers"]["15"] and "default_int_handler" in first["handlers"]["2"]
    assert [rank["name"] for rank in found.values()] == ["rank 0", "rank 1"]
    assert not first["cuda"] and "torch._dynamo" in first["imported"]
    assert not {f"{PACKAGE}.{name}" for name in ("model", "data", "train")} & {*first["imported"]}
    assert first["random"][0] != second["random"][0] and first["random"][1] == second["random"][1]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
@pytest.mark.parametrize(
    "code",
    [
        "import threading\nthreading.Timer(99, print).start()",
        "1 / 0",
        "import torch\ntorch.cuda.is_initialized = lambda: True",
        "import torch\ntorch.cuda._is_in_bad_fork = lambda: True",
    ],
)
def test_what_cannot_be_copied_safely_is_started_anew(
    source: Path, tmp_path: Path, code: str
) -> None:
    for rank, options in facts(source, tmp_path, "spoilt", code).items():
        assert options["command"][1:4] == ["-u", "-m", f"{PACKAGE}.probe"], rank
        assert options["command"][0] == sys.executable and os.sep in sys.executable
        assert options["blocked"] == []


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_a_stage_hears_of_what_it_forks_as_of_any_process(source: Path, tmp_path: Path) -> None:
    script = tmp_path / "stage.py"
    script.write_text(STAGE)
    output = run([sys.executable, str(script)], 300, PYTHONPATH=str(source))
    assert output.endswith("all held\n")
