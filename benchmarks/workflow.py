"""The rendered project's own workflow, for both tasks: how long its stages take, what they find.

Each round is one `workflow` of a default render in a new run directory, every stage in processes of
its own. The figures are those that the stages wrote.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .common import PACKAGE, TASKS, benchmark, beside_own_packages, render, series


def run_stages(source: Path, run_dir: Path, *command: str) -> dict[str, Any]:
    """What a command of the project has written as its stages' results, by stage."""
    outcome = subprocess.run(
        [sys.executable, "-m", PACKAGE, *command, "--device", "cpu", "--run-dir", str(run_dir)],
        env={**os.environ, "PYTHONPATH": beside_own_packages(source)},
        capture_output=True,
        text=True,
    )
    if outcome.returncode not in (0, 1):  # 1: a gate failed, which is a result as well
        sys.exit(outcome.stdout + outcome.stderr)
    files = (run_dir / "workflow").glob("*.json")
    return {path.stem: json.loads(path.read_text("utf-8")) for path in files}


def figures_of(stages: dict[str, Any]) -> Iterator[tuple[str, float, str]]:
    """(what, value, unit) of one round."""
    for name, content in stages.items():
        yield f"{name}: duration", content["seconds"], "s"
    if len(stages) > 1:
        yield "all stages: duration", sum(s["seconds"] for s in stages.values()), "s"
    found = {name: content["figures"] for name, content in stages.items()}
    yield "step, eager", 1e3 * found["baseline"]["step_seconds"]["median"], "ms"
    for mode, entry in found.get("compile", {}).get("modes", {}).items():
        yield f"compiled, {mode}: eager time / compiled time", entry["speedup"]["value"], "x"
        for how, seconds in entry["compile_seconds"].items():
            yield f"compiled, {mode}: compiling, {how}", seconds, "s"
    if efficiency := found.get("scale", {}).get("strong_efficiency"):
        yield "2 ranks: strong efficiency", 100 * efficiency["2"], "%"
    if drill := found.get("checkpoint"):
        yield "from kill to the next step", drill["restart_seconds"]["total"], "s"
        yield "held up by a save", 1e3 * drill["blocked_seconds"]["median"], "ms"


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """Both tasks in turns; of a smoke test only the first stage of one."""
    tasks, rounds, command = TASKS, 2, ("workflow", "--workflow.keep-going")
    if smoke:
        tasks, rounds, command = TASKS[:1], 1, ("baseline", "--preset", "tiny")
    sources = {}
    for task in tasks:
        (folder / task).mkdir()
        sources[task] = render(folder / task, task=task)
    found: dict[tuple[str, str], list[float]] = {}
    for round_ in range(rounds):
        for task, source in sources.items():
            stages = run_stages(source, folder / "runs" / f"{task}-{round_}", *command)
            for what, value, unit in figures_of(stages):
                found.setdefault((f"{task}, {what}", unit), []).append(value)
    result = {name: series(values, unit) for (name, unit), values in found.items()}
    return {"settings": {"rounds": rounds}, "series": result}


if __name__ == "__main__":
    benchmark("workflow", measure, ("torch", "numpy"))
