"""Let ranks share host values and errors, and check that values are equal on all ranks.

An error inside a `Group.together` block is raised on all ranks. An error anywhere else only ends
the process of its rank (errors.py). The other ranks then wait in their next collective, until the
collective fails because the connection is gone, or until torchrun or the watchdog ends them. If all
ranks should report an error, put the work that may raise it into such a block.
"""

import contextlib
import itertools
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import RankError, UserError
from ..files import fingerprint, naming, open_to_write
from .world import PHASE_LIMIT, World, timeout_of_collectives

log = logging.getLogger(__name__)
T = TypeVar("T")
# The name of the compared values in the error message of `compare_loaded` (parallel.py).
LOADED = "the checksum of the loaded tensors (if it differs, a disk or memory is faulty)"
# `_block.open` is true while this thread is inside a `together` block. It is unset before the
# thread's first block.
_block = threading.local()


class Group:
    """Shares values and errors between the ranks, on their CPUs, over gloo.

    All ranks call the collective methods together, in the same order. If a rank's process dies, the
    others fail or wait in the next of these calls, until torchrun ends them. In a process without
    torchrun these methods return at once.
    """

    # The console, on a rank whose stderr is redirected to its log; None on other ranks.
    console: TextIO | None = None

    def __init__(self, world: World | None = None) -> None:
        self.rank = world.rank if world else 0
        self.size = world.size if world else 1
        # The first rank does the work that exactly one rank does.
        self.is_first = self.rank == 0
        self.step_limit = world.step_limit if world else PHASE_LIMIT
        self.timeout = timeout_of_collectives(self.step_limit)
        # The number of open phases. The first phase is the start-up, which the watchdog ends after
        # the first step.
        self.phases = 1
        # When the last phase ended, and when the last exchange ended (time.monotonic()).
        self.resumed = 0.0
        self.exchanged = 0.0
        # Waits for the pending exchange, and returns its result; None before the first exchange.
        self.wait_for_exchange: Callable[[], list[float]] | None = None
        # The current activity, such as "validation", for the message after a stop signal.
        self.doing = "step"
        self.process_group: Any = None
        if world and world.distributed:
            # In a separate process group, collectives never wait behind those of the device.
            self.process_group = dist.new_group(backend="gloo", timeout=self.timeout)
            # Ranks connect through a store, which rank 0 may serve. new_group does not wait for all
            # ranks, so without this barrier rank 0 could exit while others still connect.
            dist.barrier(self.process_group)

    def end_start_up(self) -> None:
        """End the start-up phase, after the first step."""
        self.phases -= 1

    def log_prefix(self) -> str:
        """Return this rank's number and the restarts so far, for the first line of its log."""
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"rank {self.rank} of {self.size}, restarts so far: {restarts}, "

    @contextlib.contextmanager
    def printing_to(self, file: TextIO, handler: Any) -> Iterator[None]:
        """Redirect this rank's stdout and stderr to `file`; `handler` still logs to the console."""
        # Redirect the file descriptors instead of sys.stdout and sys.stderr, so that `file` also
        # gets the output of C libraries and the stacks of a crash.
        with open(os.dup(1), "wb") as old_out, open(os.dup(2), "w", encoding="utf-8") as old_err:
            _print_to(file.fileno(), file.fileno())
            handler.stream = self.console = old_err
            try:
                yield
            finally:
                _print_to(old_out.fileno(), old_err.fileno())
                # Without a stream, `handler` prints to sys.stderr, which is the console again.
                handler.stream = self.console = None

    def say(self, text: str) -> None:
        """Print to stderr and, if stderr is redirected to a file, also to the console.

        Unlike a log call, this does not take logging's lock, which a hanging thread may hold.
        """
        for file in (self.console, sys.stderr):
            if file is None:
                continue
            # A redirected stderr may be on a disk that is full or gone.
            with contextlib.suppress(OSError):
                print(text, file=file, flush=True)

    @contextlib.contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """Give a block, such as a save, a time limit of PHASE_LIMIT, or the step limit if longer.

        `doing` names the activity in the message after a stop signal.
        """
        self.phases += 1
        self.doing = doing
        try:
            yield
        finally:
            # Set `resumed` before `phases`. When the watchdog's thread sees that the phase is over,
            # `resumed` must have the new time, or the phase would count as part of a step.
            self.resumed = time.monotonic()
            self.phases -= 1
            self.doing = "step"

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block of host work; at its end, raise an error of any rank on all ranks.

            with group.together():
                if group.is_first:
                    write_manifest()

        All ranks enter the block together. A UserError of any rank is raised as it is; other errors
        become one RankError that names the ranks. KeyboardInterrupt and SystemExit leave the block
        at once; the other ranks then notice that this rank is gone.

        The block must not contain a collective of this class or of torch.distributed, since a rank
        that failed would never reach it. Inside the block, `broadcast`, `gather`, `any`, `maximum`
        and another `together` raise RuntimeError.
        """
        _require_outside("together")
        error: Exception | None = None
        _block.open = True
        try:
            yield
        except Exception as raised:
            error = raised
        finally:
            _block.open = False
        if self.any(error is not None):
            self._raise_on_all(error)

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on all ranks; collective."""
        _require_outside("broadcast")
        if self.process_group is None:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.process_group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, and [value] on other ranks; collective."""
        _require_outside("gather")
        if self.process_group is None:
            return [value]
        if not self.is_first:
            dist.gather_object(value, None, group_dst=0, group=self.process_group)
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.gather_object(value, gathered, group_dst=0, group=self.process_group)
        return gathered

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set on any rank; collective."""
        _require_outside("any")
        if self.process_group is None:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, self.process_group)
        return bool(flags.item())

    def _raise_on_all(self, error: Exception | None) -> NoReturn:
        """Raise the same error on all ranks, given this rank's `error` or None; collective.

        This is the first UserError, or else a RankError with the messages of all errors.
        """
        # Only rank 0 gets the errors of all ranks, so it broadcasts them. A rank may have None.
        gathered = self.gather(_as_sent(error))
        failures = self.broadcast(gathered)
        for failure in failures:
            if isinstance(failure, UserError):
                raise failure from error
        raise RankError(_in_one_line(failures)) from error

    def prove_shared(self, folder: Path) -> None:
        """Raise UserError if a rank does not see a file that rank 0 writes to a folder.

        Collective.
        """
        nonce = folder / f".nonce-{self.broadcast(uuid.uuid4().hex)}"
        with self.together():
            if self.is_first:
                # An earlier start that was killed may have left its file.
                for outdated in folder.glob(".nonce-*"):
                    outdated.unlink()
                with naming(nonce), open_to_write(nonce) as file:
                    file.write("shared\n")
        with self.together():
            # Listing a folder makes a network file system refresh its cache.
            with contextlib.suppress(FileNotFoundError):
                os.listdir(folder)
            if not nonce.exists():
                problem = f"{socket.gethostname()} does not see the files of rank 0 in {folder}"
                raise UserError(
                    f"{problem}: put --run-dir on a file system that all machines share"
                )
        if self.is_first:
            # If this fails, the next start removes the file.
            with contextlib.suppress(OSError):
                nonce.unlink()

    def exchange(self, flags: list[int]) -> list[int]:
        """Send `flags`; return the maximum over the ranks of each flag sent at the previous call.

        All ranks get the same result. A rank waits only for ranks that have not made the previous
        call yet. But the first call waits for all ranks, and returns the maxima of the flags that
        it sends. Raises RankError if a rank is gone, or does not answer in time.
        """
        if self.process_group is None:
            return flags
        if self.wait_for_exchange is None:
            # The first call sends its flags twice: here for its own result, and below for the
            # result of the second call.
            self.wait_for_exchange = self.maximum(flags)
        maxima = self.wait_for_exchange()
        # Now all ranks are known to have made the previous call, so the run makes progress.
        self.exchanged = time.monotonic()
        self.wait_for_exchange = self.maximum(flags)
        return [int(flag) for flag in maxima]

    def settle(self) -> None:
        """Wait for the pending exchange, since a run must not end with an unfinished collective."""
        if self.wait_for_exchange:
            self.wait_for_exchange()

    def maximum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start an element-wise maximum over the ranks; return a function that waits for it.

        That function raises RankError if a rank is gone, or does not answer in time.
        """
        _require_outside("maximum")
        tensor = torch.tensor(values, dtype=torch.float64)
        work: Any = dist.all_reduce(tensor, dist.ReduceOp.MAX, self.process_group, async_op=True)

        def wait() -> list[float]:
            # If a rank hangs, the watchdog ends the run before `limit`, and names the rank. The
            # limit is only reached if the watchdog hangs, too, as on a network disk that is gone.
            limit = self.timeout
            if not self.phases:
                # In a step, the watchdog needs at most this long: it waits for the limit of a step,
                # then up to twice the longest step for reports. A step counts at most as long as
                # its limit.
                limit = 3 * self.step_limit + timedelta(minutes=1)
            try:
                work.wait(limit)
            except RuntimeError as error:
                # Either the limit was exceeded, or a rank is gone.
                raise RankError(f"a rank did not answer the others: {error}") from error
            return tensor.tolist()

        return wait


def _require_outside(name: str) -> None:
    """Raise RuntimeError if this thread is in a `together` block."""
    if getattr(_block, "open", False):
        raise RuntimeError(f"Group.{name} is a collective, which must not be in a together() block")


def _as_sent(error: Exception | None) -> Exception | None:
    """Return an error to send to other ranks: only its message, since not all can be pickled."""
    if error is None:
        return None
    if isinstance(error, UserError):
        return UserError(str(error))
    if isinstance(error, RankError):
        return RankError(str(error))
    log.debug("the other ranks only get the message of this error", exc_info=error)
    return RankError(f"{type(error).__name__}: {error}")


def _in_one_line(failures: Sequence[Exception | None]) -> str:
    """Join up to four different messages, each with the first rank that has it."""
    first_rank: dict[str, int] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            first_rank.setdefault(str(failure), rank)
    texts = [f"rank {rank}: {text}" for text, rank in first_rank.items()]
    more = len(texts) - 4
    if more > 0:
        texts = [*texts[:4], f"and {more} more"]
    return "; ".join(texts)


def _print_to(out: int, err: int) -> None:
    """Redirect this process's stdout to the descriptor `out`, and its stderr to `err`."""
    for descriptor, target, stream in ((1, out, sys.stdout), (2, err, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()
        os.dup2(target, descriptor)


def require_same_model(model: nn.Module, world: World) -> None:
    """Raise UserError, on every rank, unless all have built the same tensors in the same order.

    Collective. The broadcast of rank 0's values, and an optimizer that divides its work among the
    ranks, match tensors by their order. Different orders would mix up layers of the same shape.
    """
    tensors: list[str] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensors.append(f"{name} {list(tensor.shape)} {tensor.dtype}".replace("torch.", ""))
    _require_same_order(
        tensors,
        world,
        problem="the ranks have built different models",
        advice="build_model (model.py) must register parameters and buffers in the same order in "
        "each process: loop over a sorted list, not over a set",
    )


def require_same_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, world: World
) -> None:
    """Raise UserError, on every rank, unless all optimizers list their parameters in one order.

    Collective. An optimizer that divides its work among the ranks sends results in that order.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters: list[str] = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(parameter, f"a tensor {list(parameter.shape)} outside the model")
            parameters.append(f"{name} in group {index}")
    _require_same_order(
        parameters,
        world,
        problem="the optimizers of the ranks have their parameters in different orders",
        advice="build_optimizer (optim.py) must list the parameters in the same order in each "
        "process: loop over model.parameters() or a sorted list, not over a set",
    )


def _require_same_order(entries: list[str], world: World, problem: str, advice: str) -> None:
    """Raise UserError, on every rank, if an entry differs from rank 0's; collective."""
    if world.size == 1:
        return
    # Compare digests first. The entries themselves are only sent to report a difference.
    digests = [""] * world.size
    dist.all_gather_object(digests, fingerprint(*entries))
    if len(set(digests)) == 1:
        return
    entries_of: list[list[str]] = [[]] * world.size
    dist.all_gather_object(entries_of, entries)
    for rank, entries_of_rank in enumerate(entries_of):
        pairs = itertools.zip_longest(entries_of[0], entries_of_rank, fillvalue="nothing")
        for expected, entry in pairs:
            if entry != expected:
                raise UserError(
                    f"{problem}: rank 0 has {expected} where rank {rank} has {entry}. {advice}"
                )


def require_same(values: dict[str, Any], world: World, error: Any = UserError) -> None:
    """Raise an error, on every rank, if two ranks have different values for a name; collective.

    A name is compared only between the ranks that have it.
    """
    values_of: list[Any] = [values] * world.size
    if world.distributed:
        dist.all_gather_object(values_of, values)
    # For each name, the first rank that has it, and the value there.
    first: dict[str, tuple[int, Any]] = {}
    for rank, values_of_rank in enumerate(values_of):
        for name, value in values_of_rank.items():
            first_rank, expected = first.setdefault(name, (rank, value))
            if value != expected:
                text = f"{name} must be the same on all ranks: {value} on rank {rank}"
                raise error(f"{text}, {expected} on rank {first_rank}")


def all_reduce(tensor: Tensor, world: World) -> Tensor:
    """Sum a tensor over the ranks in place, and return it; collective."""
    if world.distributed:
        dist.all_reduce(tensor)
    return tensor
