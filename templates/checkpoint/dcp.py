"""Checkpoints by torch.distributed.checkpoint (DCP): each rank writes its part.

# {% if cookiecutter.checkpoint == "dcp_async" %}
Training goes on meanwhile. Staging copies this rank's part into host buffers; it overlaps with the
next forward and backward, which only read parameters, and must be over before the optimizer changes
them. A thread then writes, hashes and publishes, over a process group of its own. One save is in
flight at a time; a failure waits in `failed` until the loop's control word has carried it to every
rank.
# {% else %}
Training waits meanwhile.
# {% endif %}

Added here to DCP's own `save`: an even division of what several ranks hold alike, errors of writer
threads, which DCP loses, and a cache of plans for each run, where DCP keeps one for the process.
"""

# {% if cookiecutter.checkpoint == "dcp_async" %}
import contextlib
import io
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from ..distributed import Group, parallel
from ..files import naming
from . import DCP_INDEX, CheckpointError
from .publish import Write
from .storage import StorageConfig
from .tensors import Tensors, nested, refuse_nan

# {% else %}
import contextlib
import io
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from ..distributed import Group, parallel
from ..files import naming
from . import DCP_INDEX, CheckpointError
from .publish import Write
from .storage import StorageConfig
from .tensors import Tensors, nested, refuse_nan

# {% endif %}
# A restore hashes several files at once, so a rank that has much to write divides it.
LARGE = 32 << 20  # bytes that are worth a file of their own
FILES = 4  # of a rank
# With a single process DCP warns at each save that there is only one. For good, and not around the
# save: that runs in a thread of its own, and filters are the process's.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")


@dataclass(frozen=True)
class CheckpointConfig(StorageConfig):
    """Saved in parts, by all ranks at once, while training goes on or waits."""

    threads: int = 0
    """Files that each rank writes at a time (0: one for each 32 MB, up to 4)"""


# {% if cookiecutter.checkpoint == "dcp_async" %}
# numpy does not know every dtype, but only bits are moved.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Writer:
    """Saves in the background; `save` returns before the checkpoint is published.

    The host buffers (pinned for CUDA) live as long as the run, because the first touch of fresh
    memory costs fifty times the copy. On a CPU the thread copies; on CUDA the copies are queued at
    once, on a stream of their own.
    """

    stages = True

    def __init__(
        self, config: CheckpointConfig, group: Group, model: nn.Module, device: torch.device
    ) -> None:
        self.group, self.model, self.device = group, model, device
        self.saver = DcpSaver(group, config.threads)
        self.buffers: dict[str, torch.Tensor] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.event: torch.Event | None = None
        self.staged: Future[None] | None = None
        self.writing: Future[None] | None = None
        # Without this the thread would work on GPU 0.
        begin = (lambda: torch.cuda.set_device(device)) if self.stream else None
        self.thread = ThreadPoolExecutor(1, "checkpoint", begin)

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed, as far as this rank knows by now."""
        return bool(self.writing and self.writing.done() and self.writing.exception())

    @property
    def staged_bytes(self) -> int:
        """What the host buffers take."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def save(self, tensors: Tensors, publish: Callable[[Write], object]) -> None:
        """Start to save the tensors; `publish` publishes what the function given to it writes."""
        copies, copy = self._stage(share_of(tensors, self.group.rank, self.group.size))
        staged = self.staged = self.thread.submit(copy)

        def complete() -> None:
            staged.result()
            if self.event is not None:
                self.event.synchronize()
            refuse_nan(copies, self.model)

        def write() -> None:
            self.group.agree(complete)  # before DCP's collectives, where a missing rank would hang
            publish(lambda folder: self.saver.write(folder, copies))

        self.writing = self.thread.submit(write)

    def before_optimizer_step(self) -> None:
        """Wait until the tensors may change."""
        if self.staged is not None:
            self.staged.exception()  # raised by `write`
            if self.event is not None:  # holds back what the device does next, not the host
                torch.cuda.current_stream(self.device).wait_event(self.event)
            self.staged = None

    def settle(self) -> None:
        """Wait for the save in flight; raises what it raised."""
        if self.writing is not None:
            writing, self.writing, self.staged = self.writing, None, None
            writing.result()

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown()

    def _stage(self, part: Tensors) -> tuple[Tensors, Callable[[], None]]:
        """Copies of `part`, of which some are complete only after the returned function.

        The model's buffers are copied at once, since the next forward changes them.
        """
        parameters = {f"model.{name}" for name, _ in self.model.named_parameters()}
        copies: Tensors = {}
        targets, sources = [], []
        for name, value in part.items():
            source = parallel.local_part(value).detach()
            buffer = self.buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=bool(self.stream))
                self.buffers[name] = buffer
            if name.startswith("model.") and name not in parameters:
                # On CUDA in the order of the current stream, hence before the next forward.
                buffer.copy_(source, non_blocking=bool(self.stream))
            else:
                targets.append(buffer)
                sources.append(source)
            copies[name] = parallel.with_local_part(value, buffer)

        def copy_on_one_core() -> None:
            # By numpy, which takes one thread and releases Python's lock. A torch copy on a second
            # thread would start a second pool of OpenMP threads; with more of them than cores,
            # every later step of training is slower (by a third on two cores).
            for target, source in zip(targets, sources, strict=True):
                kind = BITS[source.itemsize]
                target.view(kind).numpy()[...] = source.view(kind).numpy()

        if self.device.type == "cpu":
            return copies, copy_on_one_core
        if self.stream is None:  # a device without streams to order a second thread by
            torch._foreach_copy_(targets, sources)
            return copies, lambda: None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            self.event = self.stream.record_event()
        return copies, lambda: None


# {% else %}
class Writer:
    """Saves in the loop; every rank goes on when the checkpoint is published."""

    stages = False
    staged_bytes = 0
    failed = False

    def __init__(
        self, config: CheckpointConfig, group: Group, model: nn.Module, device: torch.device
    ) -> None:
        self.group, self.model = group, model
        self.saver = DcpSaver(group, config.threads)

    def save(self, tensors: Tensors, publish: Callable[[Write], object]) -> None:
        """Save the tensors; `publish` publishes what the function given to it writes."""
        part = share_of(tensors, self.group.rank, self.group.size)
        self.group.agree(lambda: refuse_nan(part, self.model))
        publish(lambda folder: self.saver.write(folder, part))

    def before_optimizer_step(self) -> None:
        """Nothing to wait for."""

    def settle(self) -> None:
        """Nothing is in flight after a save that waits."""

    def close(self) -> None:
        """Nothing runs in the background."""


# {% endif %}
class DcpSaver:
    """Writes the checkpoints of one run; all ranks call `write` together."""

    def __init__(self, group: Group, threads: int = 0) -> None:
        self.group, self.threads = group, threads
        self.cache = uuid.uuid4().hex  # the name of this run's plans in DCP's cache
        self.forms: list[Any] | None = None
        """Names, shapes and dtypes that this rank wrote last; None if that save failed."""

    def write(self, folder: Path, tensors: Tensors) -> list[str]:
        """Write this rank's tensors; the names of its files.

        To be called inside `Group.agree`: only a rank that failed raises.
        """
        forms = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        last, self.forms = self.forms, None
        # DCP compares plans by all but the dtype, and a save that failed may have left half a plan.
        if self.group.any(forms != last):
            forget_plans(self.cache)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = self.cache
        size = sum(parallel.local_part(tensor).nbytes for tensor in tensors.values())
        files = self.threads or max(1, min(size // LARGE, FILES, len(tensors)))
        writer = DcpWriter(folder, files)
        try:
            dcp.save(
                nested(tensors),
                storage_writer=writer,
                planner=planner,
                process_group=self.group.process_group,
                no_dist=self.group.process_group is None,
            )
            self.forms = forms
        except dcp.CheckpointException as error:  # no Exception; raised on all ranks
            if failure := error.failures.get(self.group.rank):
                kind = type(failure[0]).__name__
                raise CheckpointError(f"writing {folder}: {kind}: {failure[0]}") from error
        return writer.names


class DcpWriter(dcp.FileSystemWriter):
    """DCP's writer; keeps the errors that its threads would lose.

    Their files would be missing from a checkpoint that counts as saved.
    """

    def __init__(self, folder: Path, files: int) -> None:
        # The publisher syncs the files. Copying ahead would make the training stream wait.
        super().__init__(folder, sync_files=False, thread_count=files, per_thread_copy_ahead=0)
        cast(Any, self.fs).create_stream = self.create
        self.errors: list[Exception] = []
        self.names: list[str] = []

    @contextlib.contextmanager
    def create(self, path: Any, mode: str) -> Iterator[Any]:
        """Create a file; an error is kept, and DCP goes on."""
        stream = None
        try:
            with naming(path), path.open(mode) as stream:
                yield stream
        except Exception as error:
            if path.name.startswith(DCP_INDEX):  # which no thread writes
                raise
            self.errors.append(error)
            if stream is None:
                yield io.BytesIO()  # DCP needs a stream to go on
        else:
            self.names.append(path.name.removesuffix(".tmp"))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's files."""
        results = super().write_data(plan, planner)
        if self.errors:
            raise self.errors[0]
        if len(results.value()) < len(plan.items):
            raise CheckpointError("a thread of DCP did not end its file")
        return results


def forget_plans(cache: str) -> None:
    """Remove what DCP has cached under a name."""
    for kept in (
        *(SavePlanner._cached_save_plan, SavePlanner._cached_final_save_plan),
        *(SavePlanner._cached_all_plans, SavePlanner._cached_global_plan),
        SavePlanner._cached_metadata,
    ):
        kept.pop(cache, None)


def write_tensors(folder: Path, tensors: Tensors, group: Group) -> list[str]:
    """Write tensors once; the names of this rank's files. All ranks call it together."""
    return DcpSaver(group).write(folder, tensors)


def share_of(tensors: Tensors, rank: int, size: int) -> Tensors:
    """What this rank has to write: a near-equal part of what it and other ranks hold alike."""
    loads: dict[int, list[int]] = {}
    mine = set()
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        copies, place = parallel.replicas(tensor, rank, size)
        load = loads.setdefault(copies, [0] * copies)
        lightest = load.index(min(load))
        load[lightest] += tensor.nbytes + 4096  # a small tensor has its cost too
        if lightest == place:
            mine.add(name)
    return {name: tensor for name, tensor in tensors.items() if name in mine}
