"""What a user sees and types first: a start, the bar, `--help`, a file of settings, a sweep."""

import contextlib
import fcntl
import json
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import Project, drill, recipe

NUMBER = r"\d[\d,]*"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with Project.imported(tmp_path_factory.mktemp("console"), "of_console") as project:
        yield project


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    answers = {"task": "image_classifier", "parallelism": "single", "tracker": "none"}
    answers |= {"checkpoint": "torch_save"}
    with Project.imported(tmp_path_factory.mktemp("console"), "of_images", **answers) as project:
        yield project


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that a start begins with."""
    words = ("model ", "data ", "batch ", "run ")
    return [record.message for record in caplog.records if record.message.startswith(words)]


def test_a_start_says_what_it_is(
    project: Project, images: Project, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    project("train", *project.settings, "--train.steps", "5", "--name", "first")
    assert said(caplog) == [
        "model  32,928 parameters, float32 on cpu, ranks: 1",
        "data   109 samples of 32 tokens, 6 for validation",
        "batch  8 samples; 5 steps (less than one epoch)",
        "run    runs/first, new",
    ]
    caplog.clear()
    project("train", *project.settings, "--train.steps", "20", "--name", "first")
    assert said(caplog)[2:] == [
        "batch  8 samples; 20 steps (1.47 epochs)",
        "run    runs/first, resumed at step 5",
    ]
    loader = SimpleNamespace(size=160, source=SimpleNamespace(order=SimpleNamespace()))
    loader.source.order.drawn = lambda steps: {}
    state = SimpleNamespace(config=project.config(train__steps=20), loader=loader)
    assert project.module("run.journal")._batch(state) == "8 samples; 20 steps (1.00 epochs)"
    loader.source.order.drawn = lambda steps: {"letters": 120, "digits": 40}
    wanted = "8 samples (75.0% letters, 25.0% digits); 20 steps (1.00 epochs)"
    assert project.module("run.journal")._batch(state) == wanted
    caplog.clear()
    project("train", *project.settings, "--train.steps", "20", "--name", "first")
    assert said(caplog) == []  # it is finished
    images("train", "--preset", "tiny", "--device", "cpu", "--train.steps", "1")
    assert re.fullmatch(rf"data   {NUMBER} samples, {NUMBER} for validation", said(caplog)[1])


def test_a_start_says_how_much_of_the_model_is_trained(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    state = project.module("train").setup(project.config(run_dir=tmp_path))
    state.model.requires_grad_(False)
    next(state.model.parameters()).requires_grad_()
    project.module("run.journal").log_start(state, tmp_path)
    size = next(state.model.parameters()).numel()
    assert f"model  32,928 parameters ({size:,} trained), float32 on cpu" in said(caplog)[0]


def on_a_terminal(command: list[str], columns: int, **options: Any) -> str:
    """What a command prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, **options) as child:
        os.close(theirs)
        printed = b""
        with contextlib.suppress(OSError):  # EIO, once the other end is closed
            while part := os.read(ours, 1 << 16):
                printed += part
        os.close(ours)
    assert child.returncode == 0, printed.decode()
    return printed.decode()


def test_a_line_of_the_log_fits_a_terminal(project: Project) -> None:
    printed = on_a_terminal(
        [
            *(sys.executable, "-m", project.name, "train", *project.settings),
            *("--name", "terminal", "--train.steps", "40", "--train.log-every", "1"),
        ],
        80,
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": "src"},
    )
    shown = [line.strip() for line in printed.splitlines() if line.startswith("step ")]
    form = (
        rf"step \d+/40  loss \d\.\d{{3}}  bits per byte \d\.\d{{3}}  {NUMBER} tokens/s  \d+ s left"
    )
    assert len(shown) == 40
    for line in shown:
        assert re.fullmatch(form, line) and len(line) <= 80, line


def test_a_console_that_is_gone_does_not_end_a_run(project: Project) -> None:
    """As after `2>&1 | head -n 1`; train.log has all lines."""
    words = (*project.settings, "--train.log-every", "1", "--train.steps", "30", "--name", "gone")
    with subprocess.Popen(
        [sys.executable, "-m", project.name, "train", *words],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": "src"},
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stderr and child.stderr.readline()
        child.stderr.close()
    run_dir = project.folder / "runs/gone"
    assert json.loads((run_dir / "status.json").read_text("utf-8"))["status"] == "finished"
    assert (run_dir / "logs/train.log").read_text("utf-8").count(" INFO step ") == 30


def test_bare_help_is_quick(project: Project) -> None:
    """It imports no torch, and takes less than half a second of a processor."""
    code = f"""
import sys
from {project.name}.__main__ import dispatch
assert dispatch(["--help"]) == 0
print({{"torch", "numpy", "tyro"}} & {{*sys.modules}} or "none of them")
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome = project.python("-c", code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.startswith(
        f"usage: python -m {project.name} COMMAND [--help] [options]\n"
    )
    assert outcome.stdout.endswith("\nnone of them\n")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def help_of(project: Project, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        project(name, "--help")
    assert ended.value.code == 0
    return capsys.readouterr().out


def options_in(help_text: str) -> list[str]:
    """The options of a help, which has to begin with the common ones."""
    options = re.findall(r"^[^\w\n]*--([a-z][\w.-]+)", help_text, re.MULTILINE)
    assert options[:6] == ["preset", "config", "name", "run-dir", "fresh", "device"]
    return options


def test_help_begins_with_the_common_options(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(project, "train", capsys)
    options = options_in(text)
    assert options[11:13] == ["train.steps", "train.epochs"]
    parts = list(dict.fromkeys(name.partition(".")[0] for name in options if "." in name))
    assert parts[:4] == ["train", "data", "model", "optim"]
    assert "Settings to start from: gpt2_124m, tiny." in text
    assert "workflow." not in text


def test_help_of_a_stage_ends_with_the_options_of_the_stages(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = options_in(help_of(project, "scale", capsys))
    assert "train.steps" in options and options[-1].startswith("workflow.")


def test_help_whose_reader_is_gone_says_nothing(project: Project) -> None:
    """As after `train --help | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-m", project.name, "train", "--help"],
        env={**os.environ, "PYTHONPATH": str(project.folder / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(300) == 1


def test_a_command_that_is_not_there_gets_the_usage(project: Project) -> None:
    line, usage, *_ = project.refuses("trian").splitlines()
    assert line == "there is no command 'trian': did you mean train?"
    assert usage.startswith("usage: ")


DEBUG = """
name = "debug"
train.log-every = 1
train.steps = 3
optim = { learning_rate = 1, clip = 0 }

[data]
path = "text.txt"

[workflow]
ranks = 2
"""


def test_settings_come_from_a_file_of_toml(project: Project, tmp_path: Path) -> None:
    """Any part of them, over a preset, below what is typed."""
    file = tmp_path / "debug.toml"
    file.write_text(DEBUG)
    project("train", "--device", "cpu", "--preset", "tiny", "--config", str(file))
    saved = json.loads((project.folder / "runs/debug/config.json").read_text("utf-8"))
    assert (saved["train"]["steps"], saved["train"]["log_every"]) == (3, 1)
    assert (saved["optim"]["learning_rate"], saved["optim"]["clip"]) == (1, 0)
    assert saved["model"]["width"] == 32 and "preset" not in saved and "workflow" not in saved
    words = ("--device", "cpu", f"--config={file}", "--preset=tiny", "--name", "typed")
    project("train", *words, "--train.steps", "2")
    status = json.loads((project.folder / "runs/typed/status.json").read_text("utf-8"))
    assert (status["status"], status["step"]) == ("finished", 2)
    stage = project.module("workflow.stage").StageConfig
    config = project.module("config").load(file, stage)
    assert config.workflow.ranks == 2 and config.model.width == 96


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "train.stpes = 3",
            "train.stpes is not a setting of this project: did you mean train.steps?",
        ),
        ("train.batch = 3", "train.batch is not a setting of this project"),
        ('train.steps = "3"', "train.steps is '3': expected int"),
        (
            "train.steps = 9223372036854775808",
            "train.steps is 9223372036854775808: it must be less than 2^63",
        ),
        ("train = 3", "train is 3: expected settings by name"),
        ("train.steps = 0", "--train.steps must be at least 1"),
        ("train.steps = ", "cannot be read as TOML: Invalid value (at end of document)"),
        ("a = " + "[" * 5000, "cannot be read as TOML: "),
        (None, "cannot be read as TOML: No such file or directory"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    project: Project, tmp_path: Path, text: str | None, wanted: str
) -> None:
    file = tmp_path / "debug.toml"
    if text is not None:
        file.write_text(text)
    line = project.refuses("train", "--config", str(file))
    assert line.startswith(str(file)) and wanted in line and "\n" not in line
    assert len(line) < len(str(file)) + 200


def test_a_run_directory_stands_for_its_config(project: Project) -> None:
    options = ("--preset", "tiny", "--device", "cpu", "--data.path", "text.txt")
    project("train", *options, "--train.steps", "2", "--train.seed", "9", "--name", "seeded")
    config = project.module("config").load(project.folder / "runs/seeded")
    assert config.train.seed == 9


def test_a_saved_config_wins_over_the_preset_beside_it(project: Project) -> None:
    options = ("--device", "cpu", "--data.path", "text.txt", "--train.steps", "2")
    project("train", "--preset", "tiny", *options, "--name", "saved")
    words = ("--preset", "default", "--config", "runs/saved/config.json", "--name", "again")
    project("train", *words)
    saved, again = (
        json.loads((project.folder / f"runs/{name}/config.json").read_text("utf-8"))
        for name in ("saved", "again")
    )
    assert saved.pop("name") == "saved" and again.pop("name") == "again"
    assert saved == again


def test_the_file_of_the_recipe_is_a_debug_run(project: Project) -> None:
    (project.folder / "debug.toml").write_text(recipe("toml", "debug"))
    options = ("--preset", "tiny", "--config", "debug.toml", "--device", "cpu")
    project("train", *options, "--data.path", "text.txt")
    lines = (project.folder / "runs/debug/metrics.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == json.loads(lines[-1])["step"] == 10


def test_the_sweep_of_the_recipe(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes share the trials of one study; a finished run has its figures, too."""
    import optuna

    monkeypatch.chdir(project.folder)
    code = recipe("python", "optuna").replace("my_training_run", project.name)
    assert code.count("preset()") == code.count("n_trials=20") == 1
    short = code.replace("preset()", 'preset("tiny")').replace("n_trials=20", "n_trials=2")
    (project.folder / "sweep.py").write_text(short)
    environment = {**os.environ, "PYTHONPATH": str(project.folder / "src")}
    command = [sys.executable, "sweep.py"]
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    backend = optuna.storages.journal.JournalFileBackend("sweep.log")
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.load_study(study_name="sweep", storage=storage)
    assert [trial.number for trial in study.trials] == [0, 1, 2, 3]
    losses = {}
    for trial in study.trials:
        lines = (project.folder / f"runs/sweep/{trial.number}/metrics.jsonl").read_text("utf-8")
        losses[trial.number] = json.loads(lines.splitlines()[-1])["validation_loss"]
        assert trial.value == losses[trial.number]
    assert len(set(losses.values())) == 4 and study.best_value == min(losses.values())
    config = project.module("config")
    again = config.load(Path("runs/sweep/0/config.json"))
    result = project.module("train").run(config.override(again, {"run_dir": "runs/sweep/0"}))
    assert result.status == "already finished"
    assert result.validation["validation_loss"] == losses[0]


def test_callbacks_are_called_on_all_ranks(tmp_path: Path) -> None:
    """After each step, after a validation and at the end; the example prints what it is for."""
    answers = {"parallelism": "fsdp", "checkpoint": "dcp"}
    with Project.imported(tmp_path, "with_callbacks", **answers) as project:
        sources = {project.name: project.folder / "src"}
        job = (2, str(project.folder), project.name)
        early = ((*job, steps) for steps in ("20", "20", "30"))
        output = drill("callbacks.py", job, *early, sources=sources)
        calls = [json.loads((project.folder / f"calls_{rank}.json").read_text()) for rank in (0, 1)]
        ends = [(project.folder / f"ends_{rank}").read_text().splitlines() for rank in (0, 1)]
        checkpoint = max((project.folder / "early/checkpoints").iterdir()).name
    # Each step is validated, and the run ends at the validated step on both ranks.
    wanted = ["20 steps: finished at 4", "20 steps: already finished at 4"]
    assert ends == [[*wanted, "30 steps: finished at 5"]] * 2
    assert checkpoint == "step_00000005"
    assert "a callback of another rank: stopping at step 4" in output
    validation = "validation ['validation_bits_per_byte', 'validation_loss']"
    wanted = ["step 1", validation, "step 2, logged", validation, "step 3, logged"]
    assert calls == [["enter", *wanted, "exit"]] * 2
    samples = re.findall(r"^sample at step (\d+): (.*)$", output, re.MULTILINE)
    assert [step for step, _ in samples] == ["2", "3"], output
    for _, text in samples:
        assert "oman in this humour wooed? Was e" in text[:40] and len(text) > 60, output
    assert "left out" not in output


ENDING = """
import os, sys
from {name}.errors import run_main

def command():
    {code}

sys.exit(run_main(command))
"""


def ended(project: Project, code: str, **environment: str) -> tuple[int, str]:
    """The exit code of a command with this code, and what it prints to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(name=project.name, code=code)],
        env={**os.environ, "PYTHONPATH": str(project.folder / "src"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


def test_what_code_exits_with_is_shown(project: Project) -> None:
    """As Python does; of a rank that has done no step, a restart would repeat it."""
    assert ended(project, "sys.exit('mount /data')") == (1, "mount /data\n")
    assert ended(project, "sys.exit('mount /data')", RANK="0") == (70, "mount /data\n")
    assert ended(project, "sys.exit(3)") == (3, "") and ended(project, "sys.exit()") == (0, "")


def test_a_pipe_that_is_not_stdout_is_an_error(project: Project) -> None:
    """As to a decoder that has died: its traceback is shown."""
    code, said = ended(project, "raise BrokenPipeError(32, 'Broken pipe')")
    assert code == 1 and "Traceback" in said and "BrokenPipeError" in said


def test_errors_of_the_network_are_passing(project: Project) -> None:
    would_repeat = project.module("errors")._would_repeat
    for module, passes in (("botocore.exceptions", True), ("httpx", True), ("model", False)):
        kind = type("EndpointConnectionError", (Exception,), {"__module__": module})
        assert would_repeat(kind("no route")) == (not passes)
    assert not would_repeat(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))
    assert would_repeat(RuntimeError("shape mismatch"))
