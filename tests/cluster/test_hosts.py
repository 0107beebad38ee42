"""Hosts that are cut off: network namespaces on this machine, launch.sh on each of them."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.project.test_life import TINY, bake_slow, environment, finish, launch, manifest, records
from tests.stress.jobs import rank_of

STEPS = 100
# A host that is silent is given up after 12 s, and nobody is waited for longer than needed. To pull
# a cable for 2 s makes a silence of 3.5 s: the last word was 1 s old, TCP tries twice a second.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=12,last_call_timeout=2"


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command of this name."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=120)


# A name and a file of names of its own, for what is run in a host.
BECOME = (
    'echo "$0" >/proc/sys/kernel/hostname; mount --make-rprivate /; '
    'mount --bind "$1" /etc/hosts; shift; exec "$@"'
)


def within(space: str, *command: str) -> list[str]:
    """The line that runs this there."""
    own = ["unshare", "--uts", "--mount", "bash", "-ec"]
    return ["ip", "netns", "exec", space, *own, *command]


def own_networks() -> bool:
    """Whether this machine lets us have them."""
    name = f"probe-{os.getpid()}"
    if not shutil.which("ip") or ip("netns", "add", name).returncode:
        return False
    bridge = ip("-n", name, "link", "add", "probe", "type", "bridge")
    veth = ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "other")
    become = within(name, BECOME, name, "/etc/hosts", "true")
    became = subprocess.run(become, capture_output=True, timeout=120)
    ip("netns", "del", name)
    return not (bridge.returncode or veth.returncode or became.returncode)


pytestmark = pytest.mark.skipif(
    not own_networks(), reason="NOT RUN: hosts need root, network namespaces (Linux) and iproute2"
)


class Hosts:
    """Three hosts at a switch, each with a name and an address of its own; they share the disk."""

    names = ("h1", "h2", "h3")

    def __init__(self, folder: Path, project: Path) -> None:
        self.folder, self.project = folder, project
        self.mark = f"{os.getpid()}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.slow = folder / "slow"
        self.slow.touch()
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"10.0.0.{n[1]} {n}\n" for n in self.names)
        )
        switch = self.space("switch")
        for words in (f"netns add {switch}", f"-n {switch} link add br0 type bridge"):
            self.ip(words)
        self.ip(f"-n {switch} link set br0 up")
        for name in self.names:
            space = self.space(name)
            self.ip(f"netns add {space}")
            self.ip(f"-n {switch} link add {name} type veth peer name eth0 netns {space}")
            self.ip(f"-n {switch} link set {name} master br0 up")
            self.ip(f"-n {space} addr add 10.0.0.{name[1]}/24 dev eth0")
            for device in ("lo", "eth0"):
                self.ip(f"-n {space} link set {device} up")

    def space(self, name: str) -> str:
        """The namespace of a host."""
        return f"{name}-{self.mark}"

    def ip(self, words: str) -> None:
        """Run the command of this name, which has to succeed."""
        done = ip(*words.split())
        assert not done.returncode, (words, done.stderr)

    def launch(self, name: str, *options: str, **variables: str) -> None:
        """The line that a user types on each of several machines."""
        command = within(self.space(name), BECOME, name, str(self.folder / "hosts"))
        command += ["./launch.sh", "-n", "1", "train", *TINY, *options]
        env = environment(
            self.project,
            RDZV_ENDPOINT="h1:29500",
            PET_RDZV_CONF=RENDEZVOUS,
            MAX_RESTARTS="9",
            SLOW=str(self.slow),
            SLOW_SECONDS="0.5",
            **variables,
        )
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.project, env=env, stdout=log, stderr=log
            )

    def cut(self, name: str) -> None:
        """Pull its cable."""
        self.ip(f"-n {self.space('switch')} link set {name} down")

    def mend(self, name: str) -> None:
        """Put it back."""
        self.ip(f"-n {self.space('switch')} link set {name} up")

    def kill(self, name: str) -> None:
        """Pull its plug."""
        for pid in ip("netns", "pids", self.space(name)).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if name in self.processes:
            self.processes[name].wait()

    def lose(self, name: str) -> None:
        """Both, so that the others hear nothing of it."""
        self.cut(name)
        self.kill(name)

    def trainers(self) -> set[int]:
        """The training processes of all hosts: those with a rank."""
        found = set()
        for name in self.names:
            for pid in ip("netns", "pids", self.space(name)).stdout.split():
                found |= {int(pid)} if rank_of(pid) is not None else set()
        return found

    def close(self) -> None:
        """Leave nothing behind."""
        for name in self.names:
            self.kill(name)
        for name in (*self.names, "switch"):
            ip("netns", "del", self.space(name))

    def logs(self) -> str:
        """What all of them have printed."""
        return "\n".join(f"{p}:\n{p.read_text()[-4000:]}" for p in self.folder.glob("*.log"))

    def wait_until(self, condition: Callable[[], bool], seconds: float = 900) -> None:
        """Fail when it has not come about in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    project = bake_slow(tmp_path, tracker="none")
    (tmp_path / "hosts").mkdir()
    with contextlib.closing(Hosts(tmp_path / "hosts", project)) as hosts:
        yield hosts


def test_a_job_survives_its_hosts_and_their_cables(hosts: Hosts) -> None:
    """Three hosts, or two: a cable pulled for a moment, a host lost, one too many lost, one back.

    Below two the last one waits. The losses equal an undisturbed single process's.
    """
    project, run = hosts.project, hosts.project / "runs/job"
    settings = ["--train.steps", str(STEPS), "--train.log-every", "1", "--data.path", "text.txt"]
    settings += ["--train.validate-every", "0"]

    def start(*names: str) -> None:
        for name in names:
            patience = ("--checkpoint.every", "2", "--parallel.timeout-minutes", "0.2")
            hosts.launch(name, *settings, *patience, "--name", "job", NNODES="2:3")

    def step() -> int:
        lines = records(run)
        return lines[-1]["step"] if lines else 0

    start(*hosts.names)
    with launch(project, "undisturbed", *settings, "--checkpoint.every", "0", ranks=0) as process:
        finish(process)
    hosts.wait_until(lambda: step() > 2 and len(hosts.trainers()) == 3)  # one may join later
    trainers = hosts.trainers()
    hosts.cut("h2")
    time.sleep(2)
    at = step()
    hosts.mend("h2")
    hosts.wait_until(lambda: step() > at + 2)
    assert hosts.trainers() == trainers and len(trainers) == 3, "nothing was started again"

    hosts.lose("h3")
    hosts.wait_until(lambda: len(hosts.trainers() - trainers) == 2)
    hosts.wait_until(lambda: manifest(run)["world_size"] == 2)
    pair = hosts.trainers()

    hosts.lose("h2")
    hosts.wait_until(lambda: not hosts.trainers() & pair)
    time.sleep(3)
    assert not hosts.trainers(), "one is too few: it waits"
    hosts.mend("h2")
    start("h2")
    hosts.slow.unlink()
    for name in ("h1", "h2"):
        assert hosts.processes[name].wait(900) == 0, hosts.logs()
    expected, found = (
        {r["step"]: r["loss"] for r in records(project / "runs" / name)}
        for name in ("undisturbed", "job")
    )
    assert list(found) == list(range(1, STEPS + 1))
    assert found == pytest.approx(expected, rel=1e-3), "the same samples in every batch"
