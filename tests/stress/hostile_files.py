"""Files that want to harm: is anything executed, read or written elsewhere, or filled?

Whoever crafts a checkpoint also makes its hashes right, so it verifies, and what has to be safe is
the reading. Pickles that call in every way, indices that point elsewhere, archives that reach
beyond themselves, manifests of every odd kind are read by all roads (resume, --init-from, export,
verify) in a process of its own that is watched; then checkpoints that were changed at random.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.common import render

from .common import Findings, run_topic
from .reader_process import PACKAGES

EXECUTED = (
    "no code runs, no class or function that is not on an allow-list is looked up, and no file "
    "outside of the folder is opened"
)
CLEAR = "a crafted file is refused with a one-line error, or set aside as damaged"
FUZZ = "a random change with a correct digest is read as data, or refused with a clear error"
PROMISES = {"executed": EXECUTED, "clear": CLEAR}


def attempt(findings: Findings) -> None:
    """Render, save, and let a process read; start another one where it ended early."""
    paths = saved(findings.folder)
    probe(findings, paths, 4 if findings.bounded else 600)


def saved(folder: Path) -> list[Path]:
    """Render both formats and save with them, in another process."""
    paths = []
    for answer, name in PACKAGES.items():
        place = folder / "renders" / answer
        place.mkdir(parents=True)
        paths.append(render(place, package_name=name, checkpoint=answer, parallelism="single"))
    (folder / "text.txt").write_text("Was ever woman in this humour wooed? " * 300)
    script = Path(__file__).with_name("prepare_checkpoints.py")
    command = [sys.executable, str(script), str(folder), *PACKAGES.values()]
    subprocess.run(command, env=environment(paths), check=True, timeout=1500)
    return paths


def environment(paths: list[Path]) -> dict[str, str]:
    """For a process that imports the renders."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}


def probe(findings: Findings, paths: list[Path], mutants: int, stop: int = 1 << 30) -> None:
    """Count what the watched process tells."""
    tallies = {key: findings.tally(text, "cases") for key, text in PROMISES.items()}
    fuzz = findings.tally(FUZZ, "mutants")
    slowest, start, total = (0.0, ""), 0, 1
    script = str(Path(__file__).with_name("reader_process.py"))
    while start < total:
        arguments = (findings.folder, start, stop, mutants, int(findings.bounded), 5)
        with subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            env=environment(paths),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            name = "before the first case"
            for line in process.stdout or ():
                told = json.loads(line[line.find("{") :])  # a payload may have written before it
                if "name" in told:
                    name, start, total = told["name"], told["number"] + 1, told["of"]
                    continue
                problems = told["problems"]
                if told["fuzz"]:
                    fuzz.count(f"{name}: {problems}" if problems else None)
                else:
                    for key, tally in tallies.items():
                        mine = [text for kind, text in problems if kind == key]
                        tally.count(f"{name}: {'; '.join(mine)}" if mine else None)
                slowest = max(slowest, (told["seconds"], name))
                name = ""
            try:
                code = process.wait(timeout=1500)
            finally:
                process.kill()
        if name:
            tallies["clear"].count(f"{name}: the process ended with {code}")
            if name.startswith("before"):
                break
    findings.figures["longest CPU time of a case"] = f"{slowest[0]:.1f} s ({slowest[1]})"


if __name__ == "__main__":
    run_topic("hostile_files", attempt)
