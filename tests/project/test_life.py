"""Rendered projects live: trained, killed, restarted, resharded, tested, and documented truly.

Every parallelism meets every checkpoint once; tasks, licences and trackers are spread over them.
All share the environment that runs these tests: a render is used through PYTHONPATH.
"""

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tasks
from tests.conftest import Project, bake, drill
from tests.stress.jobs import rank_of

PACKAGE = "my_training_run"
TASKS = tuple(tasks.TASKS)
VARIANTS = [
    (TASKS[number % len(TASKS)], *others)
    for number, others in enumerate(
        [
            ("ddp", "dcp_async", "MIT", "tensorboard"),
            ("ddp", "dcp", "Apache-2.0", "wandb"),
            ("ddp", "torch_save", "none", "none"),
            ("fsdp", "dcp_async", "BSD-3-Clause", "mlflow"),
            ("fsdp", "dcp", "none", "none"),
            ("fsdp", "torch_save", "MIT", "none"),
            ("single", "dcp_async", "none", "tensorboard"),
            ("single", "dcp", "Apache-2.0", "none"),
            ("single", "torch_save", "BSD-3-Clause", "none"),
        ]
    )
]
# Among them every parallelism, every kind of checkpoint and every task, be it two or three.
TESTED_WHOLE = (VARIANTS[0], VARIANTS[5], VARIANTS[7])
DEPENDENT = (
    "test_an_interrupted_run_goes_on_exactly[15]",
    "test_a_damaged_checkpoint_costs_one_interval",
    "test_a_failed_save_costs_only_itself",
    "test_a_checkpoint_holds_its_own_step",
)
TINY = ["--preset", "tiny", "--device", "cpu"]


def render(folder: Path, variant: tuple[str, ...], **more: str) -> Path:
    names = ("task", "parallelism", "checkpoint", "license", "tracker")
    return bake(folder, **dict(zip(names, variant, strict=True)), **more)


def environment(project: Path, **more: str) -> dict[str, str]:
    python = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PYTHONPATH": str(project / "src"),
        "PATH": f"{python}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        **more,
    }


@contextlib.contextmanager
def start(project: Path, *command: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, none of which outlives the block."""
    with subprocess.Popen(
        command,
        cwd=project,
        env=environment(project, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            for pid in {process.pid, *descendants(process.pid)}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def finish(
    process: subprocess.Popen[str], timeout: float = 900, codes: tuple[int, ...] = (0,)
) -> str:
    """Its output, once it has ended well."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{process.args} took more than {timeout} s")
    assert process.returncode in codes, output
    return output


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, workers of torchrun in sessions of their own included."""
    found = []
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            found += [child, *descendants(child)]
    return found


def trainers(pid: int) -> list[int]:
    """The training processes below a launcher: those with a rank."""
    return [child for child in descendants(pid) if rank_of(child) is not None]


def launch(project: Path, run: str, *options: str, ranks: int = 2, **more: str) -> Any:
    """Training on ranks, or on none of them in a plain process."""
    command = ["bash", "launch.sh", "-n", str(ranks)]
    if not ranks:
        command = [sys.executable, "-m", PACKAGE]
    return start(project, *command, "train", *TINY, "--name", run, *options, **more)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; of a run under way, those that are whole."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def manifest(run_dir: Path, step: int | None = None) -> dict[str, Any]:
    """What `verify` prints of a checkpoint, by default the newest."""
    name = "step_*" if step is None else f"step_{step:08}"
    path = max((run_dir / "checkpoints").glob(name))
    return json.loads((path / "manifest.json").read_text())


def hashes(run_dir: Path, step: int) -> dict[str, str]:
    """Of all weights and moments in a checkpoint (DCP's index has a random name in it)."""
    files = manifest(run_dir, step)["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name != ".metadata"}


SLOWLY = """

import os

_next = Loader.next


def _slowly(self, *arguments):
    if os.path.exists(os.environ.get("SLOW", "")):
        time.sleep(float(os.environ["SLOW_SECONDS"]))
    return _next(self, *arguments)


Loader.next = _slowly
"""


def make_slow(project: Path) -> None:
    """Steps take SLOW_SECONDS longer as long as there is the file SLOW, if the environment says."""
    with (project / "src" / PACKAGE / "sampling.py").open("a") as file:
        file.write(SLOWLY)


def bake_slow(folder: Path, **answers: str) -> Path:
    """Render a project that `make_slow` changed, with a text to train on.

    No model learns the text by heart: each batch keeps a loss of its own.
    """
    project = bake(folder, **answers)
    make_slow(project)
    noise = random.Random(0).choices("abcdefgh ", k=4000)
    (project / "text.txt").write_text("".join(noise))
    return project


def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    """`kill -9` in mid-run; restarted by torchrun, bit-identical.

    All variants are killed in tests/stress/kill_storm.py, those on one process too.
    """
    project, slow = bake(tmp_path / "project"), tmp_path / "slow"
    make_slow(project)  # or it could be over before it is killed
    options = ("--train.steps", "80", "--train.log-every", "1")
    with launch(project, "undisturbed", *options) as process:
        finish(process)
    slow.touch()
    with launch(project, "killed", *options, SLOW=str(slow), SLOW_SECONDS="0.1") as process:
        deadline = time.monotonic() + 600
        while len(records(project / "runs" / "killed")) < 12:
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        os.kill(trainers(process.pid)[-1], signal.SIGKILL)
        slow.unlink()
        said = finish(process)
    assert "resuming from" in said and "Traceback" not in said
    assert re.search(r"^.*rank \d was killed by SIGKILL.*: restarting all ranks", said, re.M), said
    undisturbed, killed = (hashes(project / "runs" / run, 80) for run in ("undisturbed", "killed"))
    assert undisturbed and killed == undisturbed
    expected, found = (
        {record["step"]: record["loss"] for record in records(project / "runs" / run)}
        for run in ("undisturbed", "killed")
    )
    assert found == expected
    assert list(found) == list(range(1, 81))


def test_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """2 -> 1 -> 2 -> 3 ranks, with a batch that three do not divide, against one process."""
    names = {}
    for task, parallelism, checkpoint, *_ in VARIANTS:
        if parallelism != "single":
            name = f"ranks_{parallelism}_{checkpoint}"
            answers = {"task": task, "parallelism": parallelism, "checkpoint": checkpoint}
            names[name] = bake(tmp_path / name, package_name=name, **answers)
    sources = {name: project / "src" for name, project in names.items()}
    jobs = (("many", 2, 3), ("many", 0, 6), ("many", 2, 9), ("many", 3, 12), ("one", 0, 12))
    told = [(ranks, str(tmp_path), run, str(steps), *names) for run, ranks, steps in jobs]
    drill("elastic.py", *told, sources=sources)
    for name, (run, ranks, steps) in itertools.product(names, jobs):
        saved = manifest(tmp_path / name / run, steps)
        assert (saved["world_size"], saved["samples"]) == (max(1, ranks), 8 * steps)
    assert len(names) == 6
    for name in names:
        many, one = ([r["loss"] for r in records(tmp_path / name / run)] for run in ("many", "one"))
        assert many == pytest.approx(one, rel=1e-4), name
        assert len(many) == 12


def test_a_resume_is_exact_on_any_number_of_ranks(tmp_path: Path) -> None:
    """DDP on 2, 3 and 5 ranks, with dropout, batch statistics, accumulation and uneven shares.

    From three ranks on the order of a sum shows: a start then takes one step that changes nothing.
    """
    sources = {}
    checkpoints = itertools.cycle(("dcp_async", "torch_save"))
    for task, checkpoint in zip(TASKS, checkpoints, strict=False):
        name = f"exact_{task}"
        answers = {"task": task, "checkpoint": checkpoint, "package_name": name}
        sources[name] = bake(tmp_path / name, **answers) / "src"
    jobs = [(ranks, str(tmp_path / str(ranks)), *sources) for ranks in (2, 3, 5)]
    output = drill("resumed.py", *jobs, sources=sources)
    for ranks, warm_up in ((2, 0), (3, 1), (5, 1)):
        steps = len(TASKS) * (16 + warm_up + 8 + warm_up)
        assert f"{ranks} ranks: {len(TASKS)} resumed, {steps} steps" in output


@pytest.mark.parametrize("variant", TESTED_WHOLE, ids="-".join)
def test_its_own_tests_pass(tmp_path: Path, variant: tuple[str, ...]) -> None:
    """All of them; and the hooks, which are the same in all renders and change nothing there."""
    project = render(tmp_path, variant)
    with start(project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider") as process:
        output = finish(process)
    assert " passed" in output and " failed" not in output
    if variant == TESTED_WHOLE[0]:
        for command in (["git", "init", "-q"], ["git", "add", "."], ["pre-commit", "run", "-a"]):
            with start(project, *command, PRE_COMMIT_HOME=str(project / ".pre-commit")) as process:
                finish(process)


def test_own_tests_that_depend_on_several_answers_pass(tmp_path: Path) -> None:
    """In all other variants; on several ranks all are in test_any_number_of_ranks_goes_on."""
    projects = {}
    for variant in set(VARIANTS) - set(TESTED_WHOLE):
        name = "_".join(("own", *variant[1:3]))
        projects[name] = render(tmp_path / name, variant, package_name=name)
    tests = [f"tests/test_training.py::{name}" for name in DEPENDENT]
    sources = {name: project / "src" for name, project in projects.items()}
    jobs = [(0, str(project), 0, *tests) for project in projects.values()]
    output = drill("own_tests.py", *jobs, sources=sources)
    assert output.count("\n5 passed") == len(projects) == 6


def commands_of(project: Path) -> list[str]:
    """All that the README tells to type, but what installs."""
    readme = (project / "README.md").read_text("utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", readme, flags=re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    table = re.findall(r"^\| `([^`]+)` \|", readme, flags=re.MULTILINE)
    lines += [f"python3 -m {PACKAGE} {command}" for command in table[1:]]
    return list(dict.fromkeys(line for line in lines if not re.search("venv|pip install", line)))


STAGES = ("baseline", "compile", "profile", "scale", "checkpoint")


def test_the_commands_of_its_readme_work(tmp_path: Path) -> None:
    """Every command of every rendered README is typed, at the size of the tiny preset.

    On several machines they are tried in tests/stress/elastic.py, the workflow and with it all of
    its stages in test_whole_workflow.py, an object store in test_store.py.
    """
    elsewhere = re.compile("NNODES|s3://|" + "|".join(f" {it}$" for it in ("workflow", *STAGES)))
    typed: list[str] = []
    parallelisms = ("ddp", "fsdp", "single")
    for task, parallelism in zip(itertools.cycle(TASKS), parallelisms, strict=False):
        project = bake(tmp_path / task / parallelism, task=task, parallelism=parallelism)
        lines = commands_of(project)
        new = [line for line in lines if line not in typed and not elsewhere.search(line)]
        typed += new
        if new and new[0] != lines[0]:  # they need a run
            new.insert(0, f"python3 -m {PACKAGE} train")
        for line in new:
            line += " " + " ".join(TINY) if " train" in line else ""
            with start(project, "bash", "-c", line, MAX_RESTARTS="0") as process:
                finish(process)
    commands = {"train", "report", "verify", "export", "infer"}
    assert commands == {word for line in typed for word in line.split() if word in commands}


@pytest.mark.parametrize("task", TASKS)
def test_unusable_data_is_told_in_one_line(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_text("too short")
    with Project.imported(tmp_path, f"unusable_{task}", task=task, parallelism="single") as it:
        monkeypatch.chdir(it.folder)
        for name in ("missing", "empty", "short"):
            path = str(tmp_path / name)
            words = ("train", "--device", "cpu", "--data.path", path)
            monkeypatch.setattr(sys, "argv", ["program", *words])
            assert it.module("__main__").main() == 2
            output = "".join(capsys.readouterr())
            assert output.startswith("error: ") and output.count("\n") == 1, output
            assert path in output
        assert not (it.folder / "runs").exists()


def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    """Ranks that refuse their settings are not started again, and print nothing else.

    The first rank says it for all, if it does so within a second; there are four starts otherwise.
    """
    project = bake(tmp_path)
    with launch(project, "mistaken", "--data.path", "missing", ranks=3) as process:
        output = finish(process, timeout=300, codes=(2,))
    assert 1 <= output.count("error: --data.path: ") <= 3, output
    assert "Traceback" not in output and "c10::" not in output, output


def test_it_installs_with_its_console_script(tmp_path: Path) -> None:
    project = bake(tmp_path)
    target = tmp_path / "site"
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    with start(
        project, sys.executable, "-m", "pip", "install", *options, "--target", str(target), "."
    ) as process:
        finish(process)
    script = target / "bin/my-training-run"
    with start(project, str(script), "--help", PYTHONPATH=str(target)) as process:
        assert "baseline" in finish(process)
