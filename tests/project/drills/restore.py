"""Which files of a checkpoint each rank verifies as it restores one.

Usage: restore.py FOLDER PACKAGE... (by `drill`)
"""

import importlib
import sys
from pathlib import Path
from typing import Any

STEPS = 2


def look(name: str, folder: Path, world: Any) -> Any:
    """Train, restore, and print what this rank has done; the world, which all packages share."""
    package, config = (importlib.import_module(f"{name}.{part}") for part in ("train", "config"))
    settings = {
        "device": "cpu",
        "run_dir": folder / name,
        "data.path": folder / "text.txt",
        "train.steps": STEPS,
    }
    settings = config.override(config.preset("tiny"), settings)
    world = world or package.join(settings.parallel, "cpu")
    package._run(settings, world, [])
    manifest = importlib.import_module(f"{name}.checkpoint.manifest")
    check, verified = manifest.check_file, []
    manifest.check_file = lambda path, entry: (verified.append(path.name), check(path, entry))[1]
    state = package.setup(settings, world)
    checkpointer = package.resume(state, folder / name, package.Group(world))
    print(f"{name} rank {world.rank} step {state.step} verified {sorted(verified)}\n")
    checkpointer.close()
    return world


if __name__ == "__main__":
    joined = None
    for one in sys.argv[2:]:
        joined = look(one, Path(sys.argv[1]), joined)
    importlib.import_module(f"{sys.argv[2]}.train").leave(joined)
