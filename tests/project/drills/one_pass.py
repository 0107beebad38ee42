"""Which files of a checkpoint each rank verifies, and how much it reads, as it restores one.

Usage: one_pass.py FOLDER PACKAGE... (by forks.py)
"""

import importlib
import sys
from pathlib import Path
from typing import Any

STEPS = 2


class Counted:
    """A file that counts what is read of it."""

    def __init__(self, file: Any, counts: dict[str, int], name: str) -> None:
        self.file, self.counts, self.name = file, counts, name

    def __enter__(self) -> "Counted":
        return self

    def __exit__(self, *rest: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def readinto(self, target: Any) -> int:
        """Read on; the number of bytes."""
        length = self.file.readinto(target)
        self.counts[self.name] = self.counts.get(self.name, 0) + length
        return length


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
    counts: dict[str, int] = {}
    opened = manifest.open_regular
    manifest.open_regular = lambda path: Counted(opened(path), counts, path.name)
    state = package.setup(settings, world)
    checkpointer = package.start(state, folder / name, package.Group(world))
    (newest,) = (folder / name / "checkpoints").glob("step_*")
    sizes = {path.name: path.stat().st_size for path in newest.iterdir()}
    data = [file for file in sizes if file.endswith((".distcp", ".pt"))]
    verified = [file for file in data if counts.get(file) == sizes[file]]
    part = sum(counts.get(file, 0) for file in data) / sum(sizes[file] for file in data)
    print(
        f"{name} rank {world.rank} step {state.step} verified {sorted(verified)} read {part:.2f}\n"
    )
    checkpointer.close()
    return world


if __name__ == "__main__":
    joined = None
    for one in sys.argv[2:]:
        joined = look(one, Path(sys.argv[1]), joined)
    importlib.import_module(f"{sys.argv[2]}.train").leave(joined)
