"""Jobs whose world changes: what a rank does at a stop signal, and when it starts again."""

import os
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import Project, project_fixture

project = project_fixture("elastic_ddp", parallelism="ddp", checkpoint="torch_save")


def test_what_torchrun_starts_again_is_not_set_aside(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its count of restarts says 0, as it does when a machine has joined."""
    runs, started_by = project.folder / "runs", ["one on a", "one on b"]
    monkeypatch.setattr("elastic_ddp.run.directory.launcher", lambda: started_by[-1])
    project("train", *project.settings, "--fresh", "--train.steps", "1")
    project("train", *project.settings, "--fresh", "--train.steps", "2")
    assert {path.name for path in runs.iterdir()} == {"default"}
    started_by.append("another on a")
    project("train", *project.settings, "--fresh", "--train.steps", "1")
    assert {path.name for path in runs.iterdir()} == {"default", "default.old-1"}


def test_a_launcher_keeps_its_name(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = project.module("distributed").launcher
    assert launcher() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert launcher() == launcher() and str(os.getppid()) in launcher()


def test_who_stops_waits_to_be_told_where_machines_come_and_go(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, group = project.module("distributed.world"), project.module("distributed").Group()
    stops = project.module("distributed.stop")
    with stops.Stop(group) as stop:
        monkeypatch.setattr(world, "TOLD_WITHIN", 0.05)
        monkeypatch.setenv("NNODES", "1:3")
        assert stop.outcome(stops.Agreed()) == "finished"
        assert stop.outcome(stops.Agreed(signal.SIGTERM)) == "regrouping"
        monkeypatch.setenv("NNODES", "3")
        assert stop.outcome(stops.Agreed(signal.SIGTERM)) == "preempted"
        monkeypatch.setattr(world, "TOLD_WITHIN", 60)
        monkeypatch.setenv("NNODES", "1:3")
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert stop.outcome(stops.Agreed(signal.SIGTERM)) == "preempted"


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        *(("NNODES", number, "machines") for number in ("two", "0", "1:", "1:2:3", "1;2")),
        *(("GRACE_SECONDS", number, "seconds") for number in ("long", "-1", "1.5", "2m")),
    ],
)
def test_a_wrong_number_is_told_at_once(project: Project, name: str, value: str, what: str) -> None:
    command = ["bash", "launch.sh", "-n", "1", "train"]
    environment = {**os.environ, name: value}
    done = subprocess.run(
        command, cwd=project.folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and done.stderr.startswith(f"{name} needs a number of {what}")
    assert len(done.stderr.splitlines()) == 1


def test_who_stops_hears_no_more_but_its_children_do(project: Project) -> None:
    """A second signal on the way out does no harm; who was not told to stop gives all back."""
    stops, group = project.module("distributed.stop"), project.module("distributed").Group()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with stops.Stop(group):
            pass
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with stops.Stop(group) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.poll() == stops.Agreed(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_job_of_many_ranks_makes_room_for_its_connections(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few ranks change nothing; many connect as needed, unless the user says otherwise."""
    world, lazy = project.module("distributed.world"), "TORCH_GLOO_LAZY_INIT"
    monkeypatch.setattr(world, "die_with_the_launcher", lambda: None)
    monkeypatch.setattr(world.dist, "init_process_group", lambda *_, **options: None)
    for name in ("get_rank", "get_world_size"):
        monkeypatch.setattr(world.dist, name, lambda: 0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv(lazy, "")  # and as it was before, afterwards

    def set_for(ranks: int, own: str | None = None) -> str | None:
        monkeypatch.delenv(lazy, raising=False)
        if own:
            monkeypatch.setenv(lazy, own)
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        world.join(SimpleNamespace(timeout_minutes=1), "cpu")
        return os.environ.get(lazy)

    assert set_for(world.MANY_RANKS - 1) is None
    assert set_for(1000) == "1"
    assert set_for(1000, own="0") == "0"


@pytest.mark.parametrize("own", [{}, {"TORCHINDUCTOR_COMPILE_THREADS": "5"}])
def test_ranks_share_the_cores_for_compiling(project: Project, own: dict[str, str]) -> None:
    """Each would compile on all of them; the user's own number wins."""
    (project.folder / "python").write_text("#!/bin/sh\necho $TORCHINDUCTOR_COMPILE_THREADS\n")
    (project.folder / "python").chmod(0o755)
    others = {n: v for n, v in os.environ.items() if n != "TORCHINDUCTOR_COMPILE_THREADS"}
    cores = len(os.sched_getaffinity(0))
    for ranks, share in ((1, cores), (max(2, cores), 1)):
        done = subprocess.run(
            ["bash", "launch.sh", "-n", str(ranks), "train"],
            cwd=project.folder,
            env=others | own | {"PYTHON": str(project.folder / "python")},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.stdout.split() == ([*own.values()] or [str(share)]), done.stderr


def test_ranks_may_open_as_many_files_as_the_system_allows(project: Project) -> None:
    """`ulimit -n` in the process that launch.sh becomes; a refusal changes nothing."""
    (project.folder / "python").write_text("#!/bin/sh\nulimit -Sn; ulimit -Hn\n")
    (project.folder / "python").chmod(0o755)
    environment = {**os.environ, "PYTHON": str(project.folder / "python")}
    for lower in ("ulimit -Sn 256", "ulimit -Sn 256; ulimit -Hn 512"):
        command = f"{lower}; exec bash launch.sh -n 1 train"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=project.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        soft, hard = done.stdout.split()
        assert soft == hard and not done.stderr


def test_a_machine_that_leaves_costs_no_restart(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since torchrun counts a restart for one that leaves as a failure, and allows a few."""
    launch = project.module("distributed.launch")
    monkeypatch.setenv("NNODES", "1:4")
    agent = object.__new__(launch.Agent)
    agent._remaining_restarts = 3
    codes = {0: 75, 1: 75}

    def monitor(self: object, worker_group: object) -> SimpleNamespace:
        failures = {rank: SimpleNamespace(exitcode=code) for rank, code in codes.items()}
        for failure in failures.values():
            failure.signal_name = lambda: "SIGKILL"
        return SimpleNamespace(failures=failures)

    monkeypatch.setattr(launch.LocalElasticAgent, "_monitor_workers", monitor)
    workers = SimpleNamespace(spec=SimpleNamespace(max_restarts=3))
    agent._monitor_workers(workers)
    assert agent._remaining_restarts == 4, "of which torchrun takes one for the restart"
    agent._remaining_restarts = 3
    codes[1] = -9
    agent._monitor_workers(workers)
    assert agent._remaining_restarts == 3, "a rank was killed"
    codes.clear()
    agent._monitor_workers(workers)
    assert agent._remaining_restarts == 3, "nothing has ended"


def test_one_gpu_is_not_for_several_processes(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    device = project.module("device")
    with pytest.raises(project.module("errors").UserError, match="use --device cuda"):
        device.pick_gpu(torch.device("cuda", 0))


def test_a_rank_in_a_phase_reports_once_the_others_have_given_up(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or they would take it for gone, as where rank 0 alone calls a collective in a callback."""
    watchdog = project.module("distributed.watchdog")
    watch = watchdog.Watchdog(tmp_path, project.module("distributed").Group())
    watch.folder, watch.limit, watch.group.phases = tmp_path / "hang", 0.2, 1
    ended = threading.Event()

    def end(waited: float) -> None:
        ended.set()
        watch.over.set()

    monkeypatch.setattr(watch, "_end", end)
    thread = threading.Thread(target=watch._watch, daemon=True)
    thread.start()
    assert not ended.wait(1.0), "a validation may take longer than a step"
    watch.folder.mkdir()
    assert ended.wait(5.0)
    thread.join(5.0)
