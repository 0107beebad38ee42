"""Render every combination of answers that differ in Python; import all modules, train two steps.

python -m scripts.matrix               all combinations; writes tests/stress/results/matrix.json
python -m scripts.matrix --bounded     a few of them, in which each answer occurs
python -m scripts.matrix --answers tracker=none parallelism=fsdp     those that have these answers

Renders whose packages are the same are run once. Each package is imported and trained (the tiny
preset, one plain process, on the CPU) in a fork of this process, which has imported torch and
computed nothing. The files of a cluster hold no Python, and have tests of their own. One failure
makes the exit code 1.
"""

import argparse
import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cookiecutter.main import cookiecutter

from benchmarks.common import PACKAGE, machine, versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "stress" / "results"
QUESTIONS = (
    *("task", "text", "samples", "parallelism", "checkpoint", "storage", "tracker", "workflow"),
)
LIMIT = 300  # seconds for one package
# What any of the packages imports: imported once, before the forks.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "fsspec",
    "mlflow",
    "safetensors.torch",
    "sklearn.datasets",
    "tyro",
    "wandb",
)


@dataclass
class Package:
    """A rendered package, and all answers that render exactly this one."""

    project: Path
    answers: list[dict[str, str]]
    problem: str | None = None
    pid: int = 0
    deadline: float = field(default=0.0)

    @property
    def log(self) -> Path:
        """What its process prints."""
        return self.project.with_suffix(".log")

    def start(self) -> None:
        """Fork a process that imports and trains it."""
        self.deadline = time.monotonic() + LIMIT
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                attach_output(self.log)
                os.chdir(self.project)
                code = try_out(self.project)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def ended(self) -> bool:
        """Look whether its process has ended, or end it after `LIMIT`; keep the reason."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        late = not pid and time.monotonic() > self.deadline
        if not pid and not late:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # whatever it has started goes with it
        if late:
            os.waitpid(self.pid, 0)
        if late or status:
            output = self.log.read_text("utf-8", "replace").splitlines()[-30:]
            self.problem = "\n".join([*([f"hangs after {LIMIT} s"] if late else []), *output])
        return True


def attach_output(log: Path) -> None:
    """Send what this process prints to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def try_out(project: Path) -> int:
    """Import all modules of the package and train two steps; the exit code."""
    sys.path.insert(0, str(project / "src"))
    package = importlib.import_module(PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        importlib.import_module(module.name)
    words = ["train", "--preset", "tiny", "--device", "cpu", "--train.steps", "2"]
    if project.with_suffix(".txt").exists():
        words += ["--data.path", str(project.with_suffix(".txt"))]
    code = importlib.import_module(f"{PACKAGE}.__main__").dispatch(words)
    status = json.loads((project / "runs/default/status.json").read_text("utf-8"))
    if (status["status"], status["step"]) != ("finished", 2):
        raise RuntimeError(f"not finished at step 2: {status}")
    if not (project / "runs/default/checkpoints/step_00000002").is_dir():
        raise RuntimeError("there is no checkpoint of step 2")
    return code


def combinations(template: Path, bounded: bool, wanted: dict[str, str]) -> list[dict[str, str]]:
    """All sets of answers that have the wanted ones, or a few of them.

    Each answer occurs in the few, and the smallest and the fullest render are among them.
    """
    questions = json.loads((template / "cookiecutter.json").read_text("utf-8"))
    choices = [questions[name] for name in QUESTIONS]
    if not bounded:
        drawn = itertools.product(*choices)
    else:
        longest = max(map(len, choices))
        diagonal = [tuple(c[k % len(c)] for c in choices) for k in range(longest)]
        smallest = "language_model bytes numbered single torch_save disk none baseline"
        fullest = "language_model tokenizer stream fsdp dcp_async object_store mlflow full"
        drawn = [*diagonal, smallest.split(), fullest.split()]
    sets = [dict(zip(QUESTIONS, answers, strict=True)) for answers in drawn]
    return [answers for answers in sets if wanted.items() <= answers.items()]


def renders(template: Path, folder: Path, chosen: list[dict[str, str]]) -> Iterator[Package]:
    """Render all that was chosen; yield each different package once, when it is first met."""
    settings = folder / "cookiecutter.json"  # not the user's own
    kept = {name: str(folder / ".cookiecutter") for name in ("cookiecutters_dir", "replay_dir")}
    settings.write_text(json.dumps(kept), "utf-8")
    known: dict[str, Package] = {}
    for number, answers in enumerate(chosen):
        rendered = cookiecutter(
            str(template),
            no_input=True,
            extra_context=answers,
            output_dir=str(folder / f"render-{number}"),
            config_file=str(settings),
            accept_hooks=False,
        )
        project = folder / str(number)
        shutil.move(rendered, project)
        key = digest(project / "src")
        if key in known:
            known[key].answers.append(answers)
            shutil.rmtree(project)
            continue
        if answers["task"] == "language_model":
            text = "Was ever woman in this humour wooed? " * 100
            project.with_suffix(".txt").write_text(text, "utf-8")
        known[key] = Package(project, [answers])
        yield known[key]


def digest(folder: Path) -> str:
    """A digest of all names and contents in a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def run(packages: Iterator[Package], jobs: int) -> list[Package]:
    """Try out all packages, `jobs` at a time; returns them."""
    running: list[Package] = []
    over: list[Package] = []

    def wait(below: int) -> None:
        while len(running) >= max(1, below):
            for package in [package for package in running if package.ended()]:
                running.remove(package)
                over.append(package)
                shutil.rmtree(package.project, ignore_errors=True)
                outcome = f"FAILED: {package.problem}" if package.problem else "ok"
                print(f"{label(package.answers[0])}: {outcome}", flush=True)
            time.sleep(0.02)

    for package in packages:
        wait(jobs)
        package.start()
        running.append(package)
    wait(1)
    return over


def label(answers: dict[str, str]) -> str:
    """The answers as one types them."""
    return " ".join(f"{name}={answer}" for name, answer in answers.items())


def preload() -> None:
    """Import what the packages share; a fork of a process with threads would not be safe."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["WANDB_SILENT"] = "true"
    importlib.import_module("torch").set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # by which a run would undo it


def main(arguments: list[str] | None = None) -> int:
    """Try all of it, write the result; 1 on any failure."""
    parser = argparse.ArgumentParser("python -m scripts.matrix", description=__doc__)
    parser.add_argument("--bounded", action="store_true", help="a few combinations")
    parser.add_argument("--answers", nargs="+", default=[], metavar="QUESTION=ANSWER")
    parser.add_argument("--template", type=Path, default=ROOT, help="a copy of the template")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    preload()
    wanted = dict(answer.split("=") for answer in given.answers)
    chosen = combinations(given.template, given.bounded, wanted)
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        packages = run(renders(given.template.resolve(), Path(folder), chosen), given.jobs)
    failures = [
        {"answers": label(answers), "problem": package.problem}
        for package in packages
        if package.problem
        for answers in package.answers
    ]
    result: dict[str, Any] = {
        "topic": "matrix",
        "command": "python -m scripts.matrix",
        "bounded": given.bounded or bool(wanted),
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(time.perf_counter() - started),
        "machine": machine(),
        "versions": versions("torch", "numpy"),
        "combinations": len(chosen),
        "packages": len(packages),
        "failures": failures,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "matrix.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(f"{len(chosen)} combinations, {len(packages)} packages, {len(failures)} failures")
    for failure in failures:
        print(f"  {failure['answers']}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
