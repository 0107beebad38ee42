"""A large state on one rank or several, and our three ways to save it, all in one process each."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .common import ROOT, benchmark, render

ANSWERS = ("dcp_async", "dcp", "torch_save")
PARAMETERS = {False: (6, 2048), True: (2, 64)}  # layers and width: 252 MB with AdamW's moments
RANKS = (1, 2)


class Bench:
    """The state to save: a render's own, trained a step, and a checkpointer for each answer.

    Each answer is a render of its own, under a package name of its own; model, optimizer and
    training step are the first one's and serve all.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], preset: str = "") -> None:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore")
        sys.path[:0] = [str(path) for path in folder.glob("renders/*/*/src")]
        self.folder = folder
        self.train = self.part("dcp_async", "train")
        override = self.part("dcp_async", "config").override
        config = self.part("dcp_async", "config")
        start = config.preset(preset) if preset else config.Config()
        self.state = self.train.setup(override(start, {"optim.name": "adamw", **settings}))
        self.step()
        self.rank, self.size = self.state.world.rank, self.state.world.size
        optimizer_tensors = self.part("dcp_async", "checkpoint.tensors").optimizer_tensors
        moments = optimizer_tensors(self.state.model, self.state.optimizer).values()
        self.bytes = sum(t.nbytes for t in self.state.model.state_dict().values()) + sum(
            t.nbytes for t in moments
        )

    def part(self, answer: str, name: str) -> Any:
        """A module of the render with this answer."""
        return importlib.import_module(f"saving_by_{answer}.{name}")

    def step(self) -> None:
        """One step of training, on a GPU to its end: what is timed next finds it idle."""
        self.train.train_step(self.state, self.state.loader.next())
        if self.state.world.device.type == "cuda":
            torch.cuda.synchronize()

    def checkpointer(self, answer: str, suffix: str = "") -> Any:
        """The checkpointer of a render, over the one state, that keeps the newest checkpoint."""
        checkpoint = self.part(answer, "checkpoint.checkpointer")
        identity = {"global_batch_size": 8}
        return checkpoint.Checkpointer(
            self.folder / "runs" / f"{self.size}-{answer}{suffix}",
            checkpoint.CheckpointConfig(keep=1),
            self.state.world,
            self.state.model,
            self.state.optimizer,
            {"identity": identity, "schedule": {}},
        )

    def barrier(self) -> None:
        """Wait for the other ranks, if there are any."""
        if self.size > 1:
            dist.barrier()

    def largest(self, value: float) -> float:
        """The largest over the ranks: in step with each other, they wait for the slowest."""
        tensor = torch.tensor(value, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()

    def calm(self) -> None:
        """Let what was written reach the disk, so that it burdens nobody who comes after."""
        if self.rank == 0:
            os.sync()
        self.barrier()


def main(
    topic: str, work: Callable[[Bench, bool], dict[str, Any]], packages: tuple[str, ...]
) -> None:
    """The command line of a benchmark that runs `work` on each number of ranks."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--as-rank", type=Path)
    given, rest = parser.parse_known_args()
    if given.as_rank:
        _work(given.as_rank, work, "--smoke" in rest)
    else:
        benchmark(topic, lambda folder, smoke: _launch_all(topic, folder, smoke), packages)


def _launch_all(topic: str, folder: Path, smoke: bool) -> dict[str, Any]:
    for answer in ANSWERS:
        where = folder / "renders" / answer
        where.mkdir(parents=True)
        render(where, own_model=True, package_name=f"saving_by_{answer}", checkpoint=answer)
    sizes = RANKS[-1:] if smoke else RANKS
    results = [_launch(topic, ranks, folder, smoke) for ranks in sizes]
    return {
        "settings": results[0]["settings"],
        "series": {name: found for result in results for name, found in result["series"].items()},
    }


def _launch(topic: str, ranks: int, folder: Path, smoke: bool) -> dict[str, Any]:
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command += [f"benchmarks.{topic}", "--as-rank", str(folder)]
    own = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    path = folder / f"output-{ranks}.txt"
    with open(path, "w") as output:
        outcome = subprocess.run(
            [*command, *(["--smoke"] if smoke else [])],
            cwd=ROOT,
            env={**os.environ, **own},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if outcome.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{path.read_text()[-4000:]}")
    return json.loads((folder / f"result-{ranks}.json").read_text())


def _work(folder: Path, work: Callable[[Bench, bool], dict[str, Any]], smoke: bool) -> None:
    layers, width = PARAMETERS[smoke]
    settings = {"device": "cpu", "model.layers": layers, "model.width": width}
    sizes = {"train.global_batch_size": 8, "train.micro_batch_size": 8}
    bench = Bench(folder, settings | sizes)
    result = work(bench, smoke)
    label = "1 rank" if bench.size == 1 else f"{bench.size} ranks"
    result["series"] = {f"{label}: {name}": found for name, found in result["series"].items()}
    result["settings"]["state_mb"] = round(bench.bytes / 1e6, 1)
    if bench.rank == 0:
        (folder / f"result-{bench.size}.json").write_text(json.dumps(result))
    bench.barrier()
    os._exit(0)  # whose process group is whose, after three frameworks, need not be told apart
