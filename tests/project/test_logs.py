"""Who says what and where, which rank is slow, and how long ranks wait for each other."""

import errno
import io
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import Project, bake, drill, project_fixture

project = project_fixture("of_logs", parallelism="ddp", checkpoint="dcp_async", cluster="slurm")


def test_each_line_tells_the_copies_for_saves(project: Project, tmp_path: Path) -> None:
    changes = {"optim__name": "adamw", "train__log_every": 1, "checkpoint__every": 4}
    settings = project.config(run_dir=tmp_path, **changes)
    project.module("train").run(settings)
    weights = project.module("train").setup(settings).model.parameters()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    staged = [json.loads(line).get("staging_bytes", 0) for line in lines]
    size = 3 * sum(parameter.nbytes for parameter in weights)  # with two moments
    assert staged[0] == 0
    # From the second step on, before the first save; with the optimizer's counters.
    assert all(size <= it < 1.01 * size for it in staged[1:])


def test_the_slow_rank_is_named_and_each_has_its_log(project: Project, tmp_path: Path) -> None:
    """Three ranks: as fast as each other, one slow in its step (DDP), one at its data (FSDP)."""
    answers = {"parallelism": "fsdp", "checkpoint": "dcp", "cluster": "slurm"}
    other = bake(tmp_path, package_name="of_logs_fsdp", **answers)
    (tmp_path / "text.txt").write_text("The quality of mercy is not strained. " * 100)
    sources = {"of_logs": project.folder / "src", "of_logs_fsdp": other / "src"}
    output = drill("pace.py", (3, str(tmp_path), *sources), sources=sources)
    assert json.loads(output.splitlines()[-1])["slow step"] == [None, 2, 2, 2, 2]
    assert json.loads(output.splitlines()[-1])["slow data"] == [None, 1, 1, 1, 1]
    logs = {name: (tmp_path / name / "logs") for name in ("even", "slow step", "slow data")}
    for name, slow in (("even", None), ("slow step", 2), ("slow data", 1)):
        lines = (logs[name] / "train.log").read_text().splitlines()
        told = [line for line in lines if "slows the others down" in line]
        assert len(told) == (slow is not None), lines
        assert slow is None or f"WARNING rank {slow} on " in told[0]
        assert output.count(f"WARNING: rank {slow} on ") == len(told)
        assert sum("step 10/10" in line for line in lines) == 1
        assert " INFO finished: " in lines[-1]

    texts = [
        (logs["even"] / name).read_text() for name in ("train.log", "rank_1.log", "rank_2.log")
    ]
    for rank, text in enumerate(texts):
        assert f"rank {rank} of 3, restarts so far: 0, process " in text.splitlines()[0]
        said = [f"{said} of rank {rank}\n" for said in ("Python's warning", "warning", "error")]
        raw = [f"printed by rank {rank}\n", f"library's line of rank {rank}\n"]
        for line in [*said, *(raw if rank else [])]:
            assert text.count(line) == 1 + (line == f"warning of rank {rank}\n"), (line, text)
        foreign = {f"of rank {other}\n" for other in range(3)} - {f"of rank {rank}\n"}
        assert not any(word in text for word in foreign)
        on_console = {*said, *raw} if rank == 0 else {f"error of rank {rank}\n"}
        assert {line for line in [*said, *raw] if line in output} == on_console
        broken = tmp_path / "broken/logs" / (f"rank_{rank}.log" if rank else "train.log")
        assert "Traceback" in broken.read_text()
        assert f"ValueError: broken on rank {rank}\n" in broken.read_text()


def test_a_verdict_gets_past_a_console_that_is_gone(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "nobody reads on")

    closed, file = SimpleNamespace(write=gone, flush=lambda: None), io.StringIO()
    group = project.module("distributed").Group()
    for console, stderr in ((closed, file), (file, closed)):
        monkeypatch.setattr(group, "console", console)
        monkeypatch.setattr(sys, "stderr", stderr)
        group.say("a verdict")
    assert file.getvalue() == 2 * "a verdict\n"


CRASH = """
import faulthandler, logging, os
from pathlib import Path
from of_logs.distributed import Group
from of_logs.run import logs
logs.log_to_console()
group = Group()
group.rank = int(os.environ["RANK"])
with logs.logging_in(Path(), group):
    logging.getLogger("of_logs.distributed.watchdog").warning("a warning")
    group.say("a verdict")
    print("printed")
    os.write(2, b"a library's line\\n")
    faulthandler._sigsegv()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_crash_leaves_its_stacks_in_the_log(project: Project, tmp_path: Path, rank: int) -> None:
    """Behind what stood there before; the verdict on a hang is on the console in any case."""
    file = tmp_path / ("rank_1.log" if rank else "train.log")
    file.write_text("of the start before\n")
    outcome = project.python("-u", "-c", CRASH, cwd=tmp_path, RANK=str(rank))
    assert outcome.returncode < 0
    lines = file.read_text().splitlines()
    assert lines[0] == "of the start before"
    assert "Fatal Python error: Segmentation fault" in lines
    assert any('File "<string>"' in line for line in lines)
    console = outcome.stdout + outcome.stderr
    assert console.count("a verdict") == 1
    assert ("a library's line" in lines, "printed" in lines) == (rank == 1, rank == 1)
    assert ("a warning" in console, "a library's line" in console) == (rank == 0, rank == 0)
    assert sum("WARNING a warning" in line for line in lines) == 1


NO_STREAMS = """
import os, sys
from of_logs.run import logs
answer = os.dup(1)
for descriptor in range(3):
    os.close(descriptor)
sys.stdin = sys.stdout = sys.stderr = None
logs.log_to_console()
logs.PACKAGE.warning("lost")
print("lost")
file = os.open("file", os.O_CREAT | os.O_WRONLY)
os.write(answer, f"{file > 2} {[os.get_inheritable(n) for n in range(3)]}".encode())
"""


def test_what_is_written_without_streams_is_lost_and_goes_to_no_file(
    project: Project, tmp_path: Path
) -> None:
    """Else the next file that is opened, perhaps of a checkpoint, would be descriptor 1 or 2."""
    outcome = project.python("-c", NO_STREAMS, cwd=tmp_path)
    assert outcome.stdout == "True [True, True, True]", outcome.stderr
    assert not (tmp_path / "file").read_bytes()


BROKEN = """
from pathlib import Path
from of_logs.distributed import Group
from of_logs.errors import RankError
from of_logs.run import logs
def broken():
    raise ZeroDivisionError("on this rank")
logs.log_to_console()
with logs.logging_in(Path(), Group()):
    for _ in range(2):
        try:
            with Group().together():
                broken()
        except RankError as error:
            print("told:", error)
"""


def test_an_error_told_by_its_message_leaves_its_traceback_where_it_happened(
    project: Project, tmp_path: Path
) -> None:
    outcome = project.python("-c", BROKEN, cwd=tmp_path)
    assert outcome.stdout == "told: rank 0: ZeroDivisionError: on this rank\n" * 2, outcome.stderr
    assert outcome.stderr == ""
    text = (tmp_path / "train.log").read_text()
    assert text.count("Traceback") == text.count(", in broken\n") == 2


def test_a_log_that_cannot_be_written_ends_nothing(project: Project, tmp_path: Path) -> None:
    logs, group = project.module("run.logs"), project.module("distributed").Group()
    with logs.logging_in(tmp_path, group):
        handler = logs.PACKAGE.handlers[-1]
        handler.setStream(open("/dev/full", "w"))  # noqa: SIM115 - the handler closes it
        logs.PACKAGE.warning("lost")
    assert handler not in logs.PACKAGE.handlers


def test_a_log_call_that_cannot_be_formatted_ends_nothing(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    console = project.module("run.logs").Console()
    record = logging.LogRecord("x", logging.INFO, "own.py", 1, "%d samples", ("many",), None)
    console.emit(record)
    assert "%d samples" in capsys.readouterr().err


@pytest.mark.parametrize("begins", [".nonce-", ".metrics.jsonl"])
def test_a_start_that_cannot_write_names_the_file_once(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, begins: str
) -> None:
    """What the system says of a write names none; tests/stress fails every call of a start."""
    options = (*project.settings, "--run-dir", str(tmp_path), "--train.steps")
    project("train", *options, "1")
    rundir, agreement = (project.module(n) for n in ("run.directory", "distributed.agreement"))
    files = project.module("files")
    opener = files.open_to_write
    write_json, refused = rundir.write_json, OSError(5, "Input/output error")

    def open_file(path: Path, *rest: Any, **how: Any) -> Any:
        if Path(path).name.startswith(begins):
            raise refused
        return opener(path, *rest, **how)

    def no_status(path: Path, content: Any) -> None:
        if content.get("status") == "failed":
            raise refused
        write_json(path, content)

    for module in (agreement, files):
        monkeypatch.setattr(module, "open_to_write", open_file)
    monkeypatch.setattr(rundir, "write_json", no_status)
    said = project.refuses("train", *options, "2")
    assert f"Input/output error: '{tmp_path}/" in said and begins.strip(".-") in said
    assert "status.json cannot be written" not in caplog.text


def test_a_run_appends_to_its_log_and_one_that_never_began_leaves_none(project: Project) -> None:
    for steps in ("2", "3"):
        project("train", *project.settings, "--name", "twice", "--train.steps", steps)
    text = (project.folder / "runs/twice/logs/train.log").read_text()
    assert text.count("process ") == 2
    project.refuses("train", *project.settings, "--name", "never", "--init-from", "nowhere")
    assert not (project.folder / "runs/never").exists()


class Group:
    """Ranks whose figures are made up: what the one at hand sends is what all have sent."""

    rank, size, resumed = 0, 4, 0.0

    def __init__(self) -> None:
        self.theirs: Sequence[float] = (0.0,) * 4  # seconds of each
        self.sent: list[float] = []

    def gather(self, value: str) -> list[str]:
        return ["a", "b", "c", "d"]

    def maximum(self, values: list[float]) -> Callable[[], list[float]]:
        self.sent, theirs = values, list(self.theirs)
        return lambda: theirs


@pytest.mark.parametrize(
    ("windows", "accused"),
    [
        ([(1.0, 1.0, 1.3, 1.0)] * 3, ["rank 2 on c"]),
        ([(1.0, 1.0, 1.3, 1.0)] * 9, ["rank 2 on c"]),  # said once
        ([(1.0, 1.0, 1.3, 1.0)] * 2, []),
        ([(1.0, 1.0, 1.1, 1.0)] * 9, []),  # no slower than that
        ([(1.0, 1.0, 1.0, 1.0)] * 9, []),
        ([(1.0, 1.0, 1.3, 1.0), (1.0, 1.3, 1.0, 1.0)] * 9, []),  # now this one, now that
        ([*[(1.0, 1.0, 1.3, 1.0)] * 2, (1.0,) * 4] * 4, []),
        ([(0.01, 0.01, 0.09, 0.01)] * 9, []),  # nothing, of a step of two seconds
        (
            [*[(3.0, 1.0, 1.0, 1.0)] * 3, (1.0,) * 4, *[(1.0, 1.0, 1.0, 3.0)] * 3],
            ["rank 0 on a", "rank 3 on d"],
        ),
    ],
)
def test_who_is_slower_time_and_again_is_named(
    project: Project, windows: list[tuple[float, ...]], accused: list[str], caplog: Any
) -> None:
    module, group = project.module("distributed.stragglers"), Group()
    stragglers = module.Stragglers(group, SimpleNamespace(type="cpu"), None)
    figures = []
    with stragglers:
        for theirs in [*windows, (0.0,) * 4]:
            group.theirs = theirs
            record = {"step_seconds": 2.0}
            stragglers.before_step(None)
            stragglers.after_step(None, record)
            stragglers.begin(None, record)
            figures.append({name: value for name, value in record.items() if "rank" in name})
    said = [record.message.split(" slows")[0] for record in caplog.records]
    assert said == accused
    assert figures[0] == {}, "nobody waits for them"
    for theirs, figure in zip(windows, figures[1:], strict=True):
        assert figure["slowest_rank_seconds"] == max(theirs) == theirs[figure["slowest_rank"]]
        assert figure["median_rank_seconds"] == sorted(theirs)[1]


def test_what_is_timed_ends_where_ranks_first_wait(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that counts its readings: what lies before a step's last arrival counts."""
    import torch

    module = project.module("distributed.stragglers")
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(module, "time", clock)
    model, group = torch.nn.Linear(1, 1), Group()
    # Any module stands for one under DDP, which needs a process group.
    monkeypatch.setattr(module, "DistributedDataParallel", torch.nn.Linear)
    stragglers = module.Stragglers(group, SimpleNamespace(type="cpu"), model)

    def step(forwards: int, record: dict[str, float] | None = None) -> None:
        stragglers.before_step(None)
        for _ in range(forwards):
            model(torch.ones(1))
        stragglers.after_step(None, record)
        for _ in range(9):
            clock.perf_counter()  # what rank 0 writes and prints is none of it
        stragglers.begin(None, record)

    def mean_after(forwards: int) -> float:
        step(forwards, {"step_seconds": 1.0})
        return group.sent[0]

    with stragglers:
        assert mean_after(5) == 0, "the first step has no beginning"
        assert mean_after(0) == 1
        step(1)
        assert mean_after(3) == 3
        stragglers.before_step(None)
        model(torch.ones(1))
        model.eval()
        model(torch.ones(1))  # validation is none of it
        model.train()
        stragglers.after_step(None, {"step_seconds": 1.0})
        stragglers.begin(None, None)
        assert group.sent[0] == 2
        group.resumed += 1  # a save in between, in which ranks waited for each other
        step(0)
        assert mean_after(3) == 4
        for _ in range(module.TIMED_STEPS):
            step(0)
        assert mean_after(50) == 1, "no more are timed"
    before = next(ticks)
    model(torch.ones(1))
    assert next(ticks) == before + 1, "the hook is gone"


def test_the_environment_is_set_in_one_place_and_the_users_own_wins(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, launch = project.module("distributed.world"), project.module("distributed.launch")
    ours = {**world.NCCL, **world.ON_LOOPBACK, **world.ON_MANY_RANKS}
    for name in ours:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(world, "pick_device", lambda name: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(world.torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(world, "die_with_the_launcher", lambda: None)
    began = {}
    for name in ("get_rank", "get_world_size"):
        monkeypatch.setattr(world.dist, name, lambda: 0)
    monkeypatch.setattr(world.dist, "init_process_group", lambda *_, **how: began.update(how))
    world.join(SimpleNamespace(timeout_minutes=20), "cuda")
    launch.on_one_machine("/nowhere")
    assert os.environ["NCCL_DEBUG"] == "INFO" and os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_SOCKET_IFNAME"] in ("lo", "lo0")
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    # After 30 minutes of a save, the watchdog waits 2 * 20 for reports. It has to end first.
    assert began["timeout"] == timedelta(minutes=71), "the watchdog is first"
    seconds = int(os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"])
    assert seconds > began["timeout"].total_seconds(), "the watchdog is first"
    # Nowhere else are any set: what there is, with its reason, can be read in one file.
    sources = (project.folder / "src").rglob("*.py")
    for path in (path for path in sources if path.name != "world.py"):
        assert not any(f'"{name}"' in path.read_text("utf-8") for name in ours), path


def test_a_report_that_fails_still_says_why_the_run_ends(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = project.module("distributed.watchdog")
    group = project.module("distributed").Group()
    said: list[str] = []
    ended: list[int] = []

    def fail(waited: float) -> None:
        raise RuntimeError("the process group is gone")

    monkeypatch.setattr(group, "say", said.append)
    watchdog = module.Watchdog(tmp_path, group)
    monkeypatch.setattr(watchdog, "_report", fail)
    monkeypatch.setattr(module.os, "_exit", ended.append)
    watchdog._end(60.0)
    assert ended == [1]
    (text,) = said
    assert text.endswith("the report failed: RuntimeError: the process group is gone")


def test_hosts_wait_long_but_while_stepping(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start and in a validation as long as it takes; in a step somewhat over its limit."""
    distributed, world = project.module("distributed"), project.module("distributed.world")
    limit = timedelta(seconds=6)
    group = distributed.Group(distributed.World(0, 1, None, False, limit))
    watchdog_module = project.module("distributed.watchdog")
    watchdog = watchdog_module.Watchdog(tmp_path, group)
    waits: list[timedelta] = []
    agreement = project.module("distributed.agreement")
    reduction = SimpleNamespace(wait=waits.append)
    monkeypatch.setattr(agreement.dist, "all_reduce", lambda *_, **__: reduction)
    group.maximum([0])()
    watchdog.after_step(None, None)
    group.maximum([0])()
    with group.phase("save"):
        group.maximum([0])()
    group.maximum([0])()
    short = waits[1]
    long = waits[0]
    assert waits == [long, short, long, short]
    assert limit + timedelta(seconds=30) < short < timedelta(minutes=2)
    assert world.PHASE_LIMIT + timedelta(seconds=30) < long < timedelta(minutes=40)
    # The watchdog waits 10 s and twice the longest step for reports, and has to end first.
    reports = watchdog_module.REPORTING_SECONDS
    for minutes in (0.1, 1, 10, 20, 60):
        limit = timedelta(minutes=minutes)
        group = distributed.Group(distributed.World(0, 1, None, False, limit))
        for is_phase in (True, False):
            group.phases = int(is_phase)
            group.maximum([0])()
            until_the_verdict = 3 * limit + timedelta(seconds=reports)
            if is_phase:
                until_the_verdict += max(world.PHASE_LIMIT - limit, timedelta())
            assert until_the_verdict < waits[-1] < until_the_verdict + timedelta(minutes=2)


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        (["wait"] * 3000, 1801),  # start-up
        (["step", *["wait"] * 3000], 11),
        (["wait"] * 100 + ["step"], None),  # compiling
        (["step", "begin", *["wait"] * 3000], 1801),
        (["step", "begin", *["wait"] * 100, "end", "wait", "wait", "step"], None),
        (["step", "begin", *["wait"] * 100, "end", *["wait"] * 100], 111),
        (["step", "suspend", "wait", "wait", "step"], None),
        (["step", "suspend", *["wait"] * 100], 611),
    ],
)
def test_a_step_has_its_limit_and_a_phase_a_longer_one(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    events: list[str],
    seconds: float | None,
) -> None:
    """By a clock of the test's own: what is done second by second, and when the watchdog reports.

    A step may take 10 s. What began in a phase (a save) does not count once it has ended.
    """
    distributed = project.module("distributed")
    watchdog, agreement = (project.module(f"distributed.{n}") for n in ("watchdog", "agreement"))
    now = 0.0
    for module in (watchdog, agreement):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    system = SimpleNamespace(_exit=lambda code: watch.over.clear(), getppid=os.getppid)
    monkeypatch.setattr(watchdog, "os", system)
    group = distributed.Group(distributed.World(0, 1, None, False, timedelta(seconds=10)))
    watch, phases, reported = watchdog.Watchdog(tmp_path, group), [], []
    watch.folder = tmp_path / "hang"
    left = iter(events)

    class Over:
        """Lets the clock go on instead of waiting."""

        def wait(self, timeout: float) -> bool:
            nonlocal now
            event = next(left, "over")
            if event == "step":
                watch.after_step(None, None)
            elif event == "begin":
                phases.append(group.phase("save"))
                phases[0].__enter__()
            elif event == "end":
                phases[0].__exit__(None, None, None)
            now += {"wait": 1.0, "suspend": 600.0}.get(event, 0.0)
            return event == "over" or bool(reported)

        def clear(self) -> None:
            reported.append(now)

    watch.over = Over()
    monkeypatch.setattr(watch, "_report", lambda waited: None)
    watch._watch()
    assert reported == ([] if seconds is None else [seconds])


def test_what_a_killed_start_left_is_removed(project: Project, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.nonce-x").touch()
    project("train", *project.settings, "--run-dir", str(tmp_path / "run"), "--train.steps", "2")
    assert not list((tmp_path / "run").glob(".nonce*"))


def test_a_restart_that_would_fail_is_told_before_it(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain torchrun on several machines shares its store with the ranks of all attempts."""
    world = project.module("distributed.world")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    for restarts, lines in (("0", 0), ("3", 1)):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        assert world._store_of_torchrun() is None
        assert len(caplog.messages) == lines
    assert "start with ./launch.sh, or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text
