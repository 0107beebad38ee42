"""Write checkpoints with several renders in one process, or read all that were written with each.

Between them, a package that reads parts makes files of the checkpoints in parts, and another one
makes runs of these, which packages that save whole can read.

Usage: cross_load.py write|convert|read FOLDER PACKAGE... (by `drill`)
"""

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from renders import finish, load, spoil
from torch.distributed.tensor import DTensor

STEPS = 3


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    """All that a checkpoint of this state holds, by name."""
    naming = importlib.import_module(f"{type(state).__module__.split('.')[0]}.checkpoint.tensors")
    return dict(naming.flat(state.checkpointer.tensors()))


def digest(state: Any) -> str:
    """A hash of model and optimizer, whole, whoever holds the parts (a collective call)."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors_of(state).items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        hashed.update(name.encode() + whole.detach().numpy().tobytes())
    return hashed.hexdigest()


def convert(folder: Path, name: str, reads_parts: bool) -> int:
    """Write the checkpoints in parts as files, or these as runs; how many runs."""
    transfer = importlib.import_module(f"{name}.checkpoint.transfer")
    runs = [path.with_suffix("") for path in folder.glob("*.json") if "_dcp" in path.stem]
    for run in runs:
        file, copy = run.with_suffix(".pt"), folder / "converted" / run.name
        here, source = (file, run) if reads_parts else (copy, file)
        transfer.export(run, transfer.ExportConfig(to=here, source=source))
    return 0 if reads_parts else len(runs)


def main(task: str, folder: Path, packages: list[str]) -> None:
    """Do what was asked, with one process group for all packages."""
    world, count = None, 0
    for name in packages:
        changes = {"device": "cpu", "data.path": folder / "text.txt"}
        changes |= {"run_dir": folder / name, "train.steps": STEPS}
        package, settings = load(name, changes)
        if world is None or "RANK" not in os.environ:  # only several ranks share a process group
            world = package.join(settings.parallel, "cpu")
        group = package.Group(world)
        if task == "write":

            def note(state: Any, record: Any, name: str = name) -> None:
                if state.step == STEPS:
                    found = digest(state)
                    if state.world.rank == 0:
                        (folder / f"{name}.json").write_text(json.dumps(found))

            package._run(settings, world, [SimpleNamespace(after_step=note)])
            continue
        if task == "convert":
            count += convert(folder, name, reads_parts=name == packages[0])
            continue
        state = package.setup(settings, world)
        for written in sorted(folder.glob("*.json")):
            spoil(state)
            run = folder / written.stem
            try:
                checkpointer = package.resume(state, run, group)
            except ValueError as error:
                assert name.endswith("torch_save") and "is a sharded checkpoint" in str(error)
                checkpointer = package.resume(state, folder / f"converted/{written.stem}", group)
            assert state.step == STEPS, written
            assert digest(state) == json.loads(written.read_text()), f"{name} read {written.stem}"
            checkpointer.close()
            count += 1
        del state
    outcome = f"{count} checkpoints read by {len(packages)} projects on {world.size} ranks"
    finish(package, world, outcome)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
