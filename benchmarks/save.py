"""How long a save holds training up, and how much slower steps are until it is on disk.

All contenders save the same state, in turns, in another order each round: some quiet steps, a
save, then steps enough for an upload to end. The first save of each stands apart: buffers are
made then. Of ours, the seconds are the checkpointer's own count: the call, the wait for staging,
the wait for the upload before, publishing. The peers save while training waits.
"""

import copy
import random
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from . import ranks
from .common import installed, series

QUIET = 5  # steps to compare with those during an upload
Save = Callable[[], None]


def plain(bench: ranks.Bench) -> Save:
    """`torch.save` on rank 0: nothing synced, hashed or renamed; a crash may leave half a file."""
    path = bench.folder / "plain.pt"

    def save() -> None:
        if bench.rank == 0:
            state = bench.state
            torch.save([state.model.state_dict(), state.optimizer.state_dict()], path)
        bench.barrier()

    return save


def fabric(bench: ranks.Bench) -> Save:
    """`Fabric.save`: `torch.save` into memory, then a file moved into place; nothing is synced."""
    from lightning.fabric import Fabric

    fabric = Fabric(
        accelerator="cpu", devices=bench.size, strategy="ddp" if bench.size > 1 else "auto"
    )
    if bench.size > 1:
        fabric.launch()
    model, optimizer = fabric.setup(*_twin(bench))
    path = bench.folder / "fabric.ckpt"
    return lambda: fabric.save(path, {"model": model, "optimizer": optimizer})


def accelerate(bench: ranks.Bench) -> Save:
    """`Accelerator.save_state`: safetensors for the model, `torch.save` for the optimizer."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*_twin(bench))
    path = bench.folder / "accelerate"

    def save() -> None:
        accelerator.save_state(str(path))
        bench.barrier()

    return save


PEERS = {
    "plain torch.save": (plain, None),
    "Lightning Fabric": (fabric, "lightning"),
    "Accelerate": (accelerate, "accelerate"),
}


def _twin(bench: ranks.Bench) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A copy of model and optimizer, for a framework to wrap."""
    model = copy.deepcopy(bench.state.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def work(bench: ranks.Bench, smoke: bool) -> dict[str, Any]:
    """Rounds of saves, one by each contender."""
    rounds = 2 if smoke else 10
    ours = {name: bench.checkpointer(name) for name in ranks.ANSWERS}
    ours["dcp, again"] = bench.checkpointer("dcp", "-again")  # what the noise is
    peers = {
        name: make(bench)
        for name, (make, package) in PEERS.items()
        if package is None or installed(package)
    }
    found: dict[str, list[float]] = {}
    shuffled = [*ours, *peers]
    for round_ in range(rounds + 1):
        random.Random(round_).shuffle(shuffled)
        for name in shuffled:
            bench.calm()
            bench.step()
            if name in peers:
                figures = {"blocked": _timed(peers[name])}
            else:
                figures = _one_of_ours(bench, ours[name])
            for kind, value in figures.items():
                key = f"{name}, {kind}" if round_ else f"{name}, first save, {kind}"
                found.setdefault(key, []).append(value)
    for checkpointer in ours.values():
        checkpointer.close()
    bench.barrier()
    if bench.rank == 0:
        shutil.rmtree(bench.folder / "runs")
    units = {"slowdown": "x", "slowdown without a save": "x"}
    return {
        "settings": {"rounds": rounds, "quiet_steps": QUIET},
        "series": {
            key: series(values, units.get(key.rsplit(", ")[-1], "s"))
            for key, values in found.items()
        },
    }


def _one_of_ours(bench: ranks.Bench, checkpointer: Any) -> dict[str, float]:
    state, before = bench.state, checkpointer.blocked_seconds
    state.checkpointer = checkpointer
    if not hasattr(checkpointer.writer, "buffers"):  # it saves while training waits
        checkpointer.save(state.step)
        return {"blocked": bench.largest(checkpointer.blocked_seconds - before)}
    again, quiet = (statistics.median(_timed(bench.step) for _ in range(QUIET)) for _ in range(2))
    over: list[float] = []
    started = time.perf_counter()
    checkpointer.save(state.step)
    checkpointer.writer.writing.add_done_callback(lambda _: over.append(time.perf_counter()))
    lost = time.perf_counter() - started
    during = []
    while not during or bench.largest(not over):  # it may be over before the first step
        during.append(_timed(bench.step))
        lost += during[-1] - quiet
    checkpointer.settle()
    return {
        "blocked": bench.largest(checkpointer.blocked_seconds - before),
        "lost": lost,
        "upload": over[0] - started,
        "quiet step": quiet,
        "slowdown": statistics.median(during) / quiet,
        "slowdown without a save": again / quiet,
    }


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    ranks.main("save", work, ("torch", "numpy", "accelerate", "lightning"))
