"""train.sbatch on a real Slurm, all of whose nodes are this machine (slurm-wlm, munge)."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.common import free_ports
from tests.project.test_life import (
    TINY,
    bake_slow,
    environment,
    finish,
    hashes,
    launch,
    manifest,
    records,
)

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
MISSING = [name for name in NEEDED if not shutil.which(name)]
pytestmark = pytest.mark.skipif(
    bool(MISSING) or os.getuid() != 0,
    reason=f"NOT RUN: a Slurm of its own needs root and slurm-wlm, munge (missing: {MISSING})",
)
MUNGE_FILES = ("key-file", "socket", "pid-file", "log-file", "seed-file")
STEPS = 90
SETTINGS = ["--train.steps", str(STEPS), "--train.log-every", "1", "--data.path", "text.txt"]
SETTINGS += ["--train.validate-every", "0"]
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# What is requeued waits for so long before it starts again: 120 s by default, 5 at the least.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SlurmdTimeout=10
ReturnToService=2
OverTimeLimit=10
GresTypes=gpu
{nodes}
PartitionName=all Nodes=n[1-5] Default=YES
"""


class Slurm:
    """A cluster of five nodes, whose commands are run in a project's folder."""

    names = ("n1", "n2", "n3", "n4", "n5")

    def __init__(self, folder: Path, project: Path) -> None:
        self.folder, self.project = folder, project
        self.config = folder / "slurm.conf"
        self.environment = environment(project, SLURM_CONF=str(self.config), SLOW_SECONDS="1")
        port, *ports = free_ports(6)
        host, here = socket.gethostname(), "NodeAddr=127.0.0.1 Gres=gpu:1"
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} Port={port} {here}"
            for name, port in zip(self.names, ports, strict=True)
        )
        self.config.write_text(CONFIG.format(folder=folder, host=host, port=port, nodes=nodes))
        (folder / "gres.conf").write_text("NodeName=n[1-5] Name=gpu File=/dev/null\n")
        (folder / "cgroup.conf").touch()
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = (f"--{name}={folder}/munge.{name.split('-')[0]}" for name in MUNGE_FILES)
        self.daemon("munged", "--foreground", "--force", *files)
        self.daemon("slurmctld", "-D", "-i")
        self.nodes = {name: self.daemon("slurmd", "-D", "-N", name) for name in self.names}
        self.wait_until(lambda: self("sinfo", "-h", "-t", "idle", "-o", "%D") == "5")

    def daemon(self, *command: str) -> subprocess.Popen[bytes]:
        """Start one; all that it starts in turn can be told by its environment."""
        with (self.folder / "daemons.log").open("a") as log:
            env = {
                **environment(self.project),
                "SLURM_CONF": str(self.config),
                "DAEMON": command[-1],
            }
            return subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def __call__(self, *command: str, **variables: str) -> str:
        """What a command prints; what it submits has these variables, too."""
        return subprocess.run(
            command,
            cwd=self.project,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout.strip()

    def processes(self, *having: str) -> list[int]:
        """Those of this cluster, with one of these in their environment."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                if f"SLURM_CONF={self.config}" in words and (not having or {*having} & {*words}):
                    found.append(int(entry.name))
        return found

    def kill(self, *having: str) -> None:
        """As when the power goes."""
        for pid in self.processes(*having):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def state(self, job: str) -> tuple[str, int]:
        """Of a job: its state and how often it was started again; of neither while nobody says."""
        fields = dict(
            word.split("=", 1)
            for word in self("scontrol", "show", "job", job).split()
            if "=" in word
        )
        return fields.get("JobState", ""), int(fields.get("Restarts", -1))

    def wait_until(self, condition: Callable[[], bool], seconds: float = 900) -> None:
        """Fail when it has not come about in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = [*self.folder.glob("*.log"), *self.project.glob("slurm-*.log")]
                logs += self.project.glob("runs/slurm-*/*.log")
                pytest.fail("\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in logs))
            time.sleep(0.5)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    project = bake_slow(tmp_path, cluster="slurm", tracker="none")
    (tmp_path / "slurm").mkdir()
    cluster = Slurm(tmp_path / "slurm", project)
    try:
        yield cluster
    finally:
        cluster.kill()


class Job:
    """A run by train.sbatch, slow for as long as it is not let go."""

    def __init__(self, slurm: Slurm, name: str, nodes: str, *options: str) -> None:
        self.slurm, self.name, self.run = slurm, name, slurm.project / "runs" / name
        self.line = ["sbatch", "--parsable", "--gpus-per-node=1"]
        self.line += [f"--nodelist={nodes}", *options]
        self.slow = slurm.folder / f"slow-{name}"
        self.slow.touch()
        self.ids: list[str] = []

    def submit(self, *options: str) -> None:
        """Type the line; once more it is the same line."""
        settings = (*TINY, *SETTINGS, "--name", self.name)
        line = (*self.line, "train.sbatch", *settings, *options)
        self.ids.append(self.slurm(*line, SLOW=str(self.slow)))

    def step(self) -> int:
        """The last one that it has told of."""
        lines = records(self.run)
        return lines[-1]["step"] if lines else 0

    def goes_on(self, restarts: int, since: int = 0) -> None:
        """Wait until it trains, after so many restarts."""
        self.slurm.wait_until(lambda: self.slurm.state(self.ids[-1]) == ("RUNNING", restarts))
        self.slurm.wait_until(lambda: self.step() > since + 1)

    def requeued(self, restarts: int) -> int:
        """Wait until it is; the step of its newest checkpoint."""
        self.slurm.wait_until(lambda: self.slurm.state(self.ids[-1])[1] == restarts)
        return manifest(self.run)["step"]

    def ends(self, state: str, restarts: int) -> None:
        """Wait for its end."""
        self.slurm.wait_until(lambda: self.slurm.state(self.ids[-1]) == (state, restarts))

    def told(self) -> list[int]:
        """The steps in the logs of all nodes and starts; any node may have had rank 0."""
        logs = [self.slurm.project.glob(f"runs/slurm-{job}/*.log") for job in self.ids]
        text = "".join(path.read_text() for paths in logs for path in paths)
        return sorted(int(step) for step in re.findall(r"^step (\d+)/", text, re.MULTILINE))


def reaches_its_time_limit(slurm: Slurm) -> None:
    """On two nodes: saved ahead of it, requeued, resumed. Nothing else is ever saved."""
    job = Job(slurm, "limit", "n1,n2", "--time=10", "--signal=B:USR1@60")
    job.submit("--checkpoint.every", "10000", "--fresh")
    job.goes_on(restarts=0)
    slurm("scontrol", "update", f"JobId={job.ids[-1]}", "TimeLimit=1")  # seen within 30 s
    assert 0 < job.requeued(1) < STEPS
    slurm("scontrol", "update", f"JobId={job.ids[-1]}", "TimeLimit=10")
    job.slow.unlink()
    job.ends("COMPLETED", restarts=1)
    assert job.told() == list(range(1, STEPS + 1)), "the last finished step was saved"
    assert len(list(slurm.project.glob(f"runs/slurm-{job.ids[-1]}/*.log"))) == 2, "one of each node"


def loses_a_node(slurm: Slurm) -> None:
    """One of two, in mid-run: requeued, and resumed when it is back."""
    job = Job(slurm, "lost", "n3,n4", "--time=10")
    job.submit("--checkpoint.every", "2")
    job.goes_on(restarts=0, since=4)
    slurm.kill("DAEMON=n4", "SLURMD_NODENAME=n4")
    slurm.nodes["n4"].wait()
    assert 0 < job.requeued(1) < STEPS
    slurm.nodes["n4"] = slurm.daemon("slurmd", "-D", "-N", "n4")
    job.slow.unlink()
    job.ends("COMPLETED", restarts=1)
    assert {*job.told()} == {*range(1, STEPS + 1)}


def is_told_by_hand(slurm: Slurm) -> None:
    """`scancel --signal`, on one node: back into the queue; then to its end, and submitted anew."""
    job = Job(slurm, "told", "n5", "--time=10", "--nodes=1")
    job.submit("--checkpoint.every", "10000")
    job.goes_on(restarts=0)
    slurm("scancel", "--batch", "--signal=USR1", job.ids[-1])
    saved = job.requeued(1)
    job.goes_on(restarts=1, since=saved)
    slurm("scancel", "--signal=TERM", job.ids[-1])
    job.ends("FAILED", restarts=1)
    assert saved < manifest(job.run)["step"] < STEPS
    assert json.loads((job.run / "status.json").read_text())["status"] == "preempted"
    job.slow.unlink()
    job.submit("--checkpoint.every", "10000")
    job.ends("COMPLETED", restarts=0)
    assert job.told() == list(range(1, STEPS + 1)), "saved both times, requeued once"


def is_left_alone(slurm: Slurm) -> None:
    """Two ranks without a cluster."""
    with launch(slurm.project, "undisturbed", *SETTINGS, "--checkpoint.every", "10000") as process:
        finish(process)


def test_jobs_go_on_whatever_ends_them(slurm: Slurm) -> None:
    """Side by side, as each of them mostly waits; the result is the same to the bit."""
    ways = (reaches_its_time_limit, loses_a_node, is_told_by_hand, is_left_alone)
    with ThreadPoolExecutor() as pool:
        for way in [pool.submit(way, slurm) for way in ways]:
            way.result()
    project = slurm.project
    undisturbed, *disturbed = (
        hashes(project / "runs" / name, STEPS) for name in ("undisturbed", "limit", "lost")
    )
    assert undisturbed and disturbed == [undisturbed] * 2
    expected, *found, told = (
        {r["step"]: r["loss"] for r in records(project / "runs" / name)}
        for name in ("undisturbed", "limit", "lost", "told")
    )
    assert list(expected) == list(range(1, STEPS + 1)) and found == [expected] * 2
    assert told == pytest.approx(expected, rel=1e-3), "of one rank"
