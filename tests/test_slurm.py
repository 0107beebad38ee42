"""scripts/train.sbatch on a real Slurm, with two nodes on this machine (slurm-wlm and munge)."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import bake
from test_life import TINY, environment, final_states, make_slow, manifest, records, train

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
MISSING = [name for name in NEEDED if not shutil.which(name)]
pytestmark = pytest.mark.skipif(
    bool(MISSING) or os.getuid() != 0,
    reason=f"NOT RUN: a Slurm of its own needs root and slurm-wlm, munge (missing: {MISSING})",
)
MUNGE_FILES = ("key-file", "socket", "pid-file", "log-file", "seed-file")
STEPS = 500
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
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
SlurmdTimeout=5
ReturnToService=2
OverTimeLimit=1
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} Gres=gpu:1
PartitionName=all Nodes=n1,n2 Default=YES
"""


class Slurm:
    """A cluster of two nodes, whose commands are run in a project's folder."""

    def __init__(self, folder: Path, project: Path) -> None:
        self.folder, self.project = folder, project
        self.config = folder / "slurm.conf"
        self.environment = environment(project, SLURM_CONF=str(self.config))
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(3)]
            ports = [s.getsockname()[1] for s in sockets]
        text = CONFIG.format(folder=folder, host=socket.gethostname(), ports=ports)
        self.config.write_text(text)
        (folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/null\n")
        (folder / "cgroup.conf").touch()
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = (f"--{name}={folder}/munge.{name.split('-')[0]}" for name in MUNGE_FILES)
        self.daemon("munged", "--foreground", "--force", *files)
        self.daemon("slurmctld", "-D", "-i")
        self.nodes = {name: self.daemon("slurmd", "-D", "-N", name) for name in ("n1", "n2")}
        self.wait_until(lambda: self("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", 30)

    def daemon(self, *command: str) -> subprocess.Popen[bytes]:
        """Start one; all that it starts in turn can be told by its environment."""
        with (self.folder / "daemons.log").open("a") as log:
            env = {
                **environment(self.project),
                "SLURM_CONF": str(self.config),
                "DAEMON": command[-1],
            }
            return subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def __call__(self, *command: str) -> str:
        """What a command prints."""
        return subprocess.run(
            command,
            cwd=self.project,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=30,
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
        """Of a job: its state and how often it was started again."""
        fields = dict(
            word.split("=", 1)
            for word in self("scontrol", "show", "job", job).split()
            if "=" in word
        )
        return fields["JobState"], int(fields["Restarts"])

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Fail when it has not come about in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = [*self.folder.glob("*.log"), *self.project.glob("slurm-*.log")]
                logs += self.project.glob("runs/slurm-*/*.log")
                pytest.fail("\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in logs))
            time.sleep(0.1)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    project = bake(tmp_path, cluster="slurm", tracker="none")
    make_slow(project)
    (tmp_path / "slurm").mkdir()
    cluster = Slurm(tmp_path / "slurm", project)
    try:
        yield cluster
    finally:
        cluster.kill()


def test_a_job_goes_on_whatever_ends_it(slurm: Slurm) -> None:
    """Time limit, `scancel --signal`, a lost node: requeued, resumed, bit-identical."""
    project, run = slurm.project, slurm.project / "runs/job"
    steps = ("--train.steps", str(STEPS), "--train.log-every", "1", "--checkpoint.every", "50")
    (project / "slow").unlink()
    train(project, 2, "undisturbed", *steps)
    (project / "slow").touch()
    resources = ("--gpus-per-node=1", "--time=10", "--signal=B:USR1@60", "--parsable")
    script = ("scripts/train.sbatch", *TINY, *steps, "--name", "job", "--fresh")
    job = slurm("sbatch", *resources, *script)

    def step() -> int:
        lines = records(run)
        return lines[-1]["step"] if lines else 0

    def goes_on(restarts: int, since: int) -> None:
        slurm.wait_until(lambda: slurm.state(job) == ("RUNNING", restarts), 120)
        slurm.wait_until(lambda: step() >= since + 10, 120)

    goes_on(restarts=0, since=0)
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    slurm.wait_until(lambda: slurm.state(job) == ("PENDING", 1), 120)
    saved = manifest(run)["step"]
    assert saved == step() and saved % 50, "the last finished step, not one of every fifty"
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=10")

    goes_on(restarts=1, since=saved)
    slurm("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_until(lambda: slurm.state(job) == ("PENDING", 2), 120)
    assert manifest(run)["step"] == step() > saved

    goes_on(restarts=2, since=step())
    slurm.kill("DAEMON=n2", "SLURMD_NODENAME=n2")
    slurm.wait_until(lambda: slurm.state(job) == ("PENDING", 3), 120)
    slurm.nodes["n2"].wait()
    slurm.nodes["n2"] = slurm.daemon("slurmd", "-D", "-N", "n2")
    goes_on(restarts=3, since=manifest(run)["step"])

    (project / "slow").unlink()
    slurm.wait_until(lambda: slurm.state(job) == ("COMPLETED", 3), 120)
    undisturbed, disturbed = final_states(project, "undisturbed", "job")
    assert undisturbed.startswith(f"{STEPS} ") and disturbed == undisturbed
    expected, found = (
        {r["step"]: r["loss"] for r in records(project / "runs" / name)}
        for name in ("undisturbed", "job")
    )
    assert found == expected and list(found) == list(range(1, STEPS + 1))
    assert len(list(project.glob(f"runs/slurm-{job}/*.log"))) == 2, "one for each node"
