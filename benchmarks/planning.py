"""What saving and restoring costs as ranks are added: plans, index, manifest, names in a directory.

Ranks are simulated on one core: what each would say of its parts is made here and given to DCP's
planner, and the files that they would write to the rendered project's own code. What is saved is
one block of Llama 3 405B with AdamW's two moments; the whole model has 126. Its state is sharded
over all ranks (FSDP), or over groups of 64 ranks that are copies of each other (HSDP), each of
which then writes a part of what they hold alike, as `divided` has it.

CPU time is measured, on a machine with other work. Python's garbage collector is off, as it is
while a run trains.
"""

import argparse
import gc
import hashlib
import importlib
import json
import math
import os
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Size, float32
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _validate_global_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from .common import (
    PACKAGE,
    RESULTS,
    file_system,
    machine,
    numbers_on_one_line,
    render,
    today,
    versions,
)
from .meeting import Child, repeated

RANKS = (8, 64, 256, 1024, 4096, 10_240)
ONCE = 1024  # with more ranks than these it is measured once
GROUP = 64  # ranks that share one copy of the state under HSDP
BLOCKS = (1, 4, 16)  # with a group's ranks
WHOLE = 126  # of the whole model
SMALL = 64  # bytes of a file, where only its name counts
WIDTH, HIDDEN, KEYS = 16_384, 53_248, 1024
SHAPES = {
    "attention.query": (WIDTH, WIDTH),
    "attention.key": (KEYS, WIDTH),
    "attention.value": (KEYS, WIDTH),
    "attention.out": (WIDTH, WIDTH),
    "mlp.gate": (HIDDEN, WIDTH),
    "mlp.up": (HIDDEN, WIDTH),
    "mlp.down": (WIDTH, HIDDEN),
    "norm1": (WIDTH,),
    "norm2": (WIDTH,),
}


def tensors(blocks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what is saved: parameters and two moments of each."""
    for block in range(blocks):
        for name, shape in SHAPES.items():
            yield f"model.blocks.{block}.{name}", shape
            yield f"optimizer.blocks.{block}.{name}.exp_avg", shape
            yield f"optimizer.blocks.{block}.{name}.exp_avg_sq", shape


def chunk(shape: tuple[int, ...], place: int, pieces: int) -> ChunkStorageMetadata:
    """One rank's part of a tensor that is cut along its first dimension into `pieces`."""
    rows = -(-shape[0] // pieces)
    start = min(place * rows, shape[0])
    offsets = Size((start, *[0] * (len(shape) - 1)))
    return ChunkStorageMetadata(offsets, Size((min(rows, shape[0] - start), *shape[1:])))


def plans(ranks: int, shards: int, blocks: int) -> Iterator[SavePlan]:
    """What each of the ranks sends to rank 0."""
    copies, state = ranks // shards, list(tensors(blocks))
    for rank in range(ranks):
        items, mapping = [], {}
        for name, shape in state[rank // shards :: copies]:
            part = chunk(shape, rank % shards, shards)
            facts = planner.TensorWriteData(part, TensorProperties(dtype=float32), Size(shape))
            index = MetadataIndex(name, part.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=facts))
            mapping[name] = tuple(name.split(".", 1))
        yield SavePlan(items, planner_data=mapping)


def written(plan: SavePlan, rank: int) -> list[WriteResult]:
    """What a rank reports of its writing, each tensor behind the one before."""
    results, end = [], 0
    for item in plan.items:
        length = 1024 + 4 * math.prod(item.tensor_data.chunk.sizes)
        info = _StorageInfo(f"__{rank}_0.distcp", end, length)
        results.append(WriteResult(item.index, length, info))
        end += length
    return results


class Clock:
    """CPU and wall seconds of what is done within, under the names of what it is."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        """Do it and take its time."""
        cpu, wall = time.process_time(), time.perf_counter()
        result = work()
        self.found[f"{name}_cpu_seconds"] = time.process_time() - cpu
        self.found[f"{name}_seconds"] = time.perf_counter() - wall
        return result


def save(ranks: int, shards: int, blocks: int, folder: Path, clock: Clock) -> list[int]:
    """What rank 0 does for a save, by DCP's planner; returns the bytes of each rank's file."""
    planned = list(plans(ranks, shards, blocks))
    results = [written(plan, rank) for rank, plan in enumerate(planned)]
    sent = [pickle.dumps(plan) for plan in planned]
    clock.found["plans_bytes"] = sum(map(len, sent))
    clock.found["gather_bytes"] = ranks * max(map(len, sent))  # torch pads them to one size
    first = DefaultSavePlanner()
    _, index = clock("plan", lambda: first.create_global_plan([*map(pickle.loads, sent)]))
    clock("check", lambda: _validate_global_plan(planned, index))  # a part of it
    for kind in ("cpu_seconds", "seconds"):
        clock.found[f"plan_{kind}"] -= clock.found[f"check_{kind}"]
    entries = index.state_dict_metadata.values()
    clock.found["chunks"] = sum(len(entry.chunks) for entry in entries)
    state = {name: torch.empty(1) for name, _ in tensors(blocks)}

    def unchanged() -> bool:
        mine = DefaultSavePlanner()
        mine.set_up_planner(state, is_coordinator=True)
        mine.create_local_plan()
        return planned[0].items == planned[0].items

    assert clock("plan_again", unchanged)

    def write_index() -> None:
        index.storage_data = {each.index: each.storage_data for own in results for each in own}
        (folder / ".metadata").write_bytes(pickle.dumps(index))

    clock("index", write_index)
    clock.found["index_bytes"] = (folder / ".metadata").stat().st_size
    return [sum(each.storage_data.length for each in own) for own in results]


def sha256_of(path: Path) -> str:
    """The sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def directory(ranks: int, sizes: list[int], checkpoints: Path, clock: Clock) -> dict[str, Any]:
    """What the project's own code does with the files of all ranks; returns their entries."""
    distributed, manifest, publish = (
        importlib.import_module(f"{PACKAGE}.{name}")
        for name in ("distributed", "checkpoint.manifest", "checkpoint.publish")
    )
    folder = checkpoints / manifest.step_name(120)
    names = [f"__{rank}_0.distcp" for rank in range(ranks)]
    clock("create", lambda: [(folder / name).write_bytes(bytes(SMALL)) for name in names])
    clock("list", lambda: list(folder.glob(f"__{ranks - 1}_*")))
    digest = sha256_of(folder / names[0])
    files = {name: {"size": SMALL, "sha256": digest} for name in names}
    index = {"size": (folder / ".metadata").stat().st_size, "sha256": "0" * 64}
    index["sha256"] = sha256_of(folder / ".metadata")
    whole = {"format_version": 1, "step": 120, "files": {**files, ".metadata": index}}
    content = clock("manifest_write", lambda: manifest.sealed(whole))
    (folder / manifest.MANIFEST).write_bytes(content)
    clock.found["manifest_bytes"] = len(content)
    clock("manifest_read", lambda: manifest.read_manifest(folder))
    _, problems = clock("verify", lambda: manifest.verify(folder))
    assert not problems, problems[0]
    publisher = publish.Publisher(checkpoints, publish.RetentionConfig(), distributed.Group())
    clock("prune", publisher.prune)
    for name, size in zip(names, sizes, strict=True):
        os.truncate(folder / name, size)  # a hole: what the index points to has to be there
    return {name: None for name in [*names, ".metadata"]}


def restore(ranks: int, blocks: int, folder: Path, names: dict[str, Any], clock: Clock) -> None:
    """What each rank does before it reads: the index, checked, and what it wants of which part."""
    reader = importlib.import_module(f"{PACKAGE}.checkpoint.dcp")
    index = clock("index_read", lambda: reader.DcpDirectory(folder, names).index)

    def wanted() -> list[Any]:
        return [
            item
            for name, shape in tensors(blocks)
            for item in create_read_items_for_chunk_list(
                name, index.state_dict_metadata[name], [chunk(shape, ranks // 2, ranks)]
            )
        ]

    clock("load", wanted)


def measure(ranks: int, shards: int, blocks: int) -> dict[str, float]:
    """CPU seconds and bytes for one save of a run of `ranks`, and for resuming from it."""
    gc.disable()
    clock = Clock()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "step_00000120"
        folder.mkdir()
        sizes = save(ranks, shards, blocks, folder, clock)
        names = directory(ranks, sizes, Path(temporary), clock)
        restore(ranks, blocks, folder, names, clock)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**clock.found, "peak_bytes": peak * (1 if sys.platform == "darwin" else 1024)}


def growth(rows: list[dict[str, Any]], key: str, by: str = "ranks") -> float:
    """The exponent p of "grows as ranks^p", by least squares over the upper half of the sizes."""
    upper = rows[len(rows) // 2 :] if len(rows) > 3 else rows
    points = [(math.log(row[by]), math.log(max(row[key], 1e-9))) for row in upper]
    x, y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def extrapolated(rows: list[dict[str, Any]], key: str, to: float, by: str = "ranks") -> float:
    """What the law gives at `to`, from the largest that was measured on."""
    return rows[-1][key] * (to / rows[-1][by]) ** growth(rows, key, by)


def apart(ranks: int, shards: int, blocks: int) -> dict[str, float]:
    """Measured in a process where what came before has left no memory."""
    child = Child(lambda say: say(measure(ranks, shards, blocks)), patience=400)
    try:
        return child.heard()
    finally:
        child.end()


def main() -> None:
    """Measure each number of ranks in processes of their own; write the result."""
    parser = argparse.ArgumentParser("python -m benchmarks.planning", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    given = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python -m benchmarks.planning",
        "date": today(),
        "machine": {**machine(), "file_system": file_system(Path(tempfile.gettempdir()))},
        "versions": versions("torch"),
        "settings": {"tensors": len(list(tensors(1))), "group": GROUP, "repeats": given.repeats},
        "ways": {"FSDP": [], "HSDP": []},
        "blocks": [],
    }

    def add(rows: list[dict[str, Any]], ranks: int, shards: int, blocks: int) -> None:
        times = given.repeats if ranks <= ONCE else 1
        row = repeated(lambda: apart(ranks, shards, blocks), times)
        rows.append({"ranks": ranks, "blocks": blocks, **row})
        print(f"{shards} shards", json.dumps(rows[-1]), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        source = render(Path(folder), checkpoint="dcp")
        sys.path.insert(0, str(source))
        for ranks in given.ranks:
            add(result["ways"]["FSDP"], ranks, ranks, 1)
            add(result["ways"]["HSDP"], ranks, min(GROUP, ranks), 1)
        for blocks in given.blocks:
            add(result["blocks"], GROUP, GROUP, blocks)
    given.out.mkdir(parents=True, exist_ok=True)
    text = numbers_on_one_line(json.dumps(result, indent=1))
    (given.out / "planning.json").write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main()
