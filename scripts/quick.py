"""Check in a minute what a change breaks first: lint, a few renders, one life of each parallelism.

python -m scripts.quick      (`make quick`)

- ruff over the template, before it is rendered;
- the smallest, the default and the fullest render, checked by ruff;
- `single`, `ddp` and `fsdp`, the last two on two ranks: train, kill -9 of every process after the
  first checkpoint, and the same command again, which has to resume and to end.

It prints a line for each check and exits with 1 when one fails. `make test` runs all tests.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "my_training_run"
SMALLEST = {
    **{"license": "none", "parallelism": "single", "checkpoint": "torch_save"},
    **{"tracker": "none", "workflow": "baseline"},
}
FULLEST = {
    **{"parallelism": "fsdp", "storage": "object_store", "tracker": "mlflow"},
    **{"cluster": "kubernetes", "text": "tokenizer", "samples": "stream", "workflow": "full"},
}
RENDERS = {
    **{"smallest": SMALLEST, "default": {}, "fullest": FULLEST},
    **{"single": {"parallelism": "single"}, "fsdp": {"parallelism": "fsdp"}},
}
LIVES = {"single": "single", "ddp": "default", "fsdp": "fsdp"}  # parallelism: render
PATIENCE = 300.0  # seconds, for what should take ten
MARK = "QUICK_CHECK"  # an environment variable, which all processes of a life inherit


def lint(folder: Path, *options: str) -> None:
    """Ruff, by the settings of the folder or by those that the options name."""
    for command in (["check"], ["format", "--check"]):
        words = [sys.executable, "-m", "ruff", *command, "--no-cache", "--quiet", *options, "."]
        subprocess.run(words, check=True, cwd=folder)


def processes(mark: str) -> list[int]:
    """The processes that have this mark, or a parent that had it."""
    found, text = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if text in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill(mark: str) -> None:
    """Kill them all at once, as a power cut does, and wait until they are gone."""
    while pids := processes(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def wait_until(what: str, happened: Callable[[], object]) -> None:
    """Wait for something, for so long as it may take."""
    end = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {PATIENCE:.0f} s")
        time.sleep(0.05)


def newest(run_dir: Path) -> int:
    """The step of the newest checkpoint; 0 when there is none."""
    names = [path.name for path in run_dir.glob("checkpoints/step_????????")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


def live(project: Path, parallelism: str) -> None:
    """Train, kill, resume."""
    run_dir = project / "runs/quick"
    start = [sys.executable, "-m", PACKAGE]
    if parallelism != "single":
        start = ["./launch.sh", "-n", "2"]
    mark = f"{project.parent.parent}-{parallelism}"
    environment = {
        "PYTHONPATH": "src",
        "PYTHON": sys.executable,
        MARK: mark,
        "OMP_NUM_THREADS": "1",
    }
    options = ["--preset", "tiny", "--device", "cpu", "--run-dir", str(run_dir)]

    def train(steps: int, log: Path) -> subprocess.Popen[bytes]:
        more = ["--train.steps", str(steps), "--checkpoint.every", "5"]
        with open(log, "wb") as file:
            return subprocess.Popen(
                [*start, "train", *options, *more],
                cwd=project,
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    logs = [project / f"quick-{number}.log" for number in (1, 2)]
    try:
        with train(1_000_000, logs[0]) as first:
            wait_until("a checkpoint", lambda: newest(run_dir) or first.poll() is not None)
            kill(mark)
        reached = newest(run_dir)
        with train(reached + 5, logs[1]) as second:
            wait_until("the end", lambda: second.poll() is not None)
        status = json.loads((run_dir / "status.json").read_text("utf-8"))
        told = logs[1].read_text("utf-8")
        if second.returncode or f"step_{reached:08d}" not in told or newest(run_dir) != reached + 5:
            raise RuntimeError(f"not resumed from step {reached}: {status}")
    except BaseException:
        kill(mark)
        for log in filter(Path.exists, logs):
            print(log.read_text("utf-8", errors="replace"))
        raise


def timed(name: str, check: Callable[[], None]) -> bool:
    """Run a check and print how it went."""
    started = time.monotonic()
    try:
        check()
    except (RuntimeError, subprocess.CalledProcessError, OSError, ValueError) as error:
        print(f"FAILED  {name}: {error}", flush=True)
        return False
    print(f"ok  {time.monotonic() - started:5.1f} s  {name}", flush=True)
    return True


def main() -> int:
    """All checks; the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config")  # not the user's own, which may hold other defaults
        places = ("cookiecutters_dir", "replay_dir")
        config.write_text(json.dumps({place: str(config.with_name(place)) for place in places}))
        projects: dict[str, Path] = {}

        def render() -> None:
            for name, answers in RENDERS.items():
                projects[name] = Path(
                    cookiecutter(
                        str(ROOT),
                        output_dir=str(Path(folder, name)),
                        no_input=True,
                        accept_hooks=False,
                        config_file=str(config),
                        extra_context=answers,
                    )
                )
                lint(projects[name])

        passed = [
            timed("ruff on the template", partial(lint, ROOT, "--config", "pyproject.toml")),
            timed("renders", render),
        ]
        if all(passed):
            with ThreadPoolExecutor() as pool:
                checks = {
                    f"train, kill, resume: {parallelism}": partial(
                        live, projects[render], parallelism
                    )
                    for parallelism, render in LIVES.items()
                }
                passed += pool.map(timed, checks, checks.values())
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
