"""Rendered projects live: trained, killed, restarted, resharded, tested, and documented truly.

Every parallelism meets every checkpoint once; tasks, licences and trackers are spread over them.
All share the environment that runs these tests: a render is used through PYTHONPATH.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import bake, drill

PACKAGE = "my_training_run"
VARIANTS = [
    ("language_model", "ddp", "dcp_async", "MIT", "tensorboard"),
    ("image_classifier", "ddp", "dcp", "Apache-2.0", "wandb"),
    ("language_model", "ddp", "torch_save", "none", "none"),
    ("image_classifier", "fsdp", "dcp_async", "BSD-3-Clause", "mlflow"),
    ("language_model", "fsdp", "dcp", "none", "none"),
    ("image_classifier", "fsdp", "torch_save", "MIT", "none"),
    ("image_classifier", "single", "dcp_async", "none", "tensorboard"),
    ("language_model", "single", "dcp", "Apache-2.0", "none"),
    ("image_classifier", "single", "torch_save", "BSD-3-Clause", "none"),
]
# Among them every parallelism, every kind of checkpoint and both tasks.
TESTED_WHOLE = (VARIANTS[0], VARIANTS[5], VARIANTS[7])
TINY = ["--preset", "tiny", "--device", "cpu"]


# A variant's tests share its render, so they run in one worker.
GROUPED = [
    pytest.param(variant, id="-".join(variant), marks=pytest.mark.xdist_group("-".join(variant)))
    for variant in VARIANTS
]


@pytest.fixture(scope="module", params=GROUPED)
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ("task", "parallelism", "checkpoint", "license", "tracker")
    return bake(tmp_path_factory.mktemp("life"), **dict(zip(names, request.param, strict=True)))


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
    process: subprocess.Popen[str], timeout: float = 150, codes: tuple[int, ...] = (0,)
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
    found = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if b"\0RANK=" in Path(f"/proc/{child}/environ").read_bytes():
                found.append(child)
    return found


def train(project: Path, ranks: int, run: str, *options: str, **more: str) -> str:
    with launch(project, ranks, run, *options, **more) as process:
        return finish(process)


def launch(project: Path, ranks: int, run: str, *options: str, **more: str) -> Any:
    command = ["bash", "scripts/launch.sh", "-n", str(ranks)]
    if ranks == 0:  # one plain process
        command = [sys.executable, "-m", PACKAGE]
    return start(project, *command, "train", *TINY, "--name", run, *options, **more)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; of a run under way, those that are whole."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def manifest(run_dir: Path) -> dict[str, Any]:
    """The manifest of the newest checkpoint."""
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    return json.loads((newest / "manifest.json").read_text())


SLOWLY = """

import os

_next = Loader.next


def _slowly(self):
    if os.path.exists(os.environ.get("SLOW", "")):
        time.sleep(float(os.environ["SLOW_SECONDS"]))
    return _next(self)


Loader.next = _slowly
"""


def make_slow(project: Path) -> None:
    """Steps take SLOW_SECONDS longer as long as there is the file SLOW, if the environment says."""
    with (project / "src" / PACKAGE / "engine/sampling.py").open("a") as file:
        file.write(SLOWLY)


DIGEST = """
import hashlib, pathlib, sys
from my_training_run import config, data, model
from my_training_run.engine.control import HostGroup
from my_training_run.engine.reading import find_checkpoint, flat, open_tensors
from my_training_run.engine.optimizers import create_optimizer_state, optimizer_tensors
from my_training_run.engine.state import model_tensors
from my_training_run.optim import build_optimizer
settings = config.load(pathlib.Path(sys.argv[1]) / "config.json")
net = model.build_model(settings, data.build_datasets(settings)[2])
optimizer = build_optimizer(settings.optim, net)
create_optimizer_state(optimizer)
tensors = {"model": model_tensors(net), "optimizer": optimizer_tensors(net, optimizer)}
for run in sys.argv[1:]:
    path, manifest = find_checkpoint(pathlib.Path(run))
    named, source = dict(flat(tensors)), open_tensors(path, manifest)
    assert source.forms.keys() == named.keys()
    for tensor in named.values():
        tensor.fill_(7)
    source.read(named, HostGroup())
    digest = hashlib.sha256(b"".join(named[name].numpy().tobytes() for name in sorted(named)))
    print(manifest["step"], digest.hexdigest())
"""


def final_states(project: Path, *runs: str) -> list[str]:
    """Step and digest of all weights and moments in the newest checkpoints, whoever saved them."""
    paths = [str(project / "runs" / run) for run in runs]
    with start(project, sys.executable, "-c", DIGEST, *paths) as process:
        return finish(process).splitlines()[-len(runs) :]


@pytest.mark.parametrize("project", [GROUPED[0], GROUPED[7]], indirect=True)
def test_a_killed_worker_changes_nothing(project: Path) -> None:
    """`kill -9` in mid-run; restarted (by torchrun, by hand for one process), bit-identical.

    All variants are killed in torture/kill_storm.py.
    """
    ranks = 0 if is_single(project) else 2
    options = ("--train.steps", "80", "--train.log-every", "1")
    train(project, ranks, "undisturbed", *options)

    with launch(project, ranks, "killed", *options) as process:
        deadline = time.monotonic() + 100
        while len(records(project / "runs" / "killed")) < 12:
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        victim = trainers(process.pid)[-1] if ranks else process.pid
        os.kill(victim, signal.SIGKILL)
        if ranks:
            output = finish(process)
            assert "resuming from" in output
        else:
            process.wait(20)
            killed_at = records(project / "runs" / "killed")[-1]["step"]
            assert killed_at < 80, "it was over before it was killed"
    if not ranks:
        assert "resuming from" in train(project, ranks, "killed", *options)
    undisturbed, killed = final_states(project, "undisturbed", "killed")
    assert undisturbed.startswith("80 ")
    assert killed == undisturbed
    expected, found = (
        {record["step"]: record["loss"] for record in records(project / "runs" / run)}
        for run in ("undisturbed", "killed")
    )
    assert found == expected
    assert list(found) == list(range(1, 81))


def is_single(project: Path) -> bool:
    return not (project / "tests/test_ranks.py").exists()


@pytest.mark.xdist_group("ranks")
def test_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """2 -> 1 -> 2 -> 3 ranks, with a batch that three do not divide, against one process."""
    names = {}
    for task, parallelism, checkpoint, *_ in VARIANTS:
        if parallelism != "single":
            name = f"ranks_{parallelism}_{checkpoint}"
            answers = {"task": task, "parallelism": parallelism, "checkpoint": checkpoint}
            names[name] = bake(tmp_path / name, package_name=name, **answers)
    sources = [project / "src" for project in names.values()]
    for run, ranks, steps in (
        ("many", 2, 3),
        ("many", 0, 6),
        ("many", 2, 9),
        ("many", 3, 12),
        ("one", 0, 12),
    ):
        drill("elastic.py", str(tmp_path), run, str(steps), *names, ranks=ranks, paths=sources)
        for name in names:
            saved = manifest(tmp_path / name / run)
            assert (saved["world_size"], saved["samples"]) == (max(1, ranks), 8 * steps)
    assert len(names) == 6
    for name in names:
        many, one = ([r["loss"] for r in records(tmp_path / name / run)] for run in ("many", "one"))
        assert many == pytest.approx(one, rel=1e-4), name
        assert len(many) == 12


def test_its_own_tests_and_hooks_pass(project: Path, request: pytest.FixtureRequest) -> None:
    """All of them in three variants, elsewhere those that depend on more than one answer."""
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if request.node.callspec.params["project"] not in TESTED_WHOLE:
        tests += ["-k", "two_ranks or interrupted or damaged or failed_save or its_own_step"]
    with start(project, sys.executable, *tests) as process:
        output = finish(process, timeout=240)
    assert " passed" in output and "failed" not in output
    for command in (["git", "init", "-q"], ["git", "add", "."], ["pre-commit", "run", "-a"]):
        with start(project, *command, PRE_COMMIT_HOME=str(project / ".pre-commit")) as process:
            finish(process)
    shutil.rmtree(project / ".git")
    shutil.rmtree(project / ".pre-commit", ignore_errors=True)


@pytest.mark.timeout(1500)  # a busy machine takes its time over all stages of the workflow
@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(("language_model", "ddp"), marks=pytest.mark.xdist_group("readme-1")),
        pytest.param(("image_classifier", "fsdp"), marks=pytest.mark.xdist_group("readme-2")),
        pytest.param(("language_model", "single"), marks=pytest.mark.xdist_group("readme-3")),
    ],
    ids="-".join,
)
def test_the_commands_of_its_readme_work(tmp_path: Path, answers: tuple[str, str]) -> None:
    """Every command of the rendered README is typed, at the size of the tiny preset."""
    project = bake(tmp_path, task=answers[0], parallelism=answers[1])
    readme = (project / "README.md").read_text("utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", readme, flags=re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    table = re.findall(r"^\| `([^`]+)` \|", readme, flags=re.MULTILINE)
    lines += [f"python -m {PACKAGE} {command}" for command in table[1:]]
    typed = []
    for line in lines:
        if "venv" in line or "pip install" in line or "NNODES" in line:
            continue  # installing is a test of its own; several machines need several machines
        gated = " workflow" in line
        if gated and (answers[1] != "ddp" or line in typed):
            continue  # the most of a minute each time
        typed.append(line)
        if " train" in line or gated:
            line += " " + " ".join(TINY) + (" --workflow.go-on" if gated else "")
        with start(project, "bash", "-c", line, MAX_RESTARTS="0") as process:
            # A gate may fail where the machine is busy; that it says so is the command working.
            output = finish(process, timeout=900, codes=(0, 1) if gated else (0,))
        assert "broke down" not in output, output
    commands = {"train", "report", "verify", "export", "infer"}
    commands |= {"workflow"} if answers[1] == "ddp" else set()
    assert commands == {word for line in typed for word in line.split() if word in commands}


@pytest.mark.parametrize("task", ["language_model", "image_classifier"])
def test_unusable_data_is_told_in_one_line(tmp_path: Path, task: str) -> None:
    project = bake(tmp_path, task=task, parallelism="single")
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_text("too short")
    for name in ("missing", "empty", "short"):
        path = str(tmp_path / name)
        command = [sys.executable, "-m", PACKAGE, "train", "--data.path", path]
        with start(project, *command) as process:
            output = finish(process, codes=(2,))
        assert output.startswith("error: ") and output.count("\n") == 1, output
        assert path in output
    assert not (project / "runs").exists()


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
