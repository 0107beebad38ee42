"""Run a script of this folder, time after time, on one rank or on several that are forked.

Usage: forks.py SCRIPT JOBS PACKAGE...   with JOBS as JSON: [[port, [ranks, argument, ...]], ...]

No ranks are one plain process. To start a rank costs seconds of imports, and torchrun is not what
these scripts are about: all are forks of this process, which has imported the packages and computed
nothing (what has threads cannot be forked).
"""

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def main(script: Path, jobs: list[list], packages: list[str]) -> None:
    """One job after the other; the first that fails ends it, with exit code 1."""
    common = ("torch._dynamo", "sklearn.datasets")  # what a first step and the digits need
    for name in (*common, *(f"{package}.train" for package in packages)):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each run, which collects before its steps, would go through all of it again
    gc.freeze = gc.unfreeze = lambda: None  # by which a run would undo it
    for port, (ranks, *words) in jobs:
        for rank in range(max(1, ranks)):
            if os.fork() == 0:
                world = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port} if ranks else {}
                world |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks} if ranks else {}
                os.environ.update({name: str(value) for name, value in world.items()})
                os._exit(work(script, words))
        for _ in range(max(1, ranks)):
            if os.wait()[1]:
                sys.exit(1)


def work(script: Path, words: list[str]) -> int:
    """Run it in this process; its exit code."""
    sys.argv = [str(script), *words]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    main(Path(__file__).with_name(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
