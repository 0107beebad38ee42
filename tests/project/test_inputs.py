"""What users give: JSON under any name, links, "~", prompts, batches of any class."""

import collections
import dataclasses
import json
import os
import shutil
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree

from tests.conftest import Project, project_fixture

ANSWERS = {"parallelism": "single", "checkpoint": "torch_save", "tracker": "none"}
text = project_fixture("text_inputs", **ANSWERS)
tokenizer = project_fixture("tokenizer_inputs", **ANSWERS, text="tokenizer")
SMALL = ("--preset", "tiny", "--device", "cpu", "--data.path", "text.txt")
NAMES = ["a.jsonl", "b.json", "c.ndjson", "d.JSONL", "e.jsonl.txt"]


def rows(count: int = 200) -> list[dict[str, Any]]:
    """Documents, each with a word of its own."""
    return [{"id": i, "text": f'é number {i}, "quoted"\n' * 3} for i in range(count)]


def write_lines(path: Path, count: int = 200) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count)))


def text_of(project: Project, path: Path) -> str:
    """All text that a run would train on or validate with."""
    training, validation, _ = project.module("data").build_datasets(
        project.config(data__path=path, data__context=8)
    )
    parts = [
        part.__getitems__(list(range(len(part))))["tokens"][:, :-1]
        for part in (training, validation)
    ]
    return bytes(torch.cat(parts).flatten().tolist()).decode(errors="replace")


@pytest.mark.parametrize("name", NAMES)
def test_json_lines_are_documents_under_any_name(
    text: Project, tokenizer: Project, tmp_path: Path, name: str
) -> None:
    write_lines(tmp_path / "text" / name)
    wanted = "\0".join(row["text"] for row in rows())
    for path in (tmp_path / "text", tmp_path / "text" / name):
        read = text_of(text, path)
        assert len(wanted) > 5000 and read == wanted[: len(read)] and len(read) > len(wanted) - 40
    to = tmp_path / "tokens"
    tokenizer(*("tokens", "--text", str(tmp_path / "text"), "--to", str(to), "--vocabulary", "300"))
    note = json.loads((to / "tokens.json").read_text())
    assert note["documents"] == 200
    assert note["bytes"] == sum(len(row["text"].encode()) for row in rows())


def test_one_json_list_is_refused_by_its_name(
    text: Project, tokenizer: Project, tmp_path: Path
) -> None:
    for number, indent in enumerate((None, 1)):
        path = tmp_path / f"{number}" / "f.json"
        path.parent.mkdir()
        path.write_text(json.dumps(rows(), indent=indent))
        for place in (path, path.parent):
            words = ("--text", str(place), "--to", str(tmp_path / "tokens"))
            for said in (
                tokenizer.refuses("tokens", *words),
                text.refuses("train", *SMALL[:-1], str(place), "--run-dir", str(tmp_path / "run")),
            ):
                assert said.startswith(f"{path} is one JSON list, not JSON lines: ")
                assert "jq -c '.[]' f.json > f.jsonl" in said and "\n" not in said


@pytest.mark.parametrize("ascii_only", [True, False])
def test_one_json_list_is_refused_whatever_letters_its_field_has(
    text: Project, tmp_path: Path, ascii_only: bool
) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps([{"texte édité": "a"}] * 3, ensure_ascii=ascii_only))
    with pytest.raises(text.module("errors").UserError, match="is one JSON list"):
        text.module("text").has_json_lines(path, "texte édité")


def test_other_json_is_text_and_said_to_be(
    text: Project, tokenizer: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "package.json").write_text(
        json.dumps({"name": "code", "files": ["a"] * 50}, indent=2)
    )
    (folder / "short.json").write_text('{"name": "code"}')
    (folder / "main.txt").write_text("main " * 100)
    assert '"files": [' in text_of(text, folder)
    tokenizer("tokens", "--text", str(folder), "--to", str(tmp_path / "t"), "--vocabulary", "300")
    lines = [
        line
        for line in caplog.messages
        if line.startswith("2 JSON files do not have JSON lines and are read as plain")
    ]
    assert len(lines) == 2 and all(line.endswith("package.json") for line in lines)


def test_json_lines_without_the_field_are_named(text: Project, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"body": "a"}\n{"body": "b"}\n')
    with pytest.raises(text.module("errors").UserError) as refused:
        text_of(text, tmp_path / "a.json")
    assert str(refused.value) == (
        f"{tmp_path / 'a.json'}, the line at byte 0: expected a JSON object with text in 'text'"
    )


def test_links_to_folders_are_followed(
    text: Project, tokenizer: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each folder once, in whatever circle they are."""
    folder, elsewhere = tmp_path / "text", tmp_path / "elsewhere"
    for path, word in (
        (folder / "a", "alpha"),
        (elsewhere, "beta"),
        (elsewhere / "deep", "gamma"),
    ):
        path.mkdir(parents=True)
        (path / "x.txt").write_text(f"{word} " * 50)
    (folder / "linked").symlink_to(elsewhere)
    assert {"alpha", "beta", "gamma"} <= {*text_of(text, folder).replace("\0", " ").split()}
    assert not caplog.messages
    # Circles, and second names of what is read already.
    (elsewhere / "deep" / "up").symlink_to(elsewhere)
    (elsewhere / "root").symlink_to(folder)
    (folder / "above").symlink_to(tmp_path)
    (folder / "again").symlink_to(folder / "a")
    (folder / "twice").symlink_to(elsewhere / "deep")
    words = text_of(text, folder).replace("\0", " ").split()
    # What is left over at the end is in no sample.
    assert [words.count(word) for word in ("alpha", "beta", "gamma")] in (
        [50, 50, 50],
        [50, 50, 49],
    )
    tokenizer("tokens", "--text", str(folder), "--to", str(tmp_path / "t"), "--vocabulary", "300")
    assert json.loads((tmp_path / "t/tokens.json").read_text())["documents"] == 3
    for line in caplog.messages[:2:2]:
        assert line.startswith(
            "5 files left out: links to folders above this one, or read under another name"
        )


@pytest.mark.parametrize("command", ["shorten", "remove"])
@pytest.mark.parametrize("micro_batch", ["1", "4"])
@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_token_file_that_changes_under_a_run_is_named(
    text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    command: str, micro_batch: str, workers: str,
) -> None:  # fmt: skip
    for name in ("train_0", "train_1", "val"):
        np.arange(4000, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    # One file is open at a time, as with more files than a process may open.
    monkeypatch.setattr(text.module("data"), "MOST_OPEN", 1)

    class Change:
        """Changes the file after the third step."""

        def after_step(self, state: Any, record: Any) -> None:
            if state.step == 3 and command == "shorten":
                os.truncate(tmp_path / "train_1.bin", 100)
            elif state.step == 3:
                (tmp_path / "train_1.bin").unlink()

    monkeypatch.setattr(text.module("callbacks"), "callbacks", lambda *given: (Change(),))
    words = ("--data.path", str(tmp_path), "--data.vocabulary", "4000", "--data.context", "8")
    words += ("--train.micro-batch-size", micro_batch, "--train.loader-workers", workers)
    words += ("--run-dir", str(tmp_path / "run"), "--train.steps", "40")
    said = text.refuses("train", *SMALL[:-2], *words)
    why = "has become shorter" if command == "shorten" else "can no longer be read: No such file"
    assert said.startswith(f"{tmp_path / 'train_1.bin'} {why}") and "\n" not in said


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with a text."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "text.txt").write_text("At home. " * 200)
    monkeypatch.setenv("HOME", str(home))
    return home


def test_a_tilde_in_a_file_is_the_home_directory(text: Project, home: Path) -> None:
    (home / "a.toml").write_text('run-dir = "~/runs/a"\n[data]\npath = "~/text.txt"\n')
    before = {*text.folder.iterdir()}
    words = (*SMALL[:-2], "--train.steps", "2", "--config=~/a.toml")
    text("train", *words)
    assert (home / "runs/a/checkpoints/step_00000002").is_dir()
    saved = json.loads((home / "runs/a/config.json").read_text())
    assert saved["data"]["path"] == str(home / "text.txt")
    assert {*text.folder.iterdir()} == before


def test_a_typed_tilde_is_the_home_directory(text: Project, tokenizer: Project, home: Path) -> None:
    before = {*text.folder.iterdir()} | {*tokenizer.folder.iterdir()}
    where = "--run-dir=~/runs/b"
    text("train", *SMALL[:-2], "--train.steps", "2", "--data.path=~/text.txt", where)
    text("train", "--device", "cpu", "--train.steps", "3", "--init-from=~/runs/b", where)
    text("verify", where)
    text("export", where, "--to=~/b.pt")
    text("infer", where, "--device", "cpu", "--tokens", "2")
    assert (home / "runs/b/checkpoints/step_00000003").is_dir() and (home / "b.pt").is_file()
    tokenizer("tokens", "--text=~/text.txt", "--to=~/tokens", "--vocabulary", "300")
    assert (home / "tokens/tokens.json").is_file()
    assert {*text.folder.iterdir()} | {*tokenizer.folder.iterdir()} == before


def test_no_folder_is_named_tilde(
    text: Project, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = text.refuses("train", *SMALL, "--name", "~")
    assert said.startswith("--name '~' is not a plain name")
    # As in a container whose user has no entry in /etc/passwd.
    monkeypatch.setattr(os.path, "expanduser", lambda path: str(path))
    said = text.refuses("train", *SMALL, "--run-dir=~/run")
    assert said == "~/run: the home directory is unknown; give the path without ~"
    (tmp_path / "a.toml").write_text('[data]\npath = "~/text.txt"\n')
    said = text.refuses("train", *SMALL[:-2], "--config", str(tmp_path / "a.toml"))
    assert "~/text.txt: the home directory is unknown" in said and "\n" not in said
    assert not list(text.folder.rglob("~"))


class Pair(NamedTuple):
    """A named tuple, one of whose fields has the name of a method."""

    x: Any
    to: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    """A frozen dataclass."""

    x: Any
    name: str = "a"


class Graph:
    """Moves by itself, to a device alone."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.x.to(device))


class Tensordict(Graph):
    """Moves by itself, without waiting."""

    waits = True

    def to(self, device: torch.device, non_blocking: bool = False) -> "Tensordict":
        moved = Tensordict(self.x.to(device))
        moved.waits = not non_blocking
        return moved


class Encoding(collections.UserDict):
    """As transformers' BatchEncoding, which has more than its items."""

    length = 0


class Registered:
    """A class that a library has registered with torch."""

    def __init__(self, x: Any) -> None:
        self.x = x


pytree.register_pytree_node(
    Registered, lambda batch: ([batch.x], None), lambda values, _: Registered(*values)
)
X = torch.ones(2)


@pytest.mark.parametrize(
    ("batch", "get"),
    [
        ({"x": X, "n": 3}, lambda b: b["x"]),
        (collections.OrderedDict(x=X), lambda b: b["x"]),
        (collections.defaultdict(list, x=X), lambda b: b["x"]),
        (Encoding(x=X), lambda b: b["x"]),
        (types.MappingProxyType({"x": X}), lambda b: b["x"]),
        ([{"x": X}], lambda b: b[0]["x"]),
        ((1, X), lambda b: b[1]),
        (Pair(X, X), lambda b: b.to),
        (collections.deque([X], maxlen=4), lambda b: b[0]),
        (Sample([X]), lambda b: b.x[0]),
        (Graph(X), lambda b: b.x),
        (Tensordict(X), lambda b: b.x),
        (Registered(X), lambda b: b.x),
        (pack_sequence([X, X]), lambda b: b.data),
    ],
    ids=lambda value: (
        type(value).__name__ if not callable(value) or isinstance(value, Graph) else ""
    ),
)
def test_batches_of_any_class_are_moved(text: Project, batch: Any, get: Any) -> None:
    """As torch's pytrees and DataLoader's pinning take them; what was given stays as it was."""
    move = text.module("device").move
    assert move(batch, torch.device("cpu")) is batch
    moved = move(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert get(moved).device.type == "meta" and get(batch).device.type == "cpu"
    if isinstance(batch, Tensordict):
        assert not moved.waits
    if isinstance(batch, collections.defaultdict):
        assert moved["new"] == []
    if isinstance(batch, collections.deque):
        assert moved.maxlen == 4
    if isinstance(batch, Sample):
        assert moved.name == "a"
    if isinstance(batch, PackedSequence):
        assert moved.batch_sizes.tolist() == [2, 2]


def test_an_encoding_of_transformers_is_moved_with_all_it_has(text: Project) -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": X, "words": ["a"]}, n_sequences=1)
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=X)
    move, meta = text.module("device").move, torch.device("meta")
    moved = move(encoding, meta)
    assert type(moved) is transformers.BatchEncoding and moved.n_sequences == 1
    assert moved["input_ids"].is_meta and moved["words"] == ["a"]
    assert move(output, meta).last_hidden_state.is_meta and not output.last_hidden_state.is_meta


def test_a_prompt_of_any_bytes(
    text: Project, tokenizer: Project, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A byte that is no text reaches Python as half a surrogate pair."""
    prompt = os.fsdecode(b"naive \xff")
    for project, content in ((text, b"naive \xff"), (tokenizer, b"naive \xff")):
        where = ("--run-dir", str(tmp_path / project.name))
        project("train", *SMALL, "--train.steps", "1", *where)
        capfdbinary.readouterr()
        project("infer", *where, "--device", "cpu", "--tokens", "1", "--prompt", prompt)
        assert capfdbinary.readouterr().out.startswith(content)
        said = project.refuses("infer", *where, "--device", "cpu", "--prompt", "\ud800")
        assert said.startswith("--prompt is not valid UTF-8: ") and "\n" not in said


def test_a_prompt_of_any_bytes_for_a_tokenizer(
    tokenizer: Project, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    to, run = str(tmp_path / "tokens"), ("--run-dir", str(tmp_path / "run"), "--device", "cpu")
    tokenizer("tokens", "--text", "text.txt", "--to", to, "--vocabulary", "300")
    # One file is for training alone.
    shutil.copy(Path(to) / "train_00000.bin", Path(to) / "val_00000.bin")
    tokenizer("train", "--preset", "tiny", *run, "--data.path", to, "--train.steps", "1")
    capfdbinary.readouterr()
    tokenizer("infer", *run, "--tokens", "1", "--prompt", os.fsdecode(b"naive \xff"))
    assert capfdbinary.readouterr().out.startswith(b"naive ")
    said = tokenizer.refuses("infer", *run, "--prompt", "\ud800")
    assert said.startswith("--prompt is not valid UTF-8: ") and "\n" not in said


def steps_of(project: Project, *words: str) -> int:
    """The steps that a start takes; 109 samples of training data in batches of 8."""
    where = ("--run-dir", str(project.folder / "runs/steps"), "--fresh")
    project("train", *SMALL, *where, *words)
    saved = json.loads((project.folder / "runs/steps/config.json").read_text())
    assert saved["train"]["epochs"] == 0
    return saved["train"]["steps"]


def test_typed_steps_win_over_epochs_from_elsewhere(
    text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets = text.module("model").PRESETS
    long = {**presets["tiny"], "train.epochs": 1.0}
    monkeypatch.setitem(presets, "tiny", long)
    assert steps_of(text) == 14
    assert steps_of(text, "--train.steps", "3") == 3
    # The same number as the preset has.
    assert steps_of(text, "--train.steps=20") == 20
    assert steps_of(text, "--train.epochs", "0.5") == 7
    file = tmp_path / "a.toml"
    file.write_text("train.steps = 5\n")
    assert steps_of(text, "--config", str(file)) == 5
    file.write_text("train.epochs = 0.25\n")
    assert steps_of(text, "--config", str(file)) == 4
    assert steps_of(text, "--config", str(file), "--train.steps", "6") == 6
    assert text.config(train__steps=5).train.epochs == 0
    assert text.config(train={"steps": 5}).train.epochs == 0
    assert text.config(train__steps=5, train__epochs=2).train.epochs == 2


def test_typed_steps_win_over_epochs_of_the_run(text: Project, tmp_path: Path) -> None:
    run = tmp_path / "run"
    text("train", *SMALL, "--run-dir", str(run), "--train.epochs", "0.5")
    saved = json.loads((run / "config.json").read_text())
    saved["train"]["epochs"] = 1.0  # by hand
    (run / "config.json").write_text(json.dumps(saved))
    text("train", "--run-dir", str(run), "--device", "cpu", "--train.steps", "9")
    assert json.loads((run / "status.json").read_text())["step"] == 9
    (run / "config.json").write_text(json.dumps(saved))
    text("train", "--run-dir", str(run), "--device", "cpu")
    assert json.loads((run / "status.json").read_text())["step"] == 14


def test_a_typed_name_wins_over_the_run_directory_of_a_file(text: Project, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f'run-dir = "{tmp_path / "of_file"}"\n')
    words = ("train", *SMALL, "--train.steps", "1", "--config", str(tmp_path / "a.toml"))
    text(*words, "--name", "typed")
    assert (text.folder / "runs/typed/status.json").is_file()
    assert not (tmp_path / "of_file").exists()
    text(*words, "--name", "other", "--run-dir", str(tmp_path / "typed_too"))
    assert (tmp_path / "typed_too/status.json").is_file()


@pytest.mark.parametrize("returned", ["two", "one", "none"])
def test_another_number_of_datasets_is_one_line(
    text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str
) -> None:
    training = text.module("train")
    build = training.build_datasets

    def short(config: Any) -> Any:
        first, second, _ = build(config)
        return {"two": (first, second), "one": first, "none": None}[returned]

    monkeypatch.setattr(training, "build_datasets", short)
    said = text.refuses("train", *SMALL, "--run-dir", str(tmp_path / "run"))
    assert said == (
        "build_datasets (data.py) must return three values: a training set, a validation set, "
        "and a spec with a fingerprint"
    )


def test_checkpoints_that_were_copied_alone_resume(
    text: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the settings of the run, which each of them has."""
    first, second = tmp_path / "first", tmp_path / "second"
    words = ("--train.steps", "3", "--optim.learning-rate", "0.002")
    text("train", *SMALL, *words, "--run-dir", str(first))
    shutil.copytree(first / "checkpoints", second / "checkpoints")
    text("train", "--device", "cpu", "--run-dir", str(second), "--train.steps", "5")
    assert any(
        line.startswith("config.json is missing: using the settings in") for line in caplog.messages
    )
    saved = json.loads((second / "config.json").read_text())
    assert saved["optim"]["learning_rate"] == 0.002 and saved["model"]["width"] == 32
    assert json.loads((second / "status.json").read_text())["step"] == 5


def test_checkpoints_without_settings_say_what_to_do(text: Project, tmp_path: Path) -> None:
    """Of an earlier release; and what the line says works."""
    run, seal = tmp_path / "run", text.module("checkpoint.manifest").sealed
    text("train", *SMALL, "--train.steps", "2", "--run-dir", str(run))
    (run / "config.json").rename(tmp_path / "all.json")
    for path in (run / "checkpoints").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["config"], manifest["digest"]
        path.write_bytes(seal(manifest))
    said = text.refuses("train", *SMALL, "--run-dir", str(run), "--train.steps", "3")
    assert said == (
        "config.json is missing, and no checkpoint has the run's settings (in "
        f"{run / 'checkpoints'}: copy the run's config.json, or give all settings with --config "
        "FILE.json)"
    )
    all_settings = ("--config", str(tmp_path / "all.json"))
    text("train", *all_settings, "--run-dir", str(run), "--train.steps", "3")
    assert json.loads((run / "status.json").read_text())["step"] == 3
    assert "resumed at step 2" in (run / "logs/train.log").read_text()
