"""What a start is given by its user: names, files, settings, a directory that another run takes."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project, project_fixture

project = project_fixture(
    "of_entrances", parallelism="single", checkpoint="torch_save", tracker="none"
)


image = project_fixture(
    "of_image_entrances",
    task="image_classifier",
    **{"parallelism": "single", "checkpoint": "torch_save", "tracker": "none"},
)


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a/b", "a\nb", "a\0b", "\x1b[2J", "\udcff"])
def test_a_name_is_a_plain_name(project: Project, name: str) -> None:
    with pytest.raises(project.module("errors").UserError) as refused:
        project.config(name=name).directory  # noqa: B018
    assert str(refused.value).startswith("--name ") and str(refused.value).isprintable()
    assert project.config(name="été 2").directory == Path("runs/été 2")


WRONG = {
    "train.steps": ["3", 3.5, True, None, [3], {"x": 3}],
    "optim.learning_rate": ["fast", None, False],
    "train.deterministic": [1, "yes"],
    "train.precision": ["fp8", 16, None, ["fp32"]],
    "compile.dynamic": ["maybe", 0],
    "device": [0, None],
    "data.path": [3, ["a"]],
    "data": [3, None, "x", [1]],
    "model.width": [1e400, "wide"],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, many in WRONG.items() for v in many])
def test_a_setting_of_a_wrong_type_is_named(
    project: Project, tmp_path: Path, field: str, value: Any
) -> None:
    """In a config.json, and from a preset or a program."""
    content = value
    for part in reversed(field.split(".")):
        content = {part: content}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    line = project.refuses("train", "--config", str(file))
    assert field in line and "expected " in line and str(file) in line and line.isprintable()
    with pytest.raises(project.module("errors").UserError, match=f"{field}.* is"):
        project.module("config").override(project.module("config").Config(), {field: value})


def test_a_config_json_of_this_project_is_taken_as_it_is(project: Project, tmp_path: Path) -> None:
    config = project.config(optim__clip=1, optim__learning_rate=1, data__path=tmp_path / "x")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(project.module("files").to_json(config)))
    kind = type(config)
    assert project.module("config").load(file, kind) == config


NESTED = ["[" * 100_000, '{"data": ' * 100_000, '{"gone": ' + "[" * 3000 + "]" * 3000 + "}"]
NESTED += ['{"device": ' + "[" * 900 + "]" * 900 + "}"]


def test_a_torn_config_json_is_one_line(project: Project, tmp_path: Path) -> None:
    """For a start that takes it, and for commands on the run beside which it lies."""
    run = tmp_path / "run"
    project("train", *project.settings, "--run-dir", str(run), "--train.steps", "2")
    file = run / "config.json"
    for content in ("", "{", "[1]", "\udcff", "null", *NESTED):
        file.write_text(content, "utf-8", "surrogateescape")
        commands = [("train", "--config", str(file)), ("infer", "--run-dir", str(run))]
        if content not in NESTED[2:]:  # those are objects
            commands += [("export", "--run-dir", str(run), "--to", str(tmp_path / "state.pt"))]
        for words in commands:
            line = project.refuses(*words)
            assert str(file) in line and "\n" not in line and len(line) < 500, line
        project("verify", "--run-dir", str(run))


def bad_files(folder: Path, name: str) -> Iterator[Path]:
    """A pipe, a link to nothing and a folder, one at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    os.mkfifo(path)
    yield path
    path.unlink()
    path.symlink_to("nowhere")
    yield path
    path.unlink()


def test_a_pipe_or_a_dangling_link_among_the_data_is_one_line(
    project: Project, image: Project, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/good.txt").write_text("Now is the winter of our discontent. " * 100)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/train.bin").write_bytes(bytes(4000))
    words = ("train", "--preset", "tiny", "--device", "cpu", "--data.path")
    for kind, name, options in (
        ("texts", "bad.txt", ()),
        ("tokens", "val.bin", ("--data.vocabulary", "9")),
    ):
        for path in bad_files(tmp_path / kind, name):
            assert project.refuses(*words, str(path.parent), *options).startswith(str(path))
            assert str(path) in project.refuses(*words, str(path), *options)
    for path in bad_files(tmp_path / "images/cat", "a.png"):
        assert image.refuses(*words, str(path.parents[1])).startswith(str(path))
    for path in bad_files(tmp_path, "all.npz"):
        assert str(path) in image.refuses(*words, str(path))


def test_a_directory_set_aside_before_it_was_locked_is_not_taken(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the opening and the locking of `.lock` another run renames the directory."""
    module, group = project.module("run.directory"), project.module("distributed").Group()
    run, aside = tmp_path / "run", tmp_path / "run.old-1"
    lockf, opened = fcntl.lockf, []

    def late(file: Any, how: int) -> None:
        opened.append(os.fstat(file.fileno()).st_ino)
        if len(opened) == 1:
            run.rename(aside)
        lockf(file, how)

    monkeypatch.setattr(module.fcntl, "lockf", late)
    with module.RunDirectory(run, group) as taken:
        assert len(opened) == 2 and (run / ".lock").stat().st_ino == opened[1] != opened[0]
        assert taken.lock.fileno() and (run / ".lock").read_text().startswith("process ")
        assert (aside / ".lock").read_text() == ""


def test_a_directory_in_use_is_refused_by_the_name_of_its_owner(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Any, how: int) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    (tmp_path / ".lock").write_text("process 5 on another-host\n")
    monkeypatch.setattr(project.module("run.directory").fcntl, "lockf", refuse)
    line = project.refuses("train", *project.settings, "--run-dir", str(tmp_path))
    assert line.startswith(f"{tmp_path} is in use by process 5 on another-host (Resource ")


whole = project_fixture(
    "of_all_entrances",
    **{
        "text": "tokenizer",
        "workflow": "full",
        "parallelism": "single",
        "checkpoint": "torch_save",
    },
)
DIGITS = "1" + "0" * 399
ODD = {
    "400 digits": DIGITS,
    "400 digits and a fraction": f"{DIGITS}.5",
    "5,000 digits": "1" * 5000,
    "20,000 brackets": "[" * 20_000 + "]" * 20_000,
    "400 braces": '{"a": ' * 400 + "1" + "}" * 400,
}
TOML = {
    "20,000 brackets": ODD["20,000 brackets"],
    "400 braces": "{a = " * 400 + "1" + "}" * 400,
}


@pytest.fixture(scope="module")
def measured(whole: Project) -> Path:
    """A run of two steps that has a result of a stage, text to read, and tokens of it."""
    run = whole.folder / "measured"
    words = (*whole.settings, "--run-dir", str(run))
    whole("baseline", *words)
    whole("train", *words, "--train.steps", "2", "--train.log-every", "1")
    (whole.folder / "texts").mkdir()
    for name in ("a.txt", "val.txt"):
        (whole.folder / "texts" / name).write_text("Was ever woman in this humour won? " * 500)
    whole("tokens", "--text", "texts", "--to", "tokens", "--vocabulary", "300")
    return run


@pytest.mark.parametrize("odd", ODD)
def test_long_numbers_and_deep_brackets_are_one_line(
    whole: Project, measured: Path, tmp_path: Path, odd: str
) -> None:
    """Wherever a file is read: a command does its work, or says in a line why it cannot."""
    value, errors = ODD[odd], whole.module("errors")
    run, name = tmp_path / "run", str(tmp_path / "run")

    def call(*words: str) -> None:
        """Call a command, which does its work, or says in one line why it cannot."""
        try:
            with contextlib.suppress(SystemExit), contextlib.chdir(whole.folder):
                whole.module("__main__").dispatch([*words])
        except Exception as error:
            line = errors._in_one_line(error)
            lines = line.splitlines()
            assert len(lines) == 1 or "cannot resume from" in lines[0], (odd, words, error)
            assert len(lines[0]) < 1000

    def put(path: Path, content: Any, key: str, *more: str) -> None:
        """A file of JSON, with the odd value at a key."""
        part = content
        for each in (key, *more)[:-1]:
            part = part[each]
        part[(key, *more)[-1]] = "@"
        path.write_text(json.dumps(content).replace('"@"', value))

    def anew() -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(measured, run)

    tiny = ("--preset", "tiny", "--device", "cpu", "--train.steps", "1")
    other = ("--run-dir", str(tmp_path / "other"), "--fresh")
    settings = tmp_path / "settings"
    for setting in ("optim.learning_rate", "train.seed", "model.width", "train", "other", "device"):
        part, _, rest = setting.partition(".")
        put(settings.with_suffix(".json"), {part: {rest: 0}}, part, *([rest] if rest else ()))
        settings.with_suffix(".toml").write_text(f"{setting} = {TOML.get(odd, value)}\n")
        for kind in (".json", ".toml"):
            call("train", *tiny, *other, "--config", str(settings.with_suffix(kind)))
    resume = ("train", *whole.settings, "--run-dir", name, "--train.steps", "2")
    later = (("report", "--run-dir", name), ("compare", str(measured), name), resume)
    of_weights = ("infer", "--run-dir", name, "--prompt", "a", "--tokens", "1", "--device", "cpu")
    loads = ("export", "--run-dir", name, "--to", str(tmp_path / "state.pt"))
    anew()
    put(run / "config.json", json.loads((run / "config.json").read_text()), "train", "seed")
    for words in (of_weights, loads, ("verify", "--run-dir", name), *later):
        call(*words)
    for keys in (("step",), ("machine", "cores")):
        anew()
        put(run / "status.json", json.loads((run / "status.json").read_text()), *keys)
        for words in later[:2]:
            call(*words)
    anew()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    with (run / "metrics.jsonl").open("a") as file:
        for key in ("step", "loss", "samples_per_second", "step_seconds", "validation_loss"):
            file.write(json.dumps(json.loads(lines[-1]) | {key: "@"}).replace('"@"', value) + "\n")
    for words in later:
        call(*words)
    result = run / "workflow/baseline.json"
    for key in ("settings", "figures"):
        anew()
        put(result, json.loads(result.read_text()), key)
        for words in later[:2]:
            call(*words)
    figures = json.loads((measured / "workflow/baseline.json").read_text())["figures"]
    anew()
    content = json.loads(result.read_text())
    for key, figure in figures.items():
        content["figures"][key] = dict.fromkeys(figure, "@") if isinstance(figure, dict) else "@"
    put(result, content, "figures", next(iter(figures)))
    shutil.copy(result, run / "workflow/recommended.json")
    for words in later[:2]:
        call(*words)
    tokens = tmp_path / "tokens"
    for key in ("vocabulary", "end_of_text"):
        shutil.copytree(whole.folder / "tokens", tokens, dirs_exist_ok=True)
        put(tokens / "tokens.json", json.loads((tokens / "tokens.json").read_text()), key)
        call("train", *tiny, *other, "--data.path", str(tokens))
    module = whole.module("checkpoint.manifest")
    newest = run / "checkpoints/step_00000002/manifest.json"
    for key in ("step", "validation_loss", "identity", "size"):
        anew()
        content = json.loads(newest.read_text())
        del content["digest"]
        put(newest, content, *(("files", "state.pt", key) if key == "size" else (key,)))
        text = newest.read_bytes()[:-1] + b',\n "digest": "'
        newest.write_bytes(text + module.SEAL % hashlib.sha256(text).hexdigest().encode())
        for words in (("verify", "--run-dir", name), resume):
            call(*words)


@pytest.mark.parametrize("flags", [("-OO",), ("-W", "error"), ("-P",)], ids=lambda it: it[0])
def test_python_may_be_started_with_any_flags(
    project: Project, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """As a shell or an image sets them: without asserts and docstrings, warnings as errors."""
    words = ("train", *project.settings, "--train.steps", "2", "--run-dir", str(tmp_path / "run"))
    done = project.python(*flags, "-m", project.name, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished at step 2" in done.stderr


def test_python_may_be_isolated(project: Project, tmp_path: Path) -> None:
    """With -I, which ignores PYTHONPATH; and help needs no docstrings."""
    source = str(project.folder / "src")
    start = f"import sys; sys.path.append({source!r}); from {project.name}.__main__ import main; "
    words = ("train", *project.settings, "--train.steps", "2", "--run-dir", str(tmp_path / "run"))
    done = project.python("-I", "-c", f"{start}sys.exit(main())", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished at step 2" in done.stderr
    done = project.python("-OO", "-m", project.name, "train", "--help")
    assert done.returncode == 0 and "--train.steps" in done.stdout, done.stderr


def test_a_folder_of_other_letters_is_read_in_an_ascii_locale(
    project: Project, tmp_path: Path
) -> None:
    """And the run is resumed, there and in a locale of UTF-8: the data are the same."""
    data = tmp_path / "dätä"
    data.mkdir()
    (data / "é.bin").write_bytes(bytes(8000))
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ("train", "--preset", "tiny", "--device", "cpu", "--data.path", str(data))
    words += ("--data.vocabulary", "9", "--run-dir", str(tmp_path / "run"), "--train.steps")
    for steps in ("2", "4"):
        done = project.python("-m", project.name, *words, steps, **ascii_only)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"finished at step {steps}" in done.stderr
        assert ("resuming from" in done.stderr) == (steps == "4")
    project(*words, "6")
    assert (tmp_path / "run/checkpoints/step_00000006").exists()


def test_a_terminal_may_have_no_size_and_no_colours(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    for columns in ("20", "0"):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("LINES", "0")
        with pytest.raises(SystemExit) as ended:
            project("train", "--help")
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert "--train.steps" in out and "\x1b" not in out
    project("train", *project.settings, "--train.steps", "2", "--run-dir", str(tmp_path / "run"))
