"""Jobs that are forked, not started, and tell from inside what they are doing.

A start of a training process costs seconds of imports; a fork of one that has imported everything
and computed nothing costs milliseconds and computes the same bits (which kill_storm.py checks). An
agent stands for torchrun: its ranks have sessions of their own, and when one dies it sends SIGTERM
to the others. Each rank writes what it is at to memory that it shares with the parent, where it
can still be read once the rank is dead.
"""

import contextlib
import importlib
import mmap
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import free_ports

PHASES = (
    "",
    "starting",
    "setting up",
    "restoring",
    "compiling",
    "training",
    "validating",
    "staging",
    "uploading",
    "hashing",
    "renaming",
    "pruning",
    "ending",
)
ARMED, SKIP, ARMED_RANK, HEAD = range(4)
PID, MAIN, BEHIND, DONE, SAVING, RESTORED, WIDTH = range(7)
PATIENCE = 600.0  # seconds, for what should take a few


class Board:
    """Shared memory: what each rank is at, in its main thread and behind it."""

    def __init__(self, ranks: int) -> None:
        self.cells = memoryview(mmap.mmap(-1, 4 * (HEAD + WIDTH * ranks))).cast("i")
        self.ranks = ranks

    def of(self, rank: int) -> memoryview:
        """The cells of a rank."""
        start = HEAD + WIDTH * rank
        return self.cells[start : start + WIDTH]

    def most(self, cell: int) -> int:
        """The largest value among the ranks."""
        return max(self.of(rank)[cell] for rank in range(self.ranks))


@dataclass(frozen=True)
class Plan:
    """What to start: a package with settings, on so many ranks (0: one plain process)."""

    package: str
    settings: dict[str, Any]
    ranks: int
    sabotage: Callable[[str], None] | None = field(default=None, compare=False)
    """Called with the package in each rank, to break something and see it noticed."""
    store: str | None = None
    """Where there is one, each run has its checkpoints below this address, by its name."""

    def configuration(self, run_dir: Path, **more: Any) -> Any:
        """The settings, resolved."""
        config = importlib.import_module(f"{self.package}.config")
        place: dict[str, Any] = {"run_dir": run_dir, "device": "cpu"}
        place |= {"checkpoint.url": f"{self.store}/{run_dir.name}"} if self.store else {}
        return config.override(config.preset("tiny"), self.settings | place | more)


class Job:
    """A run of a plan, forked; `log` takes what it prints."""

    def __init__(
        self, plan: Plan, run_dir: Path, log: Path, armed: tuple[int, int, int] = (-1, 0, 0)
    ) -> None:
        """`armed`: the phase, how many times to let it pass and the rank that shall then call."""
        self.board = Board(max(1, plan.ranks))
        self.board.cells[ARMED], self.board.cells[SKIP], self.board.cells[ARMED_RANK] = armed
        self.log, self.code = log, -1
        self.calls, line = os.pipe()
        config = plan.configuration(run_dir)
        self.agent = os.fork()
        if self.agent == 0:
            try:
                os.close(self.calls)
                _quiet(log)
                if plan.ranks:
                    _lead(plan, config, self.board, line)
                else:
                    _train(plan, config, self.board, 0, line)
            except BaseException:
                traceback.print_exc()  # into the log
            os._exit(70)
        os.close(line)

    def wait(self, seconds: float) -> bytes | None:
        """A call, b"" when all of its processes are gone, None when time is up."""
        if select.select([self.calls], [], [], max(0.0, seconds))[0]:
            return os.read(self.calls, 1)
        return None

    def victims(self, whom: str, rank: int) -> list[int]:
        """The processes to kill."""
        ranks = [self.board.of(r)[PID] for r in range(self.board.ranks)]
        if whom == "launcher":
            return [self.agent]
        return [pid for pid in (ranks if whom == "all ranks" else [ranks[rank]]) if pid]

    def gone(self, seconds: float = PATIENCE) -> float | None:
        """Seconds until all its processes are gone, or None if some are still there."""
        started = time.monotonic()
        while (left := started + seconds - time.monotonic()) > 0:
            if self.wait(left) == b"":
                self._reap()
                return time.monotonic() - started
        for pid in {self.agent, *(self.board.of(r)[PID] for r in range(self.board.ranks))} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reap()
        return None

    def _reap(self) -> None:
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.agent, 0)[1])
        os.close(self.calls)

    def phases(self, whom: str, rank: int) -> set[str]:
        """What those that were killed were at."""
        ranks = [rank] if whom == "one rank" else range(self.board.ranks)
        cells = [self.board.of(r) for r in ranks]
        return {PHASES[c[place]] for c in cells for place in (MAIN, BEHIND)} - {""}


def _quiet(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # whatever the parent has made of them


def _lead(plan: Plan, config: Any, board: Board, line: int) -> None:
    """What torchrun does for its workers."""
    os.setsid()
    [port], agent, pids = free_ports(1), os.getpid(), []
    for rank in range(plan.ranks):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.setsid()
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": plan.ranks}
                numbers |= {"LOCAL_WORLD_SIZE": plan.ranks, "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in numbers.items()})
                os.environ.update(MASTER_ADDR="127.0.0.1", LAUNCHER_PID=str(agent))
                _train(plan, config, board, rank, line)
            os._exit(70)
        pids.append(pid)
    failed = False
    for _ in pids:
        pid, status = os.wait()
        pids = [other for other in pids if other != pid]
        if status and not failed:
            failed = True
            for other in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    os._exit(int(failed))


def _train(plan: Plan, config: Any, board: Board, rank: int, line: int) -> None:
    watch = _Watch(plan.package, board, rank, line)
    watch.enter("starting", MAIN)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{config.run_dir}-inductor"  # each run starts cold
    if plan.sabotage:
        plan.sabotage(plan.package)
    if board.cells[ARMED_RANK] == rank and watch.called:
        time.sleep(0.1)  # a start that is no fork takes seconds
    logs, errors, training = (
        importlib.import_module(f"{plan.package}.{name}")
        for name in ("run.logs", "errors", "train")
    )
    logs.log_to_console()
    watch.everything(training)

    def run() -> int:
        training.run(config)
        watch.enter("ending", MAIN)
        return 0

    code = errors.run_main(run)
    sys.stderr.flush()
    os._exit(code)


class _Watch:
    """Marks what a rank is at by wrapping what it calls."""

    def __init__(self, package: str, board: Board, rank: int, line: int) -> None:
        self.package, self.board, self.rank, self.line = package, board, rank, line
        self.mine = board.of(rank)
        self.mine[PID] = os.getpid()
        self.called = False

    def enter(self, phase: str, place: int) -> None:
        """Begin a phase; call the parent if it is the one that it waits for."""
        number, cells = PHASES.index(phase), self.board.cells
        self.mine[place] = number
        if cells[ARMED] == number and cells[ARMED_RANK] == self.rank:
            cells[SKIP] -= 1
            if cells[SKIP] < 0:
                cells[ARMED], self.called = -1, True
                os.write(self.line, b"!")

    def mark(self, holder: Any, name: str, phase: str, after: Callable[..., None] | None = None):
        """Wrap a function; `after(result, arguments)` may note what came of it."""
        call = getattr(holder, name)

        def marked(*arguments: Any, **named: Any) -> Any:
            main = threading.current_thread() is threading.main_thread()
            place = MAIN if main else BEHIND
            before = self.mine[place]
            self.enter(phase, place)
            try:
                result = call(*arguments, **named)
                if after:
                    after(result, arguments)
                return result
            finally:
                self.mine[place] = before

        setattr(holder, name, marked)

    def note(self, cell: int, value: int) -> None:
        """Write to a cell of this rank."""
        self.mine[cell] = value

    def everything(self, training: Any) -> None:
        """Wrap the calls that are counted separately."""
        state = importlib.import_module(f"{self.package}.checkpoint.checkpointer")
        publish = importlib.import_module(f"{self.package}.checkpoint.publish")
        writer = importlib.import_module(f"{self.package}.checkpoint.writer")
        step, save, stage = training.train_step, state.Checkpointer.save, writer.Writer.begin
        number = [0]

        def train_step(now: Any, batches: Any) -> None:
            compiling = now.config.compile.mode != "none" and not self.mine[DONE]
            self.enter("compiling" if compiling else "training", MAIN)
            step(now, batches)
            self.mine[DONE] = now.step
            self.mine[MAIN] = PHASES.index("training")

        def begin_save(checkpointer: Any, of: int, *arguments: Any) -> None:
            number[0] = of
            save(checkpointer, of, *arguments)

        def begin_to_stage(*arguments: Any) -> None:
            self.mine[SAVING] = number[0]  # the save before is over, and this one is not skipped
            self.enter("staging", MAIN)
            stage(*arguments)
            self.mine[MAIN] = PHASES.index("training")

        training.train_step, state.Checkpointer.save = train_step, begin_save
        writer.Writer.begin = begin_to_stage
        if hasattr(writer, "HostBuffers"):
            self.mark(writer.HostBuffers, "finish", "staging")
        self.mark(training, "setup", "setting up")
        validation = importlib.import_module(f"{self.package}.validation")
        self.mark(validation, "validate", "validating")
        storage = importlib.import_module(f"{self.package}.checkpoint.storage")
        for publisher in (publish.Publisher, getattr(storage, "StorePublisher", None)):
            if publisher:
                self.mark(publisher, "make_durable", "hashing")
                self.mark(publisher, "commit", "renaming")
        self.mark(publish.Publisher, "prune", "pruning")
        restored = lambda step, _: self.note(RESTORED, step + 1)  # noqa: E731
        self.mark(state.Checkpointer, "restore", "restoring", restored)
        self.mark(publish.Publisher, "publish", "uploading", lambda *_: self.note(SAVING, 0))
