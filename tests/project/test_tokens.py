"""Text becomes tokens and text again, whoever is killed on the way; documents stay documents."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tests.conftest import Project, project_fixture

ANSWERS = {"parallelism": "single", "checkpoint": "dcp", "tracker": "none"}
project = project_fixture("of_tokens", **ANSWERS, text="tokenizer", samples="mixture")
WORDS = [
    "the",
    "of",
    "naïve",
    "日本",
    "<|endoftext|>",
    "and\ttabs",
    "{}",
    "def",
    "return",
    "1234",
    "…",
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Forty text files in two folders, and others that are no text."""
    for number in range(40):
        words = random.Random(number).choices(WORDS, k=100 + number)
        path = tmp_path / "text" / "ab"[number % 2] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(words) + "\n" * (number % 3))
    (tmp_path / "text/a/.hidden").write_text("hidden")
    (tmp_path / "text/a/binary").write_bytes(b"\0\1\2" * 100)
    (tmp_path / "text/a/empty.txt").touch()
    return tmp_path / "text"


def tokens(project: Project, text: Path, to: Path, *words: str) -> dict[str, Any]:
    """What tokens.json says of the folder that the command makes."""
    words = ("--text", str(text), "--to", str(to), *words)
    project("tokens", "--vocabulary", "400", *words)
    return json.loads((to / "tokens.json").read_text())


def test_what_stands_beside_tokens_says_what_they_are(project: Project, tmp_path: Path) -> None:
    (np.arange(500) % 50).astype("<u2").tofile(tmp_path / "tokens.bin")
    note = {"vocabulary": 50, "token_type": "uint16", "end_of_text": 3, "tokenizer": "abc"}
    (tmp_path / "tokens.json").write_text(json.dumps(note))
    build = project.module("source").build_datasets
    spec = build(project.config(data__path=tmp_path))[2]
    assert (spec.vocabulary, spec.encoding) == (50, "abc 3")
    assert build(project.config(data__path=tmp_path, data__vocabulary=64))[2].vocabulary == 64


@pytest.fixture
def small(project: Project, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with shards of a few files."""
    module = project.module("tokens")
    monkeypatch.setattr(module, "SHARD", 2000)
    monkeypatch.setattr(module, "BATCH", 500)
    return module


def documents(folder: Path) -> list[str]:
    """The documents of a folder of tokens, by another reader of its files."""
    note = json.loads((folder / "tokens.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found: list[str] = []
    for path in folder.glob("*.bin"):
        tokens = np.fromfile(path, note["token_type"])
        assert tokens[-1] == note["end_of_text"]
        ends = np.flatnonzero(tokens == note["end_of_text"])
        for part in np.split(tokens, ends + 1)[:-1]:
            found.append(tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False))
    return sorted(found)


def test_every_document_comes_back_as_it_was(project: Project, text: Path, tmp_path: Path) -> None:
    note = tokens(project, text, tmp_path / "tokens")
    wanted = [path.read_text() for path in text.glob("*/*.txt") if path.stat().st_size]
    assert documents(tmp_path / "tokens") == sorted(wanted)
    assert note["documents"] == 40 and 257 < note["vocabulary"] <= 400
    assert note["bytes"] == sum(len(text.encode()) for text in wanted)
    found = {path.name: path.stat().st_size // 2 for path in (tmp_path / "tokens").glob("*.bin")}
    assert found == {"train_00000.bin": note["train"], "val_00000.bin": note["val"]}
    again = tokens(project, text, tmp_path / "again")
    assert note == again
    names = {path.name for path in (tmp_path / "tokens").iterdir()}
    assert names == {"tokenizer.json", "tokens.json", *found}
    for name in names:
        files = (tmp_path / folder / name for folder in ("tokens", "again"))
        assert next(files).read_bytes() == next(files).read_bytes()


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_files_may_say_what_they_are_for(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    """By their names; what is not UTF-8 text is left out with one line."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("train", "more", "valid", "test"):
        texts = [f"{name} {i}" for i in range(40)]
        lines = [json.dumps({"text": text}) for text in texts] if ending == "jsonl" else texts
        (folder / f"{name}.{ending}").write_text("\n".join(lines))
    (folder / "packed.gz").write_bytes(b"\x1f\x8b\0")
    (folder / f"wide.{ending}").write_text("wide", "utf-16")
    note = tokens(project, folder, tmp_path / "tokens")
    for name, words in (("train", {"train", "more"}), ("val", {"valid"})):
        part = tmp_path / name
        part.mkdir()
        for file in (tmp_path / "tokens").glob("*.json"):
            (part / file.name).write_bytes(file.read_bytes())
        for file in (tmp_path / "tokens").glob(f"{name}_*.bin"):
            (part / file.name).write_bytes(file.read_bytes())
        found = " ".join(documents(part)).split()
        assert {word for word in found if word.isalpha()} == words
    assert note["documents"] == (120 if ending == "jsonl" else 3)
    lines = [line for line in caplog.messages if "files left out: " in line]
    assert "packed.gz" in lines[0] and f"test.{ending}" in lines[1] and len(lines) == 2


def test_a_name_need_not_be_utf_8(project: Project, text: Path, tmp_path: Path) -> None:
    (text / os.fsdecode(b"z\xfcrich.txt")).write_text("the of the")
    assert tokens(project, text, tmp_path / "tokens")["documents"] == 41
    assert "the of the" in documents(tmp_path / "tokens")


def test_a_model_is_trained_on_them_and_answers_in_text(
    project: Project, text: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    tokens(project, text, tmp_path / "tokens")
    run_dir = str(tmp_path / "run")
    words = ("--preset", "tiny", "--device", "cpu", "--run-dir", run_dir)
    words += ("--data.path", str(tmp_path / "tokens"), "--data.documents", "separate")
    project("train", *words)
    capfdbinary.readouterr()
    project(
        "infer", "--run-dir", run_dir, "--device", "cpu", "--prompt", "naïve 日本 <|endoftext|>"
    )
    assert capfdbinary.readouterr()[0].startswith("naïve 日本 <|endoftext|>".encode())
    sample = (tmp_path / "run/samples/step_00000020.txt").read_text()
    assert any(word in sample for word in ("the", "def", "1234"))
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["data"]["vocabulary"] == 0, "the vocabulary is in tokens.json"
    project("tokens", "--text", str(text), "--to", str(tmp_path / "other"), "--vocabulary", "300")
    (tmp_path / "other/tokenizer.json").rename(tmp_path / "tokens/tokenizer.json")
    assert "not the tokenizer that made" in project.refuses(
        "infer", "--run-dir", run_dir, "--device", "cpu"
    )


def test_what_was_stopped_goes_on_where_it_was(
    project: Project, text: Path, tmp_path: Path, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tokens(project, text, tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("train_*.bin"))) > 5
    encode, done = small.encode, []

    def cut_off(folder: Path, shard: int, *rest: Any) -> Any:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(shard)
        return encode(folder, shard, *rest)

    monkeypatch.setattr(small, "encode", cut_off)
    with pytest.raises(KeyboardInterrupt):
        tokens(project, text, tmp_path / "parts")
    partial = tmp_path / "parts.partial"
    assert not (tmp_path / "parts").exists() and not list(partial.glob(".*"))
    refused = project.refuses(
        *("tokens", "--text", str(text), "--to", str(tmp_path / "parts")), "--vocabulary", "401"
    )
    assert "other text or settings" in refused
    first = done.copy()
    done.clear()
    monkeypatch.setattr(small, "encode", lambda f, n, *rest: done.append(n) or encode(f, n, *rest))
    assert tokens(project, text, tmp_path / "parts") == note
    assert not {*first} & {*done} and not partial.exists()
    assert documents(tmp_path / "parts") == documents(tmp_path / "whole")


def test_a_killed_one_leaves_nobody_and_goes_on(
    project: Project, text: Path, tmp_path: Path
) -> None:
    (text / "long.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=2_000_000)))
    words = ["tokens", "--text", str(text), "--to", str(tmp_path / "tokens"), "--vocabulary", "300"]
    command = [sys.executable, "-m", project.name, *words]
    environment = {**os.environ, "PYTHONPATH": str(project.folder / "src")}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe) as process:
        partial, end = tmp_path / "tokens.partial", time.monotonic() + 120
        while not list(partial.glob(".train*")) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)  # its pipes end when nobody holds them any more
    assert list(partial.glob(".train*")) and not (tmp_path / "tokens").exists()
    project(*words)
    assert len(documents(tmp_path / "tokens")) == 41 and not partial.exists()


lines = st.lists(st.text(max_size=40), min_size=1, max_size=30)


@given(lines, st.integers(1, 200), st.booleans())
def test_every_line_is_in_one_piece(
    project: Project,
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    shard: int,
    ends: bool,
) -> None:
    module = project.module("tokens")
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    content = "\n".join(json.dumps({"body": text}) for text in texts)
    path.write_text(content + "\n" * ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHARD", shard)
        _, pieces = module.divide(path, "body")
    found = [part.text for piece in pieces for part in module.read_chunks(piece, "body")]
    assert found == texts


@given(st.binary(max_size=200), st.integers(1, 7))
def test_any_bytes_are_some_text(
    project: Project, tmp_path_factory: pytest.TempPathFactory, content: bytes, length: int
) -> None:
    module = project.module("tokens")
    path = tmp_path_factory.mktemp("bytes") / "x.txt"
    path.write_bytes(content)

    @contextlib.contextmanager
    def shorter(name: Path, mode: str) -> Iterator[Any]:
        with open(name, mode) as file:
            yield SimpleNamespace(read=lambda _: file.read(length), readline=lambda _: b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open", shorter, raising=False)
        found = "".join(p.text for p in module.read_chunks(module.Piece(path, 0, 9, False), "text"))
    assert found == content.decode(errors="replace")


@pytest.mark.parametrize(
    "line", ['{"text": 1}', '{"other": "a"}', "[1]", '"a"', "no json", "[" * 100_000, '{"text": '],
    ids=range(7),
)  # fmt: skip
def test_a_line_that_is_none_is_named(
    project: Project, tmp_path: Path, small: Any, line: str
) -> None:
    good = json.dumps({"text": "all is well"})
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    words = ("tokens", "--text", str(tmp_path / "a.jsonl"), "--to", str(tmp_path / "tokens"))
    refused = project.refuses(*words, "--vocabulary", "300")
    assert f"a.jsonl, the line at byte {len(good) + 2}" in refused and "'text'" in refused


def test_a_given_tokenizer_is_used(
    project: Project, text: Path, tmp_path: Path, small: Any
) -> None:
    note = tokens(project, text, tmp_path / "one")
    given = ("--tokenizer", str(tmp_path / "one/tokenizer.json"))
    other = tokens(project, text / "a", tmp_path / "two", *given)
    assert other["tokenizer"] == note["tokenizer"]
    words = ("tokens", "--text", str(text), "--to", str(tmp_path / "three"))
    refused = project.refuses(*words, *given, "--end-of-text", "</s>")
    assert "no token '</s>'" in refused
    (tmp_path / "none.json").write_text("{}")
    assert "cannot be read" in project.refuses(*words, "--tokenizer", str(tmp_path / "none.json"))
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    empty = ("--tokenizer", str(tmp_path / "empty.json"))
    assert "no token '<|endoftext|>'" in project.refuses(*words, *empty)
    assert not (tmp_path / "three").exists()


def test_the_sample_for_a_tokenizer_is_of_all_text(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small file before a large one, and of many small ones; all of it if there is little."""
    module = project.module("tokens")
    monkeypatch.setattr(module, "SAMPLE", 1000)
    for name, texts in {
        "large": ["licence\n", "word\n" * 100_000],
        "small": [f"{number:03} \n" * 10 for number in range(300)],
        # In UTF-8 twice as many bytes as characters.
        "cyrillic": [f"{number:03} я\n" * 10 for number in range(300)],
        "little": ["ä\n" * 100, "b\n" * 100],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        for number, content in enumerate(texts):
            (folder / f"{number:03}.txt").write_text(content)
        _, pieces = module.divide(folder, "text")
        monkeypatch.setattr(module, "SAMPLE", 1000)
        sampled = "".join(module.sample(pieces, "text"))
        if name == "large":
            # A text is read a megabyte at a time.
            assert sampled.startswith("licence") and sampled.count("word") == 100_000
        elif name in ("small", "cyrillic"):
            files = {int(word) for word in sampled.split() if word != "я"}
            assert 1000 <= len(sampled.encode()) < 1100
            assert 15 <= len(files) <= 25 and min(files) < 30 and max(files) > 270
        else:
            assert sampled == "".join(texts)


def test_a_tokenizer_that_cuts_or_pads_does_neither(
    project: Project, text: Path, tmp_path: Path, small: Any
) -> None:
    """As transformers saves both with a tokenizer for which they were enabled."""
    note = tokens(project, text, tmp_path / "one")
    tokenizer = Tokenizer.from_file(str(tmp_path / "one/tokenizer.json"))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=4000)
    tokenizer.save(str(tmp_path / "cuts.json"))
    other = tokens(project, text, tmp_path / "two", "--tokenizer", str(tmp_path / "cuts.json"))
    del note["made_by"], other["made_by"]
    assert other == note


def test_text_in_another_encoding_is_named(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("naïve " * 100)
    (folder / "b.txt").write_bytes("déjà vu à Zürich ".encode("latin-1") * 100)
    # A character may stand across the end of what is looked at.
    (folder / "c.txt").write_text("xx" + ("ä" * 49 + "\n") * 12_000)
    assert (folder / "c.txt").read_bytes()[: 1 << 20].endswith("ä".encode()[:1])
    tokens(project, folder, tmp_path / "tokens")
    (warned,) = [line for line in caplog.messages if "UTF-8" in line]
    assert warned.startswith("1 files are not UTF-8") and "b.txt" in warned


def test_tokens_of_different_tokenizers_are_not_mixed(
    project: Project, text: Path, tmp_path: Path, small: Any
) -> None:
    for name in "ab":
        tokens(project, text / name, tmp_path / f"tokens/{name}")
    words = (
        "train",
        "--preset",
        "tiny",
        "--device",
        "cpu",
        "--data.path",
        str(tmp_path / "tokens"),
    )
    words += ("--run-dir", str(tmp_path / "run"))
    assert "differ in vocabulary, tokenizer" in project.refuses(*words, "--data.mix", "a=1,b=1")
    given = ("--tokenizer", str(tmp_path / "tokens/a/tokenizer.json"))
    tokens(project, text / "b", tmp_path / "tokens/c", *given)
    # Attention is masked at one token: documents that end with another would run together.
    tokens(project, text / "b", tmp_path / "tokens/d", *given, "--end-of-text", "e")
    refused = project.refuses(*words, "--data.mix", "a=1,d=1")
    assert "tokenizer, end of text" in refused and "\n" not in refused
    project(*words, "--data.mix", "a=1,c=1")
    project("infer", "--run-dir", str(tmp_path / "run"), "--device", "cpu", "--tokens", "3")


def test_bad_input_gets_one_line(project: Project, text: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "bare").mkdir()
    words = ("tokens", "--to", str(tmp_path / "tokens"), "--text")
    for rest, line in (
        ((str(tmp_path / "none"),), "does not exist"),
        ((str(tmp_path / "bare"),), "has no text"),
        ((str(text), "--to", str(tmp_path / "there")), "exists already"),
        ((str(text), "--to", str(text / "tokens")), "is inside the folder of the text"),
    ):
        assert line in project.refuses(*words, *rest)
    config = project.module("tokens").TokensConfig
    with pytest.raises(project.module("errors").UserError, match="must be at least 257"):
        config(text, tmp_path / "tokens", vocabulary=100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "text", "there"]
