"""What a save costs rank 0 as ranks are added: plans, index, manifest, names in a directory.

Ranks are simulated on one core: the plans that DCP would gather from each are made here, with the
shapes of GPT-2 (124M parameters) and AdamW's two moments, and given to DCP's own code. The state is
sharded over all ranks (FSDP), or over groups of 64 ranks that are copies of each other (HSDP), each
of which then writes a part of what they hold alike, as the rendered `share_of` has it.
"""

import argparse
import json
import math
import os
import pickle
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from .common import RESULTS, machine, versions

RANKS = (8, 64, 256, 1024, 4096, 10_240)
GROUP = 64  # ranks that share one copy of the state under HSDP
FILES = 2  # that a rank writes: one for each thread


def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what is saved: parameters and two moments of each."""
    width = 768
    block = {
        "attention.qkv": (3 * width, width),
        "attention.out": (width, width),
        "mlp.up": (4 * width, width),
        "mlp.down": (width, 4 * width),
        "norm1": (width,),
        "norm2": (width,),
    }
    for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        yield f"{kind}.embedding", (50304, width)
        for layer in range(12):
            for name, shape in block.items():
                yield f"{kind}.blocks.{layer}.{name}", shape


def item(name: str, shape: tuple[int, ...], place: int, pieces: int) -> WriteItem:
    """One rank's part of a tensor that is cut along its first dimension into `pieces`."""
    rows = -(-shape[0] // pieces)
    start = min(place * rows, shape[0])
    offset = torch.Size((start, *[0] * (len(shape) - 1)))
    size = torch.Size((min(rows, shape[0] - start), *shape[1:]))
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offset, size),
        properties=TensorProperties(dtype=torch.float32),
        size=torch.Size(shape),
    )
    return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)


def plans(ranks: int, shards: int) -> list[SavePlan]:
    """What each of the ranks would send to rank 0."""
    copies = ranks // shards
    state = list(tensors())
    mappings = {name: tuple(name.split(".", 1)) for name, _ in state}
    parts = []
    for rank in range(ranks):
        mine = state[rank // shards :: copies]
        items = [item(*entry, rank % shards, shards) for entry in mine]
        parts.append(SavePlan(items, planner_data={name: mappings[name] for name, _ in mine}))
    return parts


def measure(ranks: int, shards: int, folder: Path) -> dict[str, float]:
    """Seconds and bytes on rank 0 for one save of a run of `ranks`."""
    sent = [pickle.dumps(plan) for plan in plans(ranks, shards)]
    found: dict[str, float] = {"plans_bytes": sum(map(len, sent))}
    clock = time.perf_counter()
    gathered = [pickle.loads(content) for content in sent]
    del sent
    planner = DefaultSavePlanner()
    final, metadata = planner.create_global_plan(gathered)
    for plan in final:
        pickle.dumps(plan)  # to send each rank its own
    found["plan_seconds"] = time.perf_counter() - clock
    found["chunks"] = sum(len(plan.items) for plan in final)
    del gathered, final, planner

    clock = time.perf_counter()
    found["index_bytes"] = len(pickle.dumps(metadata))
    found["index_seconds"] = time.perf_counter() - clock
    del metadata

    writers = min(ranks, ranks // shards * shards)
    names = [f"__{rank}_{number}.distcp" for rank in range(writers) for number in range(FILES)]
    clock = time.perf_counter()
    files = {name: {"size": 12_345_678, "sha256": "0" * 64} for name in names}
    manifest = json.dumps({"format_version": 1, "files": files}, indent=1)
    json.loads(manifest)
    found["manifest_seconds"] = time.perf_counter() - clock
    found["manifest_bytes"] = len(manifest)

    clock = time.perf_counter()
    for name in names:
        os.close(os.open(folder / name, os.O_CREAT | os.O_WRONLY))
    found["create_seconds"] = time.perf_counter() - clock
    clock = time.perf_counter()
    os.listdir(folder)
    found["list_seconds"] = time.perf_counter() - clock
    for name in names:
        os.unlink(folder / name)
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def growth(rows: list[dict[str, float]], key: str) -> float:
    """The exponent p of "grows as ranks^p", by least squares over the upper half of the sizes."""
    upper = rows[len(rows) // 2 :]
    points = [(math.log(row["ranks"]), math.log(max(row[key], 1e-9))) for row in upper]
    x, y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def main() -> None:
    """Measure each number of ranks in a process of its own; write the result."""
    parser = argparse.ArgumentParser("python -m benchmarks.planning", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    given = parser.parse_args()
    ways: dict[str, list[dict[str, float]]] = {"FSDP": [], "HSDP": []}
    for way, rows in ways.items():
        for ranks in given.ranks:
            with tempfile.TemporaryDirectory() as folder:
                shards = ranks if way == "FSDP" else min(GROUP, ranks)
                rows.append({"ranks": ranks, **in_a_fork(ranks, shards, Path(folder))})
            print(way, json.dumps(rows[-1]), flush=True)
    result: dict[str, Any] = {
        "command": "python -m benchmarks.planning",
        "machine": machine(),
        "versions": versions("torch"),
        "settings": {"tensors": len(list(tensors())), "group": GROUP, "files": FILES},
        "ways": ways,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "planning.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def in_a_fork(ranks: int, shards: int, folder: Path) -> dict[str, float]:
    """Measured where what came before has left no memory."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, json.dumps(measure(ranks, shards, folder)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    return json.loads(content)


if __name__ == "__main__":
    main()
