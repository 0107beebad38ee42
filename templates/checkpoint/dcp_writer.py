"""Write tensors into a directory of torch.distributed.checkpoint (DCP), by DCP's own `save`.

Added to it here: an even division of what several ranks hold alike, errors of writer threads, which
DCP loses, and a cache of plans for each run, where DCP keeps one for the whole process.
"""

import contextlib
import io
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from ..distributed import Group, parallel
from ..files import naming
from . import CheckpointError
from .dcp_reader import own_failure
from .tensors import Tensors, nest, walk

# A restore hashes several files at once, so a rank that has much to write divides it.
LARGE = 32 << 20  # bytes that are worth a file of their own
FILES = 4  # of a rank
# With a single process DCP warns at each save that there is only one. For good, and not around the
# save: that runs in a thread of its own, and filters are the process's.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")


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
        pairs, last, self.forms = list(walk(tensors)), self.forms, None
        forms = [(path, tensor.shape, tensor.dtype) for path, tensor in pairs]
        # DCP compares plans by all but the dtype, and a save that failed may have left half a plan.
        if self.group.any(forms != last):
            forget_plans(self.cache)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = self.cache
        size = sum(parallel.local_part(tensor).nbytes for _, tensor in pairs)
        files = self.threads or max(1, min(size // LARGE, FILES, len(pairs)))
        writer = DcpWriter(folder, files)
        with own_failure(f"writing {folder}", self.group.rank):
            dcp.save(
                tensors,
                storage_writer=writer,
                planner=planner,
                process_group=self.group.process_group,
                no_dist=self.group.process_group is None,
            )
            self.forms = forms
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
            self.errors.append(error)
            if stream is None:
                yield io.BytesIO()  # DCP needs a stream to go on
        else:
            self.names.append(path.name.removesuffix(".tmp"))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's files."""
        results = super().write_data(plan, planner)
        if self.errors:
            raise self.errors[0]
        if len(results.value()) < len(plan.items):
            raise CheckpointError("a thread of DCP did not end its file")
        return results

    def finish(self, metadata: metadata.Metadata, results: list[Any]) -> None:
        """Write the index, on rank 0."""
        try:
            super().finish(metadata, results)
        finally:
            if self.errors:
                raise self.errors[0]


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
    pairs = list(walk(tensors))
    loads: dict[int, list[int]] = {}
    mine = set()
    for path, tensor in sorted(pairs, key=lambda pair: -pair[1].nbytes):
        copies, place = parallel.replicas(tensor, rank, size)
        load = loads.setdefault(copies, [0] * copies)
        lightest = load.index(min(load))
        load[lightest] += tensor.nbytes + 4096  # a small tensor has its cost too
        if lightest == place:
            mine.add(path)
    return nest((path, tensor) for path, tensor in pairs if path in mine)
