"""The processes of a run: joining and leaving, agreeing, one control word, stop signals.

Every process drives one device. Host-side agreement (short objects, the control word) goes over
gloo groups of its own, so that it never waits in line behind the device's collectives.
"""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import UserError
from .network import LOOPBACK, NCCL, PATIENCE, make_room, prefer

log = logging.getLogger(__name__)
T = TypeVar("T")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class RankError(RuntimeError):
    """Something failed on one rank or more; raised on all of them."""

    agreed = False
    """Whether every rank raised it, so that one of them need say it."""


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    rank: int
    size: int
    device: torch.device
    distributed: bool = False
    step_limit: timedelta = PATIENCE
    """A step that takes longer is a hang (engine/watch.py)."""

    def check_batch(self, samples: int) -> None:
        """UserError when a global batch has no sample for some rank."""
        if samples < self.size:
            raise UserError(
                f"--train.global-batch-size {samples} is below the {self.size} ranks of this run: "
                "raise it or start fewer processes"
            )


def launched_ranks() -> int:
    """Number of processes that torchrun started for this run (1 when it did not start any)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def pick_device(name: str) -> torch.device:
    """Resolve "auto", "cpu", "cuda", "cuda:1", "mps" for this process; UserError if not there."""
    available = {"cpu": True, "cuda": torch.cuda.is_available()}
    available["mps"] = torch.backends.mps.is_available() and "RANK" not in os.environ  # no gloo
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: not a device; try auto, cpu or cuda") from None
    if not available.get(device.type, False):
        raise UserError(f"--device {name}: there is no such device here; try --device auto")
    if device.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise UserError(
                f"local rank {index} has no GPU of its own ({torch.cuda.device_count()} here): "
                "start fewer processes on this machine, or use --device cpu"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def join(device_name: str, step_limit: timedelta) -> World:
    """Join the process group that torchrun announces; a plain process stays on its own."""
    device = pick_device(device_name)
    if "RANK" not in os.environ:
        return World(0, 1, device)
    if step_limit <= timedelta():
        raise UserError("--parallel.timeout-minutes must be positive")
    die_with_the_launcher()
    make_room(launched_ranks())
    # A save may hold up a collective longer than a step may take, and on NCCL one that is too late
    # takes the process with it, unexplained: engine/watch.py is quicker, and says who is to blame.
    how: dict[str, Any] = {"timeout": max(PATIENCE, 2 * step_limit)}
    theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun shares its own
    if os.environ["MASTER_ADDR"] == LOOPBACK and not theirs:
        how |= {"rank": int(os.environ["RANK"]), "world_size": launched_ranks()}
        how["store"] = _store_on_loopback(how["rank"])
    if device.type == "cuda":
        prefer(NCCL)
        dist.init_process_group("nccl", device_id=device, **how)
    else:
        dist.init_process_group("gloo", **how)
    return World(dist.get_rank(), dist.get_world_size(), device, True, step_limit)


def _store_on_loopback(rank: int) -> dist.Store:
    """The ranks' store of a job on one machine; left to itself torch's listens to everybody."""
    port, more = int(os.environ["MASTER_PORT"]), {}
    if rank == 0:
        listener = socket.create_server((LOOPBACK, port), backlog=4096)
        more = {"is_master": True, "master_listen_fd": listener.detach()}
    return dist.TCPStore(LOOPBACK, port, timeout=PATIENCE, wait_for_workers=False, **more)


def set_up_torch(seed: int, deterministic: bool) -> None:
    """Seed what builds the model; choose kernels."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")  # TF32 where what is left in float32 allows it
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def leave(world: World) -> None:
    """Leave the process group, once nothing refers to the model or the optimizer any more.

    A DDP reducer that outlives its group can deadlock the interpreter on its way out, hence the
    collection; the barrier keeps a fast rank from tearing down what a slow one still uses.
    """
    gc.collect()
    if world.distributed and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def die_with_the_launcher() -> None:
    """Ask the kernel to end this process when torchrun is killed (Linux; else it would live on)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG, launcher = 1, os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # Killed while we asked, or even before, while torch was imported, which takes seconds.
        if os.getppid() != launcher or _has_ended(os.environ.get("LAUNCHER_PID")):
            sys.exit("the launcher is gone")


def _has_ended(pid: str | None) -> bool:
    """Whether a process is gone, or dead and its parent has not asked after it yet (Linux)."""
    if pid is None:
        return False
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


class HostGroup:
    """Agreement between the ranks' host sides; on one plain process everything is immediate."""

    limit = PATIENCE
    """How long `wait` waits: the loop shortens it while it steps (engine/watch.py)."""

    def __init__(self, world: World | None = None) -> None:
        self.rank, self.size = (world.rank, world.size) if world else (0, 1)
        self.group = None
        if world and world.distributed:
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
            dist.barrier(self.group)  # only now may rank 0 leave, and its store with it

    def agree(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; rank 0 gets all results, the others their own in a list.

        RankError on every rank, naming those that failed, when it failed on any.
        """
        outcome = self._attempt(action)
        gathered = [outcome]
        if self.group is not None:
            gathered = [outcome] * self.size if self.rank == 0 else None
            dist.gather_object(outcome, gathered, group_dst=0, group=self.group)
        failed = None
        if gathered:
            failed = [(r, *o[:2]) for r, o in enumerate(gathered) if o[0]]
        _raise_if(self._broadcast(failed))
        return [value for _, _, value in gathered or [outcome]]

    def from_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only and give its result to all; RankError on all if it failed."""
        problem, by_user, value = self._broadcast(self._attempt(action) if self.rank == 0 else None)
        _raise_if([(0, problem, by_user)] if problem else [])
        return value

    def all_max(self, values: torch.Tensor) -> dist.Work | None:
        """Start an element-wise maximum over the ranks, in place (CPU tensor)."""
        if self.group is None:
            return None
        return dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def wait(self, work: dist.Work) -> None:
        """Wait for what was started; RankError when some rank has not come within `limit`."""
        try:
            work.wait(self.limit)
        except RuntimeError as error:  # also that a rank is gone
            raise RankError(f"a rank did not answer the others: {error}") from error

    def _broadcast(self, value: Any) -> Any:
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]

    @staticmethod
    def _attempt(action: Callable[[], T]) -> tuple[str | None, bool, T | None]:
        try:
            return None, False, action()
        except UserError as error:
            return str(error), True, None
        except RankError as error:
            return str(error), False, None
        except Exception as error:
            log.debug("failed on this rank", exc_info=True)
            return f"{type(error).__name__}: {error}", False, None


def _raise_if(failures: list[tuple[int, str, bool]]) -> None:
    if any(by_user for _, _, by_user in failures):
        error = UserError(next(problem for _, problem, by_user in failures if by_user))
        error.agreed = True
        raise error
    if failures:
        first = {problem: rank for rank, problem, _ in reversed(failures)}  # each said once
        texts = [f"rank {rank}: {problem}" for problem, rank in first.items()][::-1]
        texts[4:] = [f"and {len(texts) - 4} more"] if len(texts) > 4 else []
        error = RankError("; ".join(texts))
        error.agreed = True
        raise error


class Control:
    """The control word: what any rank wants all ranks to do, read one step after it was sent.

    Signal handlers only set a flag. Each step every rank starts an all-reduce of its flags and
    reads the one of the step before, so nobody waits and all act at the same step. Only the first
    one is waited for: a stop that came during start-up is heeded before the first step.
    """

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.signal: int | None = None
        self.previous: dict[int, Any] = {}
        self.pending: dist.Work | None = None
        self.heeded = False

    def __enter__(self) -> "Control":
        """Take over the stop signals (in the main thread; elsewhere they are left alone)."""
        try:
            self.previous = {n: signal.signal(n, self._handle) for n in STOP_SIGNALS}
        except ValueError:
            log.debug("not in the main thread: stop signals are not handled")
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Give the signals back; no collective is left unfinished after a regular end."""
        for number, handler in self.previous.items():
            # Told to stop, it does; told once more on its way out, it must not die of that.
            deaf = self.signal is not None and handler == signal.SIG_DFL
            signal.signal(number, _hear_no_more if deaf else handler)
        if kind is None and self.pending is not None:
            self.group.wait(self.pending)

    def exchange(self, failed: bool = False) -> tuple[int, bool]:
        """Send this rank's flags; return (stop signal or 0, a save failed) as of the last call."""
        self.heeded = True
        if self.group.group is None:
            return self.signal or 0, failed
        if self.pending is None:
            self._send(failed)
        self.group.wait(self.pending)
        stop, any_failed = self.word.tolist()
        self._send(failed)
        return stop, bool(any_failed)

    def _send(self, failed: bool) -> None:
        self.word = torch.tensor([self.signal or 0, failed], dtype=torch.int32)
        self.pending = self.group.all_max(self.word)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGINT and (self.signal == signal.SIGINT or not self.heeded):
            raise KeyboardInterrupt  # a second Ctrl-C means now, as does one during start-up
        self.signal = number


def _hear_no_more(number: int, frame: types.FrameType | None) -> None:
    """Unlike SIG_IGN, nothing that a child process would inherit."""
