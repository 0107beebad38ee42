"""DDP, FSDP and copies of sharded models (HSDP) do the same, and read each other's checkpoints.

Usage: hybrid.py FOLDER DDP_PACKAGE FSDP_PACKAGE (by `drill`, on four ranks)
"""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cross_load import digest
from renders import finish, load, spoil

STEPS = 4


def main(folder: Path, ddp: str, fsdp: str) -> None:
    """Train in each way; compare losses, checkpoints and memory."""
    ways: dict[str, tuple[str, dict[str, Any]]] = {"ddp": (ddp, {})}
    for copies in (1, 2, 4, 0):  # 0: one for each machine, and this is one
        ways[f"hsdp{copies}"] = (fsdp, {"parallel.replicate": copies})
    # In micro-batches, whose gradients are summed over the ranks after the last one or after each.
    ways |= {
        f"reduce_each_{each}": (
            fsdp,
            {"parallel.reduce_each": each, "train.micro_batch_size": 1},
        )
        for each in (False, True)
    }
    world, losses, digests, states = None, {}, {}, {}
    sums: dict[str, int] = {}  # over the ranks, of gradients

    def counted(summed: Any, *given: Any, **named: Any) -> Any:
        sums[name] = sums.get(name, 0) + 1
        return summed(*given, **named)

    for call in ("reduce_scatter_single", "reduce_scatter_tensor"):  # of torch 2.13, of others
        if summed := getattr(torch.distributed, call, None):
            setattr(torch.distributed, call, partial(counted, summed))
    for name, (package, changes) in ways.items():
        changes |= {"device": "cpu", "run_dir": folder / name, "train.steps": STEPS}
        changes |= {"train.log_every": 1, "data.path": folder / "text.txt"}
        training, settings = load(package, changes)
        world = world or training.join(settings.parallel, "cpu")

        def watch(
            state: Any,
            record: Any,
            name: str = name,
            package: str = package,
            training: Any = training,
        ) -> None:
            losses.setdefault(name, []).append(record["loss"])
            ranks = state.world.size
            if state.step == STEPS:
                digests[name] = digest(state)
                parallel = training.parallel
                held = {p: parallel.local_part(p).nbytes for p in state.model.parameters()}
                states[name] = sum(held.values())
                if package == fsdp:  # it saves in the background, every fifth step and at the end
                    state.checkpointer.save(STEPS)
                    state.checkpointer.settle()
                    staged = torch.tensor(state.checkpointer.writer.staged_bytes)
                    torch.distributed.all_reduce(staged)
                    needed = 0
                    for p in held:
                        moments = [v for v in state.optimizer.state[p].values() if v.ndim]
                        each = held[p] + sum(parallel.local_part(v).nbytes for v in moments)
                        needed += each // parallel.replicas(p, 0, ranks)[0]
                    assert abs(staged / ranks / needed - 1) < 0.1, (name, needed)

        training._run(settings, world, [SimpleNamespace(after_step=watch)])
    for name, found in losses.items():
        for mine, theirs in zip(found, losses["ddp"], strict=True):
            assert abs(mine - theirs) < 1e-4 * theirs, (name, losses)
    assert sums["reduce_each_True"] == 2 * sums["reduce_each_False"] == 2 * sums["hsdp1"], sums
    # A rank holds all of it, or a part: a quarter, a half, and all of it again. (Sizes that do not
    # divide leave one rank a little more than its part.)
    whole = states["ddp"]
    for name, part in (("hsdp1", 4), ("hsdp2", 2), ("hsdp4", 1), ("hsdp0", 4)):
        assert states[name] <= 1.1 * whole / part, (name, states)
    for name, (package, changes) in ways.items():
        training, settings = load(package, changes)
        state = training.setup(settings, world)
        for other in ways:
            spoil(state)
            training.resume(state, folder / other, training.Group(world)).close()
            assert digest(state) == digests[other], f"{name} read {other}"
        del state
    finish(training, world, f"{len(ways)} ways agree")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
